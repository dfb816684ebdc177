"""Tool calls in completions, in the format of Hermes and Qwen: JSON objects between `<tool_call>` tags."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
FORCED_START = f"{CALL_START}\n"
"""Start of a response that must be a tool call; it is part of the prompt."""


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def renders_tool_calls(template: str) -> bool:
    """Return whether a chat template shows tools, and asks for calls in this format."""
    # Qwen3-Coder writes XML between the same tags
    return "tools" in template and CALL_START in template and "<function=" not in template


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
    """JSON object."""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def to_json(self) -> dict[str, Any]:
        """Return the call as OpenAI writes it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Splits a growing text into content and tool calls. Invalid calls remain content."""

    def __init__(self, *, forced: bool = False) -> None:
        """`forced`: the text starts within a call, see `FORCED_START`."""
        self._forced = forced
        self._buffer = FORCED_START if forced else ""

    def update(self, text: str) -> tuple[str, list[ToolCall]]:
        """Append a text; return the new content and calls. Whitespace before a call, and what may become one, are held
        back."""
        self._buffer += text
        content, calls = "", list[ToolCall]()
        while (end := self._end_of_call()) is not None:
            start = self._buffer.index(CALL_START)
            call = _parse(self._buffer[start + len(CALL_START) : end - len(CALL_END)])
            content += self._buffer[:end] if call is None else self._buffer[:start].rstrip()
            calls += [] if call is None else [call]
            self._buffer = self._buffer[end:]
        start = self._buffer.find(CALL_START)
        visible = self._buffer[
            : start if start >= 0 else len(self._buffer) - overlap(self._buffer, CALL_START)
        ].rstrip()
        self._buffer = self._buffer[len(visible) :]
        return content + visible, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest. A call whose end is missing counts if its JSON is complete."""
        rest, self._buffer = self._buffer, ""
        before, start, inner = rest.partition(CALL_START)
        call = _parse(inner) if start else None
        if call is not None:
            return before.rstrip(), [call]
        return rest.removeprefix(FORCED_START) if self._forced else rest, []

    def _end_of_call(self) -> int | None:
        start = self._buffer.find(CALL_START)
        end = self._buffer.find(CALL_END, start) if start >= 0 else -1
        return None if end < 0 else end + len(CALL_END)


def _parse(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
