"""A row of a data file as a `Question`: which columns say what.

Read are verl's rows (`data_source`, `prompt` as chat messages, `reward_model` with `ground_truth`,
`extra_info`), RLinf's (`prompt` with `answer` or `solutions`), ROLL's (`instruction`, `prompt` or
`messages` with `ground_truth` or `solution`), and any others whose columns `data.*_key` name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quintet.config.native.data import DataConfig
from quintet.errors import ConfigError, nearest
from quintet.records import Question

__all__ = ["RowReader"]

Message = Mapping[str, Any]
TRUTHS = ("ground_truth", "answer", "solution", "solutions", "target", "label")
RESPONSES = ("response", "answer", "solution")
USUAL_TRUTH: str = DataConfig.model_fields["truth_key"].default
ABSENT = object()


class RowReader:
    """Reads rows as the configuration says."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config

    def read(self, row: Mapping[str, Any], number: int, place: str) -> Question:
        """The question of a row; `number` counts rows over all files, `place` is for messages.

        Raises:
            ConfigError: a column isn't there, or holds something else.
        """
        pictures = self._config.image_key
        if pictures is not None and row.get(pictures):
            raise _unfit(
                "data.image_key", pictures, place, "holds pictures, which no policy here sees", "leave them out"
            )
        messages, response = self._conversation(row, place)
        return Question(
            id=number,
            source=self._source(row),
            messages=messages,
            truth=self._truth(row, place),
            extra=self._extra(row),
            response=self._response(row, place) or response,
        )

    def _conversation(self, row: Mapping[str, Any], place: str) -> tuple[tuple[Message, ...], str | None]:
        """The messages before the answer, and the answer where the row's conversation ends with one."""
        config = self._config
        key = "prompt_key" if config.messages_key is None else "messages_key"
        column = config.prompt_key if config.messages_key is None else config.messages_key
        value = _column(row, column, f"data.{key}", place)
        if config.messages_key is not None and isinstance(value, str):
            value = _json(value)
        messages = list(_messages(value, f"data.{key}", column, place))
        told = None
        if messages and messages[-1]["role"] == "assistant":
            told = str(messages.pop()["content"])
        if not messages:
            raise _unfit(f"data.{key}", column, place, "holds no message to answer", "leave that row out")
        if config.system_prompt is not None and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        return tuple(messages), told

    def _source(self, row: Mapping[str, Any]) -> str:
        value = _found(row, self._config.source_key)
        return "" if value is ABSENT or value is None else str(value)

    def _truth(self, row: Mapping[str, Any], place: str) -> Any:
        """`ground_truth` of the mapping in its column, the column itself, or the first of `TRUTHS` there is."""
        value = _found(row, self._config.truth_key)
        if value is not ABSENT and value is not None:
            inside = _mapping(value)
            return inside["ground_truth"] if inside is not None and "ground_truth" in inside else value
        others = (row[name] for name in TRUTHS if row.get(name) is not None)
        found = next(others, ABSENT)
        if found is ABSENT and value is ABSENT and self._config.truth_key != USUAL_TRUTH:
            raise _absent(row, self._config.truth_key, "data.truth_key", place)
        return None if found is ABSENT else found

    def _extra(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The mapping of its column; without one, the columns that say nothing else."""
        value = _found(row, self._config.extra_key)
        if value is ABSENT:
            return {name: value for name, value in row.items() if name not in self._own()}
        return dict(_mapping(value) or {})

    def _own(self) -> set[str]:
        config = self._config
        keys = (config.prompt_key, config.messages_key, config.source_key, config.truth_key, config.response_key)
        return {key.partition(".")[0] for key in keys if key is not None}

    def _response(self, row: Mapping[str, Any], place: str) -> str | None:
        if self._config.response_key is not None:
            value = _column(row, self._config.response_key, "data.response_key", place)
            return None if value is None else str(value)
        return next((row[name] for name in RESPONSES if isinstance(row.get(name), str)), None)


def _found(row: Mapping[str, Any], column: str) -> Any:
    """What lies in a column, or where a dotted path leads; `ABSENT` where there is none."""
    if column in row:
        return row[column]
    head, dot, rest = column.partition(".")
    inside = _mapping(row.get(head)) if dot else None
    return ABSENT if inside is None else _found(inside, rest)


def _column(row: Mapping[str, Any], column: str, key: str, place: str) -> Any:
    value = _found(row, column)
    if value is ABSENT:
        raise _absent(row, column, key, place)
    return value


def _mapping(value: object) -> Mapping[str, Any] | None:
    """A mapping, also one written as JSON in a cell of text; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _json(value)
    return value if isinstance(value, Mapping) else None


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _messages(value: object, key: str, column: str, place: str) -> Iterator[Message]:
    if isinstance(value, str):
        yield {"role": "user", "content": value}
        return
    if not isinstance(value, Sequence):
        kind = type(value).__name__
        raise _unfit(key, column, place, f"holds {kind}", "it takes text or a list of chat messages")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _unfit(key, column, place, f"holds {message!r:.60}", 'a message is {"role": "user", "content": "…"}')
        # Parquet gives every message the fields of all others, empty where they had none
        fields = {name: part for name, part in message.items() if part is not None}
        yield {**fields, "content": _content(message.get("content"), key, column, place)}


def _content(content: object, key: str, column: str, place: str) -> str:
    """Text, also where it comes as a list of typed parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _unfit(key, column, place, "holds a message with more than text", "leave pictures out")
    return "".join(str(text) for text in texts)


def _unfit(key: str, column: str, place: str, told: str, hint: str) -> ConfigError:
    return ConfigError(f"{key} = {column}: {place} {told}", key=key, value=column, source=place, hint=hint)


def _absent(row: Mapping[str, Any], column: str, key: str, place: str) -> ConfigError:
    close = nearest(column, row)
    hint = (f"did you mean {close}? " if close else "") + f"its columns are {', '.join(row)}"
    return ConfigError(f"{key} = {column}: {place} has no such column", key=key, value=column, source=place, hint=hint)
