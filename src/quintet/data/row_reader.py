"""Conversion of data rows to `PromptRow`.

Supported are the rows of verl (`data_source`, `prompt` as chat messages, `reward_model` with `ground_truth`,
`extra_info`), RLinf (`prompt` with `answer` or `solutions`), ROLL (`instruction`, `prompt` or `messages` with
`ground_truth` or `solution`), and others whose columns are named by `data.*_key`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Sized
from numbers import Integral
from pathlib import Path
from typing import Any, Final

from quintet.config.capabilities import Capability
from quintet.config.native.data import DataConfig
from quintet.data.chat_messages import (
    ASSISTANT,
    REASONING_KEYS,
    Cell,
    ColumnarRow,
    Message,
    parse_json,
    parse_messages,
    parse_tools,
)
from quintet.data.row_forms import INSTRUCTION_COLUMN, messages_column, prompt_column
from quintet.data.row_images import KEY as IMAGE_KEY
from quintet.data.row_images import RowImage, image_error, row_images, with_placeholders
from quintet.envs.env import IMAGE
from quintet.errors import ConfigError, did_you_mean, nearest
from quintet.records import PromptRow

TRUTH_COLUMNS = ("ground_truth", "answer", "solution", "solutions", "target", "label")
RESPONSE_COLUMNS = ("response", "completion", "answer", "solution", "output")
SYSTEM_COLUMN: Final = "system"
"""Column of the system message in files of ShareGPT and Alpaca."""
HISTORY_COLUMN: Final = "history"
"""Column of earlier turns in files of Alpaca."""
LEGACY_TOOLS_COLUMN = "functions"
"""Column of tools in older files for OpenAI's fine-tuning."""
CALLS_AND_THOUGHTS: Final = frozenset({"tool_calls", *REASONING_KEYS})
DEFAULT_IMAGE_COLUMN: Final = "images"
"""verl's `data.image_key`, which is also set for files of text."""
DEFAULT_TRUTH_COLUMN: str = DataConfig.model_fields["truth_key"].default
AGENT_LOOPS = ("single_turn_agent", "tool_agent")
MISSING = object()


class RowReader:
    """Reads rows according to the configured columns."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config

    def read(self, row: Mapping[str, Any], number: int, row_name: str) -> PromptRow:
        """Convert a row; `number` is the row number over all files, `row_name` names it in errors.

        Raises:
            ConfigError: a column is missing, or has an unexpected type.
        """
        messages, reply = self.prompt_and_reply(row, row_name)
        response = reply[0]["content"] if len(reply) == 1 and not reply[0].keys() & CALLS_AND_THOUGHTS else None
        ground_truth = self._truth(row, row_name)
        return PromptRow(
            id=number,
            data_source=(self.domain(row, row_name) or "") if self._config.domains else self._source(row, row_name),
            messages=self.place_images(row, messages, row_name),
            ground_truth=ground_truth,
            extra=self._extra(row),
            response=response,
            agent_loop=self._agent_loop(row, row_name),
            location=row_name,
            columns=tuple(row) if ground_truth is None else (),
        )

    def images(self, row: Mapping[str, Any], row_name: str, directory: Path) -> tuple[RowImage, ...]:
        """Return the images of a row, unread; their paths are relative to `directory`.

        Raises:
            ConfigError: the column contains anything else, or a path leads out of the directory.
        """
        return row_images(self._image_cells(row) or [], str(self._config.image_key), row_name, directory)

    def place_images(self, row: Mapping[str, Any], messages: Sequence[Message], row_name: str) -> tuple[Message, ...]:
        """Return the messages of a row with one placeholder for each of its images. In rows without a column `images`,
        `<image>` is text.

        Raises:
            ConfigError: there are more or fewer placeholders than images, or a column of another name is missing.
        """
        images = self._image_cells(row)
        if images is None:
            if self._config.image_key not in (None, DEFAULT_IMAGE_COLUMN):
                raise _missing_column(row, str(self._config.image_key), IMAGE_KEY, row_name)
            return tuple(messages)
        placed = with_placeholders(messages, len(images))
        if placed is None:
            count = sum(str(message.get("content")).count(IMAGE) for message in messages)
            problem = f"{len(images)} images and {count} placeholders {IMAGE} in its messages"
            hint = f"write {IMAGE} once for each image, or nowhere: then they come before the first message of the user"
            raise image_error(str(self._config.image_key), row_name, problem, hint)
        return placed

    def _image_cells(self, row: Mapping[str, Any]) -> Sequence[object] | None:
        """Return the images in the column, None if the row has no such column; cells of CSV files contain JSON."""
        cell = MISSING if self._config.image_key is None else lookup(row, self._config.image_key)
        if isinstance(cell, str) and cell.lstrip().startswith(("[", "{")):
            cell = parse_json(cell)
        if cell is MISSING:
            return None
        return cell if isinstance(cell, list | tuple) else [] if cell is None or cell == "" else [cell]

    def messages_column(self, row: Mapping[str, Any]) -> str | None:
        """Return the column of the whole conversation, see `row_forms.messages_column`."""
        return messages_column(self._config, row)

    def conversation(self, row: Mapping[str, Any], row_name: str) -> tuple[Message, ...]:
        """Return all messages of a row with a whole conversation, after the configured system message.

        Raises:
            ConfigError: the column has no messages.
        """
        cell = Cell("data.messages_key", str(self.messages_column(row)), row_name)
        value = lookup(row, cell.column)
        parsed = parse_json(value) if isinstance(value, str) else value
        if isinstance(parsed, str) or parsed is MISSING or parsed is None:
            close = None if cell.column in row else nearest(cell.column, row)
            content = "a message is a mapping with `role` and `content`"
            known = content if cell.column in row else f"columns: {', '.join(row)}"
            hint = f"set {cell.key}={close}" if close else known
            raise cell.error("has no chat messages in this column", hint)
        return self._with_system_prompt(self._parse(parsed, cell, row, columnar=parsed is value), row, row_name)

    def prompt_and_reply(
        self, row: Mapping[str, Any], row_name: str
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Return the messages of the prompt, and the messages of the demonstrated reply, if there is one: the column of
        responses, or the last message of the prompt if it is the assistant's.

        Raises:
            ConfigError: a column is missing, or has an unexpected type.
        """
        messages_column = self.messages_column(row)
        key = "prompt_key" if messages_column is None else "messages_key"
        column = messages_column or prompt_column(self._config, row)
        cell = Cell(f"data.{key}", column, row_name)
        value = parsed = _column(row, column, cell.key, row_name)
        if messages_column is not None and isinstance(value, str):
            parsed = parse_json(value)
        if isinstance(parsed, str):
            parsed = [{"role": "user", "content": f"{parsed}{_alpaca_input(row, cell)}"}]
        messages = self._parse(parsed, cell, row, columnar=parsed is value)
        last = [messages.pop()] if messages and messages[-1]["role"] == ASSISTANT else []
        if not messages:
            raise cell.error("contains no message to respond to", "remove that row")
        return self._with_system_prompt(messages, row, row_name), tuple(self._reply(row, row_name) or last)

    def template_variables(self, row: Mapping[str, Any], row_name: str) -> dict[str, Any]:
        """Return the variables of the chat template in a row: `tools`, and `enable_thinking`.

        Raises:
            ConfigError: a column has an unexpected type.
        """
        variables: dict[str, Any] = {}
        names = (self._config.tools_key, LEGACY_TOOLS_COLUMN) if self._config.tools_key else ()
        column = next((name for name in names if name is not None and lookup(row, name) is not MISSING), None)
        if column is not None:
            cell = Cell("data.tools_key", column, row_name)
            if tools := parse_tools(lookup(row, column), cell, columnar=isinstance(row, ColumnarRow)):
                variables["tools"] = list(tools)
        thinking = lookup(row, self._config.thinking_key) if self._config.thinking_key else MISSING
        if thinking is not MISSING and thinking is not None:
            if thinking not in (0, 1):
                cell = Cell("data.thinking_key", str(self._config.thinking_key), row_name)
                raise cell.error(f"contains {thinking!r:.40}", "valid: true, false or null")
            variables["enable_thinking"] = bool(thinking)
        return variables

    def _parse(self, value: object, cell: Cell, row: Mapping[str, Any], *, columnar: bool) -> list[Message]:
        has_images = self._image_cells(row) is not None
        return parse_messages(value, cell, has_images=has_images, columnar=columnar and isinstance(row, ColumnarRow))

    def _with_system_prompt(
        self, messages: Sequence[Message], row: Mapping[str, Any], row_name: str
    ) -> tuple[Message, ...]:
        """Return the messages after the system message in the row's column, or the configured one, if there is none
        among them."""
        column = row.get(SYSTEM_COLUMN)
        system = self._config.system_prompt if column is None or column == "" else column
        present = [message["content"] for message in messages if message["role"] in ("system", "developer")]
        if system is None or (present and (system is not column or system in present)):
            return tuple(messages)
        cell = Cell("data.system_prompt", SYSTEM_COLUMN, row_name)
        if present:
            raise cell.error(f"contains {system!r:.40} beside a system message", "remove one of them")
        if not isinstance(system, str):
            raise cell.error(f"contains {type(system).__name__}", "a system message is text; rename other columns")
        return ({"role": "system", "content": system}, *messages)

    def _reply(self, row: Mapping[str, Any], row_name: str) -> list[Message]:
        """Return the messages in the column of responses: a text is a message of the assistant."""
        column = self._config.response_key
        if column is None:
            column = next((name for name in RESPONSE_COLUMNS if _is_response(row.get(name))), None)
        value = None if column is None else _column(row, column, "data.response_key", row_name)
        if value is None or value == "":
            return []
        cell = Cell("data.response_key", str(column), row_name)
        if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
            # a number is the text that JSON has for it
            return [{"role": ASSISTANT, "content": value if isinstance(value, str) else json.dumps(value)}]
        if not _is_response(value):
            raise cell.error(f"contains {type(value).__name__}", "a response is text, or a list of chat messages")
        return self._parse(value, cell, row, columnar=True)

    def domain(self, row: Mapping[str, Any], row_name: str = "a row") -> str | None:
        """Return the domain of a row, None if it belongs to none."""
        name = _name(row, "data.domain_key", self._config.domain_key, row_name)
        if not name:
            return self._config.domain_of(self._source(row, row_name))
        return name if name in self._config.domains else None

    def _source(self, row: Mapping[str, Any], row_name: str) -> str:
        return _name(row, "data.source_key", self._config.source_key, row_name)

    def _agent_loop(self, row: Mapping[str, Any], row_name: str) -> str | None:
        key, column = "data.agent_loop_key", self._config.agent_loop_key
        name = MISSING if column is None else lookup(row, column)
        if name is MISSING or name is None or name == "":
            return self._config.agent_loop
        if name in AGENT_LOOPS:
            return str(name)
        problem = f"names the agent loop {name!r:.60}, which {Capability.AGENT_LOOPS.refusal()}"
        raise _invalid_column(key, str(column), row_name, problem, f"known: {', '.join(AGENT_LOOPS)}; or {key}=null")

    def _truth(self, row: Mapping[str, Any], row_name: str) -> Any:
        """Return `ground_truth` of the mapping in the column, the column itself, or the first of `TRUTH_COLUMNS`."""
        value = lookup(row, self._config.truth_key)
        if value is not MISSING and value is not None:
            mapping = _mapping(value)
            return mapping["ground_truth"] if mapping is not None and "ground_truth" in mapping else value
        candidates = (row[name] for name in TRUTH_COLUMNS if row.get(name) is not None)
        ground_truth = next(candidates, MISSING)
        if ground_truth is MISSING and value is MISSING and self._config.truth_key != DEFAULT_TRUTH_COLUMN:
            raise _missing_column(row, self._config.truth_key, "data.truth_key", row_name)
        return None if ground_truth is MISSING else ground_truth

    def _extra(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mapping in the column, or without this column all columns that are not used otherwise."""
        value = lookup(row, self._config.extra_key)
        if value is MISSING:
            return {name: value for name, value in row.items() if name not in self._used_columns(row)}
        return dict(_mapping(value) or {})

    def _used_columns(self, row: Mapping[str, Any]) -> set[str]:
        config = self._config
        columns = (prompt_column(config, row), self.messages_column(row), config.image_key)
        keys = (*columns, config.source_key, config.truth_key, config.response_key)
        return {key.partition(".")[0] for key in keys if key is not None}


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column or a dotted path, or `MISSING`."""
    if column in row:
        return row[column]
    head, dot, rest = column.partition(".")
    mapping = _mapping(row.get(head)) if dot else None
    return MISSING if mapping is None else lookup(mapping, rest)


def _name(row: Mapping[str, Any], key: str, column: str, row_name: str) -> str:
    """Return a name in a column, which may be a whole number; empty if there is none.

    Raises:
        ConfigError: the column contains anything else.
    """
    value = lookup(row, column)
    if value is MISSING or value is None:
        return ""
    if isinstance(value, str) or (isinstance(value, Integral) and not isinstance(value, bool)):
        return str(value)
    problem = f"contains {value!r:.40} in this column"
    raise _invalid_column(key, column, row_name, problem, "a name is text; name another column")


def _column(row: Mapping[str, Any], column: str, key: str, row_name: str) -> Any:
    value = lookup(row, column)
    if value is MISSING:
        raise _missing_column(row, column, key, row_name)
    return value


def _mapping(value: object) -> Mapping[str, Any] | None:
    """Return a mapping, also from a cell with JSON; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_json(value)
    return value if isinstance(value, Mapping) else None


def _is_response(value: object) -> bool:
    """Return whether a value is text or a list of messages."""
    if isinstance(value, str):
        return True
    messages: Any = value.tolist() if hasattr(value, "tolist") else value
    is_list = isinstance(messages, list | tuple) and len(messages) > 0
    return is_list and all(isinstance(message, Mapping) for message in messages)


def _alpaca_input(row: Mapping[str, Any], cell: Cell) -> str:
    """Return Alpaca's `input`, which continues an `instruction` on a line of its own; empty without one.

    Raises:
        ConfigError: the row has earlier turns.
    """
    if cell.column != INSTRUCTION_COLUMN:
        return ""
    history = row.get(HISTORY_COLUMN)
    if history is not None and not (isinstance(history, Sized) and len(history) == 0):
        problem = f"has earlier turns in the column {HISTORY_COLUMN}, which is not read"
        raise cell.error(problem, "write the row as a list of messages, and set data.messages_key to its column")
    text = row.get("input")
    return f"\n{text}" if isinstance(text, str) and text.strip() else ""


def _invalid_column(key: str, column: str, row_name: str, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"{key} = {column}: {row_name} {problem}", key=key, value=column, source=row_name, hint=hint)


def _missing_column(row: Mapping[str, Any], column: str, key: str, row_name: str) -> ConfigError:
    hint = f"{did_you_mean(column, row, '{}')} columns: {', '.join(row)}".lstrip()
    return ConfigError(
        f"{key} = {column}: {row_name} has no such column", key=key, value=column, source=row_name, hint=hint
    )
