"""Chat tokens around worlds: each piece is encoded once and the policy's own words never again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from quintet.config.native import RolloutConfig
from quintet.rollout.parity import Comparison, Reply, compare
from quintet.rollout.segments import Frame, TextEncoder
from quintet.rollout.templates import Anatomy, Renderer, TemplateReport, take_apart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["PART", "ChatFormat", "Dialogue", "PromptChange"]

BYTE = re.compile("<0x[0-9A-F]{2}>")
PART = "\ufffd"
"""What a tokenizer makes of a letter of which it hasn't all bytes."""


class ChatFormat:
    """A chat template taken apart: what stands before, between and after the messages."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        template: str | None = None,
        thinking: bool | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        """`template` names another chat template than the tokenizer's own; `thinking` is told to templates that ask
        (Qwen3's `enable_thinking`); `ends` are tokens that end a reply besides the template's and the tokenizer's.

        Raises:
            ConfigError: no template, or one that isn't a sequence of messages whose replies end with a token.
        """
        self._tokenizer = tokenizer
        self._render = Renderer(tokenizer, template, thinking=thinking)
        self.anatomy: Anatomy = take_apart(self._render, *_tokens_of(tokenizer), tokenizer.eos_token)
        anatomy = self.anatomy
        self._texts = TextEncoder(tokenizer, anatomy.control)
        self.end_id: int = tokenizer.convert_tokens_to_ids(anatomy.end)
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys((self.end_id, *own, *ends)))
        """Tokens that end a reply, the template's first."""
        self._first = Frame(self._texts, anatomy.first, first=True)
        self._closed = Frame(self._texts, (anatomy.end + anatomy.after_end, anatomy.header))
        self._open = Frame(self._texts, (anatomy.before_end + anatomy.end + anatomy.after_end, anatomy.header))

    @classmethod
    def under(cls, config: RolloutConfig, tokenizer: PreTrainedTokenizerFast, ends: Sequence[int] = ()) -> ChatFormat:
        """As the configuration wants it: a template that asks is told whether the policy thinks."""
        return cls(tokenizer, thinking=config.think, ends=ends)

    @property
    def report(self) -> TemplateReport:
        """Where the template can't be followed, and what is done there."""
        ends = tuple(map(str, self._tokenizer.convert_ids_to_tokens(list(self.end_ids))))
        return TemplateReport(self.anatomy.end, ends, self.anatomy.differences)

    @property
    def begun(self) -> str:
        """What of the reply the prompt has already: `<think>` and a line's end, where a template asks with them.
        Empty with others."""
        return self.anatomy.begun

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a message's words. They are words: none becomes a control token."""
        return self._texts.plain(text)

    def holds_control(self, text: str) -> bool:
        """Whether the words spell a control token, which is written as letters then."""
        return self._texts.holds_control(text)

    def first(self, system: str, user: str) -> tuple[int, ...]:
        """Prompt of a dialogue that begins."""
        return self._first.encode(*self.anatomy.opening(system, user))

    def next(self, user: str, *, closed: bool) -> tuple[int, ...]:
        """What follows a reply; `closed` says that the reply itself ends with the end token."""
        words = self.anatomy.again(user)
        if not closed:
            return self._open.encode(words)
        # what stands behind the end token is encoded as it stands there
        return self._closed.encode(words)[1:]

    def written(self, text: str) -> tuple[int, ...]:
        """Tokens of a reply that is shown to the policy: its words as the template has them behind what the policy is
        asked with, and the end token. Blanks that the template would strip stay."""
        words = text.removeprefix(self.begun) if text.startswith(self.begun) else text.removeprefix(self.begun.strip())
        return (*self.encode(self.anatomy.lead + words), self.end_id)

    def decode(self, tokens: Sequence[int]) -> str:
        """The words of a reply, its end token left out."""
        own = tokens[:-1] if tokens and tokens[-1] in self.end_ids else tokens
        return self._text(own)

    def shortened(self, text: str, limit: int) -> str:
        """As much of the text's beginning as has at most so many tokens; no letter is cut in two."""
        tokens = self.encode(text)
        if len(tokens) <= limit:
            return text
        known = self._text(tokens[:limit]).rstrip(PART)
        # some tokenizers decode without the first blank; a text that ends elsewhere may be spelled by more tokens
        length = len(known) + (not text.startswith(known))
        while len(self.encode(text[:length])) > limit:
            length -= 1
        return text[:length]

    def reply(self, tokens: Sequence[int]) -> Reply:
        """What the policy wrote, as text in the midst of a dialogue."""
        if tokens and tokens[-1] in self.end_ids:
            return Reply(self._texts.text(tokens[:-1]), str(self._tokenizer.convert_ids_to_tokens(tokens[-1])))
        return Reply(self._texts.text(tokens), "")

    def compare(self, system: str, observations: Sequence[str], replies: Sequence[Sequence[int]]) -> Comparison:
        """A dialogue held against the template over the whole of it: one observation more than there are replies."""
        return compare(self.anatomy, self._render, system, observations, [self.reply(tokens) for tokens in replies])

    def _text(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


def _tokens_of(tokenizer: PreTrainedTokenizerFast) -> tuple[set[str], set[str]]:
    """Special tokens, and all that were added to the vocabulary. That of an unknown word and those of single bytes
    are ordinary here: any text may hold them."""
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    special -= {"", tokenizer.unk_token}
    return {token for token in special if not BYTE.fullmatch(token)}, {token.content for token in added}


class PromptChange(StrEnum):
    """What became of a world's words on their way into a prompt; counted under `prompt/<value>`."""

    OBSERVATION_CUT = "observation_cut"
    """The observation was longer than `max_observation_tokens` and lost its end."""
    START_CUT = "start_cut"
    """The first prompt was longer than `max_start_tokens` and lost its beginning."""
    WINDOW = "window"
    """Earlier turns are left out: there are more than `window_size`."""
    CONTROL_AS_TEXT = "control_as_text"
    """The observation spells a control token, which is written as letters."""
    REPLY_CLOSED = "reply_closed"
    """The reply before it lacked its end token, which was put behind it."""


class Dialogue:
    """The context of one game: whole history, or its last `window` observations.

    The end of an observation beyond `max_observation` tokens is left out, and so is the beginning of a
    first prompt beyond `max_start` tokens; None cuts nothing.
    """

    def __init__(
        self,
        chat: ChatFormat,
        system: str,
        window: int | None,
        *,
        max_start: int | None = None,
        max_observation: int | None = None,
    ) -> None:
        self._chat = chat
        self._max_start = max_start
        self._max_observation = max_observation
        self._system = _sound(system)
        self._window = window
        self._observations: list[str] = []
        self._replies: list[tuple[int, ...]] = []
        self._prompt: tuple[int, ...] = ()
        self._changes: list[PromptChange] = []

    @classmethod
    def under(cls, config: RolloutConfig, chat: ChatFormat, system: str) -> Dialogue:
        """A dialogue as the configuration wants it, for games that are played and for demonstrated ones alike."""
        return cls(
            chat,
            system,
            config.window_size,
            max_start=config.max_start_tokens,
            max_observation=config.max_observation_tokens,
        )

    @property
    def changes(self) -> tuple[PromptChange, ...]:
        """What became of the last observation's words and of the prompt that it completed."""
        return tuple(self._changes)

    def observe(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Take the world's words. Gives `(whole prompt, new tokens, continues)`: the new tokens are
        the end of the prompt when the turn continues the sequence before, else all of it."""
        self._changes = []
        self._observations.append(self._cut(_sound(text)))
        if self._replies and not self._is_closed(self._replies[-1]):
            self._changes.append(PromptChange.REPLY_CLOSED)
        oldest = self._oldest
        if oldest == 0 and self._replies:
            new = self._following(self._replies[-1], self._observations[-1])
            self._prompt += self._replies[-1] + new
            return self._prompt, new, True
        if oldest:
            self._changes.append(PromptChange.WINDOW)
        self._prompt = self._begin(oldest)
        return self._prompt, self._prompt, False

    def reply(self, tokens: tuple[int, ...]) -> None:
        """Keep the policy's words as sampled."""
        self._replies.append(tokens)

    def compare(self) -> Comparison:
        """What the prompt has of the dialogue, held against the template over the whole of that. Of a dialogue whose
        last word is the policy's, with an empty observation after it."""
        waiting = len(self._replies) == len(self._observations)
        oldest = max(0, self._oldest - waiting)
        observations = self._observations[oldest:] + [""] * waiting
        return self._chat.compare(self._system, observations, self._replies[oldest:])

    @property
    def _oldest(self) -> int:
        """The first observation that the prompt holds."""
        return 0 if self._window is None else max(0, len(self._replies) + 1 - self._window)

    def _begin(self, oldest: int) -> tuple[int, ...]:
        """A prompt from that observation on."""
        prompt = self._chat.first(self._system, self._observations[oldest])
        if self._max_start is not None and len(prompt) > self._max_start:
            self._changes.append(PromptChange.START_CUT)
            prompt = prompt[-self._max_start :]
        for reply, observation in zip(self._replies[oldest:], self._observations[oldest + 1 :], strict=True):
            prompt += reply + self._following(reply, observation)
        return prompt

    def _following(self, reply: tuple[int, ...], observation: str) -> tuple[int, ...]:
        return self._chat.next(observation, closed=self._is_closed(reply))

    def _is_closed(self, reply: tuple[int, ...]) -> bool:
        return reply[-1:] == (self._chat.end_id,)

    def _cut(self, text: str) -> str:
        if self._chat.holds_control(text):
            self._changes.append(PromptChange.CONTROL_AS_TEXT)
        if self._max_observation is None:
            return text
        kept = self._chat.shortened(text, self._max_observation)
        if len(kept) < len(text):
            self._changes.append(PromptChange.OBSERVATION_CUT)
        return kept


def _sound(text: str) -> str:
    """The text without halves of surrogate pairs, which no encoding can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
