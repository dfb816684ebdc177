"""Stored responses to be scored: rows with a prompt and one or several responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from quintet.config.native.data import DataConfig, EvaluationConfig
from quintet.data.prompt_source import open_rows
from quintet.data.row_reader import RowReader
from quintet.errors import ConfigError, did_you_mean
from quintet.records import Response


class StoredResponses:
    """Rows with their responses, which are numbered across rows."""

    def __init__(self, config: EvaluationConfig, *, needs_prompts: bool) -> None:
        """`needs_prompts` rejects rows without a prompt; reward functions do not need them."""
        self._column = config.response_key
        self._prompt = None if needs_prompts else config.prompt_key
        self._rows, _ = open_rows([config.path], "evaluation.path")
        self._reader = RowReader(
            DataConfig(prompt_key=config.prompt_key, source_key=config.source_key, truth_key=config.truth_key)
        )
        self._num_responses = 0

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Iterator[Response]:
        """Yield the responses of a row; rows have to be read in their order.

        Raises:
            ConfigError: a column is missing or has another type.
        """
        row, location = copy(self._rows[index]), self._rows.describe_row(index)
        texts = self._texts(row.pop(self._column, None), row, location)
        if self._prompt is not None and row.get(self._prompt) is None:
            row[self._prompt] = ""
        prompt_row = self._reader.read(row, index, location)
        for text in texts:
            yield Response(self._num_responses, prompt_row, text, tokens=0)
            self._num_responses += 1

    def _texts(self, value: object, row: Mapping[str, Any], location: str) -> Sequence[str]:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
            return texts
        if value is None:
            problem = f"{location} has no such column"
            hint = f"{did_you_mean(self._column, row, '{}')} its columns are {', '.join(row)}".lstrip()
        else:
            problem, hint = f"{location} has {value!r:.60}", "use a list of texts, or a text"
        key = "evaluation.response_key"
        raise ConfigError(f"{key} = {self._column}: {problem}", key=key, value=self._column, source=location, hint=hint)
