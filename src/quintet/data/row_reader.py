"""Conversion of data rows to `PromptRow`.

Supported are the rows of verl (`data_source`, `prompt` as chat messages, `reward_model` with `ground_truth`,
`extra_info`), RLinf (`prompt` with `answer` or `solutions`), ROLL (`instruction`, `prompt` or `messages` with
`ground_truth` or `solution`), and others whose columns are named by `data.*_key`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from quintet.config.capabilities import Capability
from quintet.config.native.data import DataConfig
from quintet.data.row_images import KEY as IMAGE_KEY
from quintet.data.row_images import RowImage, image_error, row_images, with_placeholders
from quintet.envs.env import IMAGE
from quintet.errors import ConfigError, nearest
from quintet.records import PromptRow

Message = Mapping[str, Any]
TRUTH_COLUMNS = ("ground_truth", "answer", "solution", "solutions", "target", "label")
RESPONSE_COLUMNS = ("response", "answer", "solution")
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
        messages, response = self._conversation(row, row_name)
        return PromptRow(
            id=number,
            data_source=(self.domain(row) or "") if self._config.domains else self._source(row),
            messages=self.place_images(row, messages, row_name),
            ground_truth=self._truth(row, row_name),
            extra=self._extra(row),
            response=self._response(row, row_name) or response,
            agent_loop=self._agent_loop(row, row_name),
            location=row_name,
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

    def _conversation(self, row: Mapping[str, Any], row_name: str) -> tuple[tuple[Message, ...], str | None]:
        """Return the messages of the prompt, and the response if the conversation ends with one."""
        config = self._config
        key = "prompt_key" if config.messages_key is None else "messages_key"
        column = config.prompt_key if config.messages_key is None else config.messages_key
        value = _column(row, column, f"data.{key}", row_name)
        if config.messages_key is not None and isinstance(value, str):
            value = parse_json(value)
        has_images = self._image_cells(row) is not None
        messages = list(_messages(value, f"data.{key}", column, row_name, has_images=has_images))
        response = None
        if messages and messages[-1]["role"] == "assistant":
            response = str(messages.pop()["content"])
        if not messages:
            raise _invalid_column(
                f"data.{key}", column, row_name, "contains no message to respond to", "remove that row"
            )
        if config.system_prompt is not None and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        return tuple(messages), response

    def domain(self, row: Mapping[str, Any]) -> str | None:
        """Return the domain of a row, None if it belongs to none."""
        name = lookup(row, self._config.domain_key)
        if name is MISSING or name is None:
            return self._config.domain_of(self._source(row))
        return str(name) if str(name) in self._config.domains else None

    def _source(self, row: Mapping[str, Any]) -> str:
        value = lookup(row, self._config.source_key)
        return "" if value is MISSING or value is None else str(value)

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
            return {name: value for name, value in row.items() if name not in self._used_columns()}
        return dict(_mapping(value) or {})

    def _used_columns(self) -> set[str]:
        config = self._config
        columns = (config.prompt_key, config.messages_key, config.image_key)
        keys = (*columns, config.source_key, config.truth_key, config.response_key)
        return {key.partition(".")[0] for key in keys if key is not None}

    def _response(self, row: Mapping[str, Any], row_name: str) -> str | None:
        if self._config.response_key is not None:
            value = _column(row, self._config.response_key, "data.response_key", row_name)
            return None if value is None else str(value)
        return next((row[name] for name in RESPONSE_COLUMNS if isinstance(row.get(name), str)), None)


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column or a dotted path, or `MISSING`."""
    if column in row:
        return row[column]
    head, dot, rest = column.partition(".")
    mapping = _mapping(row.get(head)) if dot else None
    return MISSING if mapping is None else lookup(mapping, rest)


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


def parse_json(text: str) -> object:
    """Return the value of a cell with JSON; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _messages(value: object, key: str, column: str, row_name: str, *, has_images: bool) -> Iterator[Message]:
    if isinstance(value, str):
        yield {"role": "user", "content": value}
        return
    if not isinstance(value, Sequence):
        kind = type(value).__name__
        raise _invalid_column(key, column, row_name, f"contains {kind}", "it must be text or a list of chat messages")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _invalid_column(
                key, column, row_name, f"contains {message!r:.60}", 'a message is {"role": "user", "content": "…"}'
            )
        # in Parquet, all messages have the same fields, null if they had none
        fields = {name: part for name, part in message.items() if part is not None}
        yield {**fields, "content": message_text(message.get("content"), key, column, row_name, has_images=has_images)}


def message_text(content: object, key: str, column: str, row_name: str, *, has_images: bool) -> str:
    """Return the text of a content, which may be a list of typed parts. Images are placeholders, if the row
    `has_images` in a column.

    Raises:
        ConfigError: a part is neither.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else [content]
    texts = [_part_text(part, has_images=has_images) for part in parts]
    if not all(isinstance(text, str) for text in texts):
        hint = 'remove images, or write them as {"type": "image"} and set data.image_key to the column that has them'
        raise _invalid_column(key, column, row_name, "contains a message with more than text", hint)
    return "".join(str(text) for text in texts)


def _part_text(part: object, *, has_images: bool) -> object:
    if not isinstance(part, Mapping):
        return part
    is_placeholder = has_images and part.get("type") == "image" and part.get("image") is None
    return IMAGE if is_placeholder else part.get("text")


def _invalid_column(key: str, column: str, row_name: str, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"{key} = {column}: {row_name} {problem}", key=key, value=column, source=row_name, hint=hint)


def _missing_column(row: Mapping[str, Any], column: str, key: str, row_name: str) -> ConfigError:
    suggestion = nearest(column, row)
    hint = (f"did you mean {suggestion}? " if suggestion else "") + f"columns: {', '.join(row)}"
    return ConfigError(
        f"{key} = {column}: {row_name} has no such column", key=key, value=column, source=row_name, hint=hint
    )
