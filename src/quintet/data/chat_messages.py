"""Chat messages and tools of data rows in one form, whichever form a file has them in.

Read are messages of OpenAI's API (also `function_call` and the role `function`), of Hugging Face's datasets and of
ShareGPT (`from`, `value`). Contents become text, calls become `tool_calls` whose arguments are mappings, and columns of
Arrow files lose the nulls that their types add. Everything else is refused: nothing becomes text by `str()`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quintet.envs.env import IMAGE
from quintet.errors import ConfigError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`."""

ASSISTANT: Final = "assistant"
ROLES: Final = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython")
RESULT_ROLES: Final = frozenset({"tool", "function", "ipython"})
"""Roles of the results of calls."""
REASONING_KEYS: Final = ("reasoning_content", "reasoning", "thinking")
WEIGHT: Final = "weight"
WEIGHT_KEYS: Final = (WEIGHT, "train", "loss")
"""Whether an assistant message is trained: OpenAI's, Axolotl's and ms-swift's name."""
SHAREGPT_ROLES: Final[Mapping[str, str]] = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "chatgpt": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}
"""Roles by ShareGPT's names; the value of `function_call` is a call as JSON."""


EXAMPLE: Final = '{"role": "user", "content": "…"}'


class ColumnarRow(dict[str, Any]):
    """Row of an Arrow table. All structs of a column have the same fields, so null may stand for an absent one."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A column of a row, for errors."""

    key: str
    """Configuration key that names the column."""
    column: str
    row_name: str

    @property
    def message_form(self) -> str:
        """Description of a message, as a hint."""
        is_conversation = self.key == "data.messages_key"
        return f"a message is {'a mapping with `role` and `content`' if is_conversation else EXAMPLE}"

    def error(self, problem: str, hint: str) -> ConfigError:
        """Return an error about the value."""
        message = f"{self.key} = {self.column}: {self.row_name} {problem}"
        return ConfigError(message, key=self.key, value=self.column, source=self.row_name, hint=hint)


def parse_json(text: str) -> object:
    """Return the value of a cell with JSON; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def plain_value(value: object, *, columnar: bool) -> Any:
    """Return a value whose arrays are lists; without the null fields of structs if it comes from an Arrow column, where
    a struct that has no others is absent, too."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        fields = ((name, plain_value(part, columnar=columnar)) for name, part in value.items())
        present = {name: part for name, part in fields if not (columnar and part is None)}
        return present if present or not (columnar and value) else None
    if isinstance(value, list | tuple):
        return [plain_value(part, columnar=columnar) for part in value]
    return value


def parse_messages(value: object, cell: Cell, *, has_images: bool = False, columnar: bool = False) -> list[Message]:
    """Return the messages of a cell; images are placeholders, if the row `has_images` in a column. `columnar` values
    come from an Arrow column.

    Raises:
        ConfigError: the value is no list of messages, or one has an unknown role or a value of an unexpected type.
    """
    value = plain_value(value, columnar=columnar)
    if not isinstance(value, list):
        raise cell.error(f"contains {type(value).__name__}", "it must be text or a list of chat messages")
    for index, fields in enumerate(value):
        if not isinstance(fields, Mapping):
            raise cell.error(f"contains {fields!r:.60} as message {index}", cell.message_form)
    return [_Fields(fields, cell, index).message(has_images=has_images) for index, fields in enumerate(value)]


def is_trained(message: Message) -> bool:
    """Return whether an assistant message is not excluded from the loss."""
    return bool(message.get(WEIGHT, True))


def is_call_or_result(message: Message) -> bool:
    """Return whether a message has calls, or is the result of one."""
    return "tool_calls" in message or message["role"] in RESULT_ROLES


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of one message of a cell."""

    fields: Mapping[str, Any]
    cell: Cell
    index: int

    def _error(self, problem: str, hint: str) -> ConfigError:
        return self.cell.error(f"message {self.index}: {problem}", hint)

    def message(self, *, has_images: bool) -> Message:
        fields = dict(self._with_role())
        content = fields.pop("content", None)
        fields = {name: part for name, part in fields.items() if not _is_absent(part)}
        role = fields.get("role")
        if not isinstance(role, str):
            raise self._error(f"{self.fields!r:.60} has no `role`", self.cell.message_form)
        text = self._text(content, has_images=has_images, is_result=role in RESULT_ROLES)
        message = {"role": "tool" if role == "function" else role, "content": text}
        del fields["role"]
        calls = self._calls(fields.pop("tool_calls", []), fields.pop("function_call", None))
        weights = {name: fields.pop(name) for name in WEIGHT_KEYS if name in fields}
        for name in (*REASONING_KEYS, "name", "tool_call_id"):
            if not isinstance(fields.get(name, ""), str):
                raise self._error(f"`{name}` is {_kind(fields[name])}", f"write `{name}` as text")
        return {**message, **fields, **({"tool_calls": calls} if calls else {}), **self._weight(role, weights)}

    def _with_role(self) -> Mapping[str, Any]:
        """Return the fields under OpenAI's names; ShareGPT has `from` and `value`."""
        fields = self.fields
        if "from" not in fields or "value" not in fields or fields.get("role") is not None:
            return fields
        name = fields["from"]
        role = SHAREGPT_ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise self._error(f"unknown sender {name!r:.40}", f"known: {', '.join(SHAREGPT_ROLES)}")
        rest = {key: part for key, part in fields.items() if key not in ("from", "value")}
        if role == "function_call":
            value = fields["value"]
            calls = parse_json(value) if isinstance(value, str) else value
            return {**rest, "role": ASSISTANT, "tool_calls": calls if isinstance(calls, list) else [calls]}
        return {**rest, "role": role, "content": fields["value"]}

    def _text(self, content: object, *, has_images: bool, is_result: bool) -> str:
        """Return the text of a content, which may be typed parts; results of calls may be any JSON data."""
        if content is None or isinstance(content, str):
            return content or ""
        parts = content if isinstance(content, list) else [content]
        if is_result and not (parts and all(isinstance(part, Mapping) and "type" in part for part in parts)):
            return json.dumps(content, ensure_ascii=False)
        texts = [_part_text(part, has_images=has_images) for part in parts]
        for part, text in zip(parts, texts, strict=True):
            if not isinstance(text, str):
                hint = 'remove images, or write them as {"type": "image"} and set data.image_key to their column'
                raise self._error(f"the content has more than text: {part!r:.60}", hint)
        return "".join(map(str, texts))

    def _calls(self, calls: object, function_call: object) -> list[Mapping[str, Any]]:
        """Return calls as `{"type": "function", "function": {"name": …, "arguments": {…}}}`, with their ids."""
        calls = parse_json(calls) if isinstance(calls, str) else calls
        calls = calls if isinstance(calls, list) else [calls]
        legacy = [] if function_call is None else [{"function": function_call}]
        return [self._call(call, f"tool_calls[{number}]") for number, call in enumerate((*calls, *legacy))]

    def _call(self, call: object, key: str) -> Mapping[str, Any]:
        call = parse_json(call) if isinstance(call, str) else call
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
            hint = 'a call is {"type": "function", "function": {"name": "…", "arguments": {…}}}'
            raise self._error(f"`{key}` is {call!r:.60}", hint)
        arguments = function.get("arguments")
        arguments = parse_json(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
        if not isinstance(arguments, Mapping):
            problem = f"`{key}.function.arguments` is {function.get('arguments')!r:.60}"
            raise self._error(problem, "arguments are a mapping, or the text of a JSON object")
        rest = {} if function is call else {field: part for field, part in call.items() if part is not None}
        return {"type": "function", **rest, "function": {**function, "arguments": arguments}}

    def _weight(self, role: str, weights: Mapping[Any, object]) -> Mapping[str, int]:
        """Return the weight of a message that is not trained."""
        for name, weight in weights.items():
            if weight not in (0, 1):
                raise self._error(f"`{name}` is {weight!r:.40}", "valid: 0 (excluded from the loss) or 1")
            if weight == 1 and role != ASSISTANT:
                raise self._error(f"`{name}` is 1, role {role}", "only messages of the assistant can be trained")
        return {WEIGHT: 0} if any(weight == 0 for weight in weights.values()) else {}


def _is_absent(part: object) -> bool:
    """Return whether a field has no value: null, or empty calls or texts, which mean the same."""
    return part is None or (isinstance(part, str | list | Mapping) and not part)


def _kind(value: object) -> str:
    return type(value).__name__


def _part_text(part: object, *, has_images: bool) -> object:
    if not isinstance(part, Mapping):
        return part
    is_placeholder = has_images and part.get("type") == "image" and part.get("image") is None
    return IMAGE if is_placeholder else part.get("text")


def parse_tools(value: object, cell: Cell, *, columnar: bool = False) -> tuple[Tool, ...]:
    """Return the tools of a cell: a list, or its JSON, of OpenAI's tools or of bare functions.

    Raises:
        ConfigError: the value is anything else.
    """
    value = parse_json(value) if isinstance(value, str) else plain_value(value, columnar=columnar)
    if _is_absent(value):
        return ()
    if not isinstance(value, list):
        raise cell.error(f"contains {_kind(value)}", "tools are a list, or its JSON")
    return tuple(_tools(value, cell))


def _tools(values: Sequence[object], cell: Cell) -> Iterator[Tool]:
    for number, value in enumerate(values):
        tool = parse_json(value) if isinstance(value, str) else value
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(tool, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
            hint = 'a tool is {"type": "function", "function": {"name": "…", "parameters": {…}}}'
            raise cell.error(f"tool {number} is {value!r:.60}", hint)
        rest = {"type": "function"} if function is tool else tool
        if isinstance(function.get("parameters"), str):
            function = {**function, "parameters": parse_json(function["parameters"])}
        yield {**rest, "function": function}
