"""All rows of a split as questions and prompts, none left out yet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from quintet.config.native.data import DataConfig
from quintet.data.files import cache_directory, find_files
from quintet.data.prompts import PromptFormat
from quintet.data.questions import RowReader
from quintet.data.tables import Rows, open_table
from quintet.errors import ConfigError
from quintet.records import Question
from quintet.registry import load_outside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Source", "SplitName", "open_rows"]

SplitName = Literal["train", "validation"]
CLASS = "data.dataset_class"


def open_rows(names: Sequence[str], key: str, cache_dir: str | None = None) -> tuple[Rows, tuple[int, ...]]:
    """The rows of the named files, and how many each name stands for; `key` is what named them.

    Raises:
        ConfigError: no such file, another kind, no rows, or one that can't be read.
        MachineError: a file can't be copied, or the cache can't be written.
    """
    cache = cache_directory(cache_dir)
    found = find_files(names, key, cache)
    tables = [[open_table(path, key, cache) for path in paths] for paths in found]
    return Rows(list(itertools.chain(*tables))), tuple(sum(len(table) for table in part) for part in tables)


class _Outside:
    """The rows of a user's own data set."""

    def __init__(self, rows: Any, name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        row = self._rows[number]
        if not isinstance(row, Mapping):
            told = f"{CLASS} = {self._name}: row {number} is {type(row).__name__}"
            raise ConfigError(told, key=CLASS, value=self._name, hint="give a mapping of columns, as a file's row is")
        return row

    def place(self, number: int) -> str:
        return f"{self._name}, row {number}"


class Source:
    """Questions by the number of their row over all files."""

    def __init__(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerFast, max_prompt_tokens: int, split: SplitName
    ) -> None:
        """
        Raises:
            ConfigError: files, columns or the chat template aren't as the configuration says.
            MachineError: a file can't be copied, or the cache can't be written.
        """
        held_out = split == "validation" and config.validation_files
        self.names = config.validation_files if held_out else config.train_files
        self._key = "data.validation_files" if held_out else "data.train_files"
        if not self.names:
            raise ConfigError(f"{self._key} names no file", key=self._key, hint="name one, or more")
        self._rows: Rows | _Outside
        if config.dataset_class is None:
            self._rows, self.sizes = open_rows(self.names, self._key, config.cache_dir)
        else:
            self._rows = _own_rows(config, self.names, tokenizer)
            self.sizes = (len(self._rows),)
        self._reader = RowReader(config)
        self._format = PromptFormat(
            tokenizer, config.template, max_tokens=max_prompt_tokens, truncation=config.truncation
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Question:
        """
        Raises:
            ConfigError: the row can't be read, or lacks a column.
        """
        return self._reader.read(self._rows[number], number, self._rows.place(number))

    def text(self, question: Question) -> str:
        """A prompt with its chat template applied."""
        return self._format.text(question)

    def tokens(self, question: Question) -> tuple[int, ...]:
        """A prompt's tokens, cut as `data.truncation` says.

        Raises:
            ConfigError: they are too many and it says `error`.
        """
        return self._format.tokens(question, self._rows.place(question.id))

    def length(self, number: int) -> int:
        """Tokens of a row's whole prompt."""
        return len(self._format.whole(self[number]))


def _own_rows(config: DataConfig, names: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> _Outside:
    """An object of the user's class, called with `(data_files, tokenizer, config)`."""
    name = str(config.dataset_class)
    if config.weights:
        told = f"{CLASS} = {name} says itself which rows come how often"
        raise ConfigError(told, key="data.weights", value=list(config.weights), hint="leave data.weights out")
    made = load_outside(name, CLASS)(list(names), tokenizer, config)
    lacks = [word for word in ("__len__", "__getitem__") if not hasattr(made, word)]
    if lacks:
        raise ConfigError(f"{CLASS} = {name} has no {' and no '.join(lacks)}", key=CLASS, value=name)
    return _Outside(made, name)
