"""Tokenization of prompts by the chat template, and incremental detokenization of responses."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from quintet.data.chat_template_renderer import TemplateLimitError, TemplateRenderingError, render_chat_template
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.rollout.chat.tool_calls import FORCED_START, PROBE_TOOL, renders_tool_calls
from quintet.rollout.engines.stop_strings import GrowingText, StopPrefix
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.body_parts import Message
from quintet.runtime.serving.request_schema import ChatBody
from quintet.runtime.serving.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

StopTexts = Sequence[tuple[str, Sequence[int]]]
"""Stop texts and their `borders`."""
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables of chat templates that requests cannot set by `chat_template_kwargs`."""
MAX_MESSAGE_KEYS = 8
"""Maximum number of different keys of messages that are passed to the chat template: each costs a rendering."""
ANSWER_KEYS: Mapping[str, Collection[str]] = {
    "name": ("assistant", "tool"),
    "reasoning": ("assistant",),
    "reasoning_content": ("assistant",),
}
"""Roles of the messages in which a key may have no effect: servers add it to answers, and libraries to tool results."""


@dataclass(frozen=True, slots=True)
class Response:
    """Text of a generation."""

    text: str
    """Full text without the end token."""
    returned_text: str
    """Text to be returned: up to the stop text."""
    ended_by_stop_token: bool
    """Whether the last token is a stop token, which is not part of the text."""
    stopped_by: int | str | None
    """Stop token or stop text of the request that ended it, if any."""


class ChatTokenizer:
    """Thread-safe tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stop_token_ids: Sequence[int],
        images: ImagePrompts | None = None,
        placeholders: Sequence[int] = (),
    ) -> None:
        """`stop_token_ids` are the tokens that end a response. `images` converts images to tokens; None if the model
        reads none. `placeholders` are the tokens that stand for images and videos in other programs, those of images
        first."""
        self.images = images
        self.placeholders = tuple(placeholders)
        self._tokenizer = tokenizer
        # the first call switches truncation and padding off; later calls only read, so that threads need no lock
        tokenizer.encode("")
        self.stop_token_ids = tuple(stop_token_ids)
        self.token_bytes = TokenBytes(tokenizer)
        self.max_token_length = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token: a text of n characters has at least n / max_token_length tokens."""

    @property
    def template(self) -> str:
        """Text of the chat template; empty if there is none."""
        template = self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else str(template or "")

    def encode(self, text: str, *, special: bool = False, markers: Collection[str] = ()) -> tuple[int, ...]:
        """Encode a text; with `special`, add the special tokens around it. `markers` are those of images, which
        only chats have.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode: unpaired surrogate at character {error.start}"
            ) from None
        if not markers or self.images is None:
            return tuple(self._tokenizer.encode(text, add_special_tokens=special))
        tokens: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, markers))})", text):
            tokens += self.images.tokens(part) if part in markers else self.encode(part)
        return tuple(tokens)

    def with_placeholders(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return prompt tokens as other programs write them, with a placeholder for each token of an image."""
        return tuple(token if token >= 0 else self.placeholders[0] for token in tokens)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def token_text(self, token: int) -> str:
        """Decode a single token."""
        return self.decode((token,))

    def render(self, body: ChatBody, markers: Sequence[str] = ()) -> str:
        """Render a conversation by the chat template, up to the start of the response, with `markers` in place of its
        images.

        Raises:
            RequestError: there is no template, or it fails on the conversation, exceeds a limit or ignores a part.
        """
        template = self.template
        if not template:
            raise RequestError("the tokenizer has no chat template: use /v1/completions", param="messages")
        self._check_variables(body.chat_template_kwargs)
        if body.tools and "tools" not in template:
            raise RequestError("tools: the chat template does not support tools", param="tools")
        if body.parses_tool_calls and not self._reads_tool_calls:
            message = 'calls in the format of this chat template are not parsed: with "none" they remain text'
            raise RequestError(f"tool_choice: {message}", param="tool_choice")
        remaining = iter(markers)
        messages = [_template_message(message, remaining) for message in body.messages]
        render = partial(
            render_chat_template,
            self._tokenizer,
            add_generation_prompt=body.add_generation_prompt,
            variables=self._variables(body),
        )
        try:
            text = render(messages)
        except (TemplateRenderingError, TemplateLimitError) as error:
            raise RequestError(f"the chat template failed on these messages: {error}", param="messages") from error
        _check_keys(body, messages, text, render)
        if not all(marker in text for marker in markers):
            raise RequestError("messages: the chat template does not show all images", param="messages")
        return text + FORCED_START if body.forced_tools else text

    @cached_property
    def _reads_tool_calls(self) -> bool:
        """Whether calls in the format of the chat template are parsed."""
        render, variables = partial(render_chat_template, self._tokenizer), {"tools": [PROBE_TOOL]}
        return renders_tool_calls(self.template, partial(render, add_generation_prompt=False, variables=variables))

    def _check_variables(self, names: Mapping[str, Any]) -> None:
        for name in names:
            if name in RESERVED_VARIABLES or name not in self.template or not name.isidentifier():
                param = f"chat_template_kwargs.{name}"
                raise RequestError(f"{param}: the chat template has no such variable", param=param)

    def _variables(self, body: ChatBody) -> dict[str, Any]:
        """Return the variables of the chat template."""
        variables: dict[str, Any] = dict(body.chat_template_kwargs)
        if body.tools:
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
        if body.reasoning_effort is not None:
            if "reasoning_effort" in self.template:
                variables.setdefault("reasoning_effort", body.reasoning_effort)
            else:
                body.ignored["reasoning_effort"] = None
        return variables

    def answer(
        self, request: Request, generation: Generation, *, include_stop_text: bool, skip_special_tokens: bool
    ) -> Response:
        """Decode a generation; `include_stop_text` includes the stop text in the returned text."""
        tokens, stopped = generation.tokens, generation.finish_reason is FinishReason.STOP
        if stopped and tokens and tokens[-1] in request.stop_token_ids:
            text = self.decode(tokens[:-1])
            returned = self.decode(tokens[:-1], skip_special_tokens=True) if skip_special_tokens else text
            stopped_by = None if tokens[-1] in self.stop_token_ids else tokens[-1]
            return Response(text, returned, ended_by_stop_token=True, stopped_by=stopped_by)
        text = self.decode(tokens)
        returned = self.decode(tokens, skip_special_tokens=True) if skip_special_tokens else text
        if not stopped or not request.stop_strings:
            return Response(text, returned, ended_by_stop_token=False, stopped_by=None)
        before = len(self.decode(tokens[:-1], skip_special_tokens=skip_special_tokens))
        end, stop = _find_stop(returned, before, request.stop_strings)
        returned = returned[: end + len(stop) * include_stop_text]
        return Response(text, returned, ended_by_stop_token=False, stopped_by=stop or None)


def _template_message(message: Message, markers: Iterator[str]) -> dict[str, Any]:
    """Return a message as the template sees it; its images get the next markers."""
    call_id = {"tool_call_id": message.tool_call_id} if message.tool_call_id is not None else {}
    return {"role": message.role, "content": message.text_with(markers), **call_id, **message.others}


def _check_keys(
    body: ChatBody, messages: Sequence[Mapping[str, Any]], text: str, render: Callable[[Sequence[Any]], str]
) -> None:
    """Check that the text of a conversation has the further keys of its messages: it is another one without them.

    Raises:
        RequestError: it has not, and the key is not one that servers add to their answers.
    """
    keys = {name: None for message in body.messages for name in message.model_extra or ()}
    if len(keys) > MAX_MESSAGE_KEYS:
        raise RequestError(f"messages: {len(keys)} keys that OpenAI's do not have: {', '.join(keys)}", param="messages")
    for name in keys:
        try:
            is_shown = render([{**message, name: None} for message in messages]) != text
        except (TemplateRenderingError, TemplateLimitError):
            continue
        index = next(index for index, message in enumerate(messages) if name in message)
        if is_shown:
            continue
        if messages[index]["role"] not in ANSWER_KEYS.get(name, ()):
            param = f"messages.{index}.{name}"
            raise RequestError(f"{param}: the chat template does not use it", param=param)
        body.ignored[f"messages.{name}"] = None


def _find_stop(text: str, before: int, stops: Sequence[str]) -> tuple[int, str]:
    """Return the position of the stop text and the stop text itself; the end of the text and "" if there is none. Only
    a stop text that ends in the last token counts: it starts at `before` minus its length at the earliest."""
    longest = max(map(len, stops))
    matches = [(index, stop) for stop in stops if (index := text.find(stop, max(0, before - longest))) >= 0]
    return min(matches, default=(len(text), ""))


class StreamingText:
    """Text of a response that grows while it is streamed. Text that may become a stop text, or an incomplete
    character, is held back."""

    def __init__(self, tokenizer: ChatTokenizer, stops: StopTexts, *, skip_special_tokens: bool) -> None:
        self._growing = GrowingText(partial(tokenizer.decode, skip_special_tokens=skip_special_tokens))
        self._prefixes = [StopPrefix(stop, borders) for stop, borders in stops]
        self.sent = 0
        """Number of tokens whose text has been returned."""
        self._num_returned = 0

    def update(self, tokens: Sequence[int]) -> str:
        """Return the new text of a response that has these tokens so far; empty if there is none to return yet."""
        growing, start = self._growing, len(self._growing.text)
        growing.update(tokens)
        added = growing.text[start:]
        for prefix in self._prefixes:
            prefix.update(added)
        num_held_back = max((prefix.length for prefix in self._prefixes), default=0)
        new = growing.text[self._num_returned : len(growing.text) - num_held_back]
        if new:
            self._num_returned += len(new)
            self.sent = growing.num_tokens
        return new

    def remaining(self, text: str) -> str:
        """Return the text of a finished response that has not been returned yet."""
        return text[self._num_returned :]
