"""Between text and tokens: prompts through the chat template, and answers as far as they are to be seen."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quintet.records import Generation, Request, StopReason
from quintet.runtime.serving.schema import ChatBody, Message, Refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Answer", "Words", "Writing"]

UNFINISHED = "\ufffd"
"""What a letter decodes to of which a byte is still missing."""
OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables of a chat template that a request names otherwise, or not at all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a generation says."""

    text: str
    """All of it, its end token left out."""
    shown: str
    """As it is answered: without what stands behind a stop text."""
    closed: bool
    """Its last token ended it, and isn't in the text."""
    stopped_by: int | str | None
    """The request's own token or text that ended it; None where the model's end token did, or nothing."""


class Words:
    """A tokenizer that many threads use."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, ends: Sequence[int]) -> None:
        """`ends` are the model's end tokens."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self.ends = tuple(ends)

    @property
    def template(self) -> str:
        """The chat template's text; empty where there is none."""
        found = self._tokenizer.chat_template
        return "\n".join(found.values()) if isinstance(found, dict) else str(found or "")

    def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Tokens of a text; with `special` those around it, too.

        Raises:
            Refusal: it isn't Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refusal(f"half a surrogate pair at character {error.start} of the prompt") from None
        # a fast tokenizer can't be told of special tokens by two threads at once
        with self._lock:
            return tuple(self._tokenizer.encode(text, add_special_tokens=special))

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of tokens."""
        with self._lock:
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    def spelt(self, token: int) -> str:
        """How one token is written."""
        return self.decode((token,))

    def render(self, body: ChatBody) -> str:
        """A conversation in the chat template, and where the answer begins.

        Raises:
            Refusal: there is no template, it doesn't take the conversation, or doesn't look at all that it says.
        """
        from jinja2 import TemplateError

        template = self.template
        if not template:
            raise Refusal("the model's tokenizer has no chat template: ask /v1/completions", param="messages")
        self._check_variables(body.chat_template_kwargs)
        if body.tools and "tools" not in template:
            raise Refusal("tools: the model's chat template doesn't show any", param="tools")
        told: dict[str, Any] = {"tools": body.tools} if body.tools else {}
        messages = [self._told(message, place) for place, message in enumerate(body.messages)]
        try:
            with self._lock:
                return str(
                    self._tokenizer.apply_chat_template(
                        messages,
                        tokenize=False,
                        add_generation_prompt=body.add_generation_prompt,
                        **told,
                        **body.chat_template_kwargs,
                    )
                )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise Refusal(f"the chat template doesn't take these messages: {error}", param="messages") from error

    def _check_variables(self, given: Mapping[str, Any]) -> None:
        for name in given:
            if name in OURS or name not in self.template or not name.isidentifier():
                param = f"chat_template_kwargs.{name}"
                raise Refusal(f"{param}: the model's chat template has no such variable", param=param)

    def _told(self, message: Message, place: int) -> dict[str, Any]:
        """A message as the template gets it."""
        for name in message.others:
            if name not in self.template:
                param = f"messages.{place}.{name}"
                raise Refusal(f"{param}: the model's chat template doesn't look at it", param=param)
        return {"role": message.role, "content": message.text, **message.others}

    def answer(self, request: Request, generation: Generation, *, keep_stop: bool, skip_special: bool) -> Answer:
        """What a generation says; `keep_stop` leaves the stop text in what is shown."""
        tokens, stopped = generation.tokens, generation.stop is StopReason.STOP
        if stopped and tokens and tokens[-1] in request.stop_ids:
            text = self.decode(tokens[:-1])
            shown = self.decode(tokens[:-1], skip_special=True) if skip_special else text
            return Answer(text, shown, closed=True, stopped_by=None if tokens[-1] in self.ends else tokens[-1])
        text = self.decode(tokens)
        shown = self.decode(tokens, skip_special=True) if skip_special else text
        if not stopped or not request.stop_texts:
            return Answer(text, shown, closed=False, stopped_by=None)
        end, found = _stop(shown, len(self.decode(tokens[:-1], skip_special=skip_special)), request.stop_texts)
        return Answer(text, shown[: end + len(found) * keep_stop], closed=False, stopped_by=found or None)


def _stop(text: str, before: int, stops: Sequence[str]) -> tuple[int, str]:
    """Where a text's stop begins, and which it is: the first that reaches into what stands behind `before`, which the
    last token brought. The text's end and nothing where there is none."""
    longest = max(map(len, stops))
    found = [(place, stop) for stop in stops if (place := text.find(stop, max(0, before - longest))) >= 0]
    return min(found, default=(len(text), ""))


class Writing:
    """An answer that is shown as it grows, piece by piece. What may become a stop text is held back, and so is half a
    letter."""

    def __init__(self, words: Words, stops: Sequence[str], *, skip_special: bool) -> None:
        self._words = words
        self._stops = stops
        self._skip = skip_special
        self._start = self._read = 0
        self._text = ""
        self.sent = 0
        """Tokens whose text has been shown, but for what is held back."""
        self._shown = 0

    def more(self, tokens: Sequence[int]) -> str:
        """New text of an answer that has these tokens so far and goes on; empty where there is none to be shown yet."""
        known = self._words.decode(tokens[self._start : self._read], skip_special=self._skip)
        whole = self._words.decode(tokens[self._start :], skip_special=self._skip)
        if len(whole) > len(known) and not whole.endswith(UNFINISHED):
            # decoded behind the piece before: a tokenizer may write a text's first token otherwise
            self._text += whole[len(known) :]
            self._start, self._read = self._read, len(tokens)
        new = self._text[self._shown : len(self._text) - self._held()]
        if new:
            self._shown += len(new)
            self.sent = self._read
        return new

    def rest(self, shown: str) -> str:
        """What is still to be shown of an answer that has ended."""
        return shown[self._shown :]

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        return max((_overlap(self._text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of `stop`, not all of it, that `text` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
