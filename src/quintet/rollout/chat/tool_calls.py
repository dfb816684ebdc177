"""Tool calls in responses, in the format of Hermes and Qwen: JSON objects between `<tool_call>` tags."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from quintet.data.chat_template_renderer import TemplateLimitError, TemplateRenderingError
from quintet.rollout.chat.chat_format import without_surrogates
from quintet.rollout.chat.template_analysis import THINK

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
FORCED_START = f"{CALL_START}\n"
"""Start of a response that must be a tool call; it is part of the prompt."""
MAX_TAG_TOKENS: Final = 16
"""A tag and whitespace behind it have fewer tokens."""
TAGS: Final = (CALL_START, *THINK)
_TAG: Final = re.compile("|".join(map(re.escape, TAGS)))


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def opens_thought(prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
    """Return whether a prompt ends with an opened thought. `decode` decodes tokens."""
    end = [token for token in prompt[-MAX_TAG_TOKENS:] if token >= 0]
    return decode(end).rstrip().endswith(THINK[0])


def renders_tool_calls(template: str, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> bool:
    """Return whether a chat template shows tools, and asks for calls in this format.

    Others write calls between the same tags, too (XML in Qwen3-Coder, Qwen3.5 and GLM). So `render`, which renders
    messages with the tools of a run or `PROBE_TOOL`, has to write a call that is found again, if it writes calls.
    """
    if "tools" not in template or CALL_START not in template:
        return False
    # templates expect arguments as objects, or as JSON
    for arguments in (_PROBE.arguments, json.loads(_PROBE.arguments)):
        function = {"name": _PROBE.name, "arguments": arguments}
        reply = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        try:
            text = render([{"role": "user", "content": _PROBE.id}, reply]).rpartition(_PROBE.id)[2]
        except (TemplateRenderingError, TemplateLimitError):
            continue
        calls = split_tool_calls(text).calls
        if [(call.name, call.arguments) for call in calls] == [(_PROBE.name, _PROBE.arguments)]:
            return True
        if _PROBE.name not in text:
            return "<function=" not in template and "<arg_key>" not in template
    return False


def call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these functions, given as `{"name": …, "parameters": {…}}`.

    Raises:
        ValueError: two of them define different schemas under the same name.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        # references start at the root, `#/$defs/…`
        arguments = dict(tool.get("parameters") or {"type": "object"})
        for name, definition in arguments.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise ValueError(f"the tools have different schemas named {name!r} in $defs")
        properties = {"name": {"const": tool["name"]}, "arguments": arguments}
        required = list(properties)
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function."""

    name: str
    arguments: str
    """JSON, an object unless the policy wrote another value."""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def to_json(self) -> dict[str, Any]:
        """Return the call as OpenAI writes it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Splits a growing text into content and tool calls. Thoughts and malformed calls remain content.

    A call in a thought is not a call, and an unclosed thought reaches to the end. A call ends where its JSON ends, so
    that its arguments may contain any text.
    """

    def __init__(self, *, forced: bool = False, in_thought: bool = False) -> None:
        """`forced`: the text starts within a call, see `FORCED_START`; `in_thought`: it starts within a thought, which
        the prompt has opened."""
        self._forced = forced
        self._in_thought = in_thought
        self._buffer = FORCED_START if forced else ""
        self.closes_unopened_thought = False
        """Whether a thought was closed that was not opened: the text before it was a thought."""
        self.num_malformed = 0
        """Malformed calls outside of thoughts."""

    def update(self, text: str) -> tuple[str, list[ToolCall]]:
        """Append a text; return the new content and calls. Whitespace before a call, and what may become one, are held
        back."""
        self._buffer += text
        content, calls = self._consume(is_last=False)
        call = self._buffer.find(CALL_START) if not self._in_thought else -1
        tags = TAGS if not self._in_thought else THINK[1:]
        size = call if call >= 0 else len(self._buffer) - max(overlap(self._buffer, tag) for tag in tags)
        visible = self._buffer[:size].rstrip()
        self._buffer = self._buffer[len(visible) :]
        return content + visible, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest. A call whose end tag is missing counts if its JSON is complete."""
        forced_start = FORCED_START if self._forced and self._buffer.startswith(FORCED_START) else ""
        content, calls = self._consume(is_last=True)
        content += self._buffer
        self._buffer = ""
        return content if calls else content.removeprefix(forced_start), calls

    def _consume(self, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Remove the complete parts from the buffer; return their content and calls."""
        content = ""
        calls = list[ToolCall]()
        position = 0
        for part in _iter_parts(self._buffer, in_thought=self._in_thought, is_last=is_last):
            content += self._buffer[position : part.start].rstrip() if part.calls else self._buffer[position : part.end]
            calls += part.calls
            position, self._in_thought = part.end, part.opens_thought
            self.closes_unopened_thought |= part.closes_unopened_thought
            self.num_malformed += part.malformed
        self._buffer = self._buffer[position:]
        return content, calls


class SplitResponse(NamedTuple):
    """Content and tool calls of a response."""

    content: str
    calls: list[ToolCall]
    num_malformed: int
    """Malformed calls outside of thoughts, which are content."""


def split_tool_calls(text: str, *, forced: bool = False, in_thought: bool = False) -> SplitResponse:
    """Split a whole response into content and tool calls, see `ToolCallParser`. Without an opening tag, the text before
    a closing one is a thought, too.

    >>> content, (call,), _ = split_tool_calls('I look. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    >>> content, call.name, call.arguments
    ('I look.', 'f', '{"x": 1}')
    """
    parser = ToolCallParser(forced=forced, in_thought=in_thought)
    (content, calls), (rest, others) = parser.update(text), parser.finish()
    if parser.closes_unopened_thought and not in_thought:
        return split_tool_calls(text, in_thought=True)
    return SplitResponse(content + rest, [*calls, *others], parser.num_malformed)


def incomplete_call(text: str) -> ToolCall | None:
    """Return the call that a text has begun, which starts behind `FORCED_START` and follows `call_schema`; None if its
    name is incomplete. Its arguments are not JSON.

    >>> incomplete_call('{"name": "move", "arguments": {"way": "le').arguments
    '{"way": "le'
    """
    begun = _BEGUN_CALL.match(text)
    if begun is None:
        return None
    return ToolCall(without_surrogates(json.loads(begun[1])), without_surrogates(begun[2] or ""))


def split_after_calls(text: str) -> list[str]:
    """Split a text behind each tool call in it."""
    in_thought = any(part.closes_unopened_thought for part in _iter_parts(text, in_thought=False, is_last=True))
    ends = [part.end for part in _iter_parts(text, in_thought=in_thought, is_last=True) if part.calls]
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@dataclass(frozen=True, slots=True)
class _Part:
    """A tag of a thought, or a call from `start` to `end`."""

    start: int
    end: int
    calls: Sequence[ToolCall] = ()
    """Empty for tags of thoughts and malformed calls."""
    malformed: bool = False
    opens_thought: bool = False
    closes_unopened_thought: bool = False


def _iter_parts(text: str, *, in_thought: bool, is_last: bool) -> Iterator[_Part]:
    """Yield the tags of thoughts and the calls in a text; unless it `is_last`, up to a call that may be incomplete."""
    position = 0
    while (tag := _TAG.search(text, position)) is not None:
        part = _Part(tag.start(), tag.end(), opens_thought=in_thought)
        if tag[0] == CALL_START and not in_thought:
            call = _read_calls(text, tag.end(), is_last=is_last)
            if call is None:
                return
            end, calls = call
            malformed = not calls and (end > tag.end() or _is_closed(text, end))
            part = _Part(tag.start(), end, calls, malformed=malformed)
        elif tag[0] != CALL_START:
            opens = tag[0] == THINK[0]
            part = _Part(*tag.span(), opens_thought=opens, closes_unopened_thought=not (opens or in_thought))
        yield part
        position, in_thought = part.end, part.opens_thought


def _read_calls(text: str, start: int, *, is_last: bool) -> tuple[int, list[ToolCall]] | None:
    """Return the end of the calls that start behind an opening tag, and the calls; None if they may be incomplete.

    There may be several JSON objects, or a list of them. Malformed calls end with the next closing tag.
    """
    position, calls = _behind_spaces(text, start), list[ToolCall]()
    if position < len(text) and text[position] not in "[{":
        # the tag is only mentioned
        return start, []
    while position < len(text) and text[position] in "[{":
        try:
            value, position = _DECODER.raw_decode(text, position)
        except json.JSONDecodeError as error:
            # the tag in a string does not end a call, and JSON may only be incomplete before another one
            is_open = error.msg.startswith("Unterminated string") or text.find(CALL_END, error.pos) < 0
            return None if is_open and not is_last else _malformed(text, position, is_last=True)
        except (ValueError, RecursionError):
            return _malformed(text, position, is_last=is_last)
        calls += filter(None, map(_tool_call, value if isinstance(value, list) else [value]))
        position = _behind_spaces(text, position)
    if text.startswith(CALL_END, position):
        return position + len(CALL_END), calls
    if text.startswith(CALL_START, position) or (position == len(text) and is_last):
        return position, calls
    return _malformed(text, position, is_last=is_last)


def _is_closed(text: str, start: int) -> bool:
    """Return whether a closing tag follows before another opening tag."""
    following = text.find(CALL_START, start)
    return text.find(CALL_END, start, following if following >= 0 else len(text)) >= 0


def _malformed(text: str, start: int, *, is_last: bool) -> tuple[int, list[ToolCall]] | None:
    end = text.find(CALL_END, start)
    if end < 0:
        return (len(text), []) if is_last else None
    return end + len(CALL_END), []


def _behind_spaces(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _tool_call(value: Any) -> ToolCall | None:
    """Return a call from its JSON; None if it lacks a name or has numbers that JSON cannot represent.

    The arguments may be encoded twice. Null and missing arguments are none.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("parameters") if value.get("arguments") is None else value["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = _DECODER.decode(arguments)
    try:
        encoded = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return ToolCall(without_surrogates(value["name"]), without_surrogates(encoded))


PROBE_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_PROBE: Final = ToolCall("probe_call", '{"probe_argument": "a"}', "probe_question")
_DECODER: Final = json.JSONDecoder()
_BEGUN_CALL: Final = re.compile(r'\s*\{\s*"name"\s*:\s*("[^"\\]*")\s*(?:,\s*"arguments"\s*:\s*(.*))?', re.DOTALL)
