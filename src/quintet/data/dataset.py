"""Questions and prompts of a split, as a run uses them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from quintet.config.native.data import DataConfig
from quintet.data.loader import Loader, RowOrder, drawn_rows
from quintet.data.prompt_worker import PromptWorkers
from quintet.data.source import Source, SplitName
from quintet.errors import ConfigError
from quintet.records import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Questions"]

WORTH_A_PROCESS: Final = 1024
"""Rows below which starting another process takes longer than it saves."""
KEPT: Final = 8192
"""Prompts whose tokens are kept."""

MakeWorkers = Callable[[int], PromptWorkers]


class Questions:
    """The rows of a split that are used: `questions[row]` is a `Question`, `questions.prompt(row)` its tokens.

    Rows are numbered anew from 0, those left out not counted; `Question.id` is the number over all files.
    Made by `Questions.of`.
    """

    def __init__(
        self, source: Source, numbers: np.ndarray, config: DataConfig, seed: int, make_workers: MakeWorkers
    ) -> None:
        """`numbers` int64 [rows] says which rows of the source are used, in its order."""
        self.left_out = 0
        """Rows whose prompt is too long, where `data.filter_long_prompts` leaves them out."""
        self._source = source
        self._numbers = numbers
        self._config = config
        self._seed = seed
        self._make_workers = make_workers
        self._workers: PromptWorkers | None = None
        self._prompts: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    @classmethod
    def of(
        cls,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerFast,
        max_prompt_tokens: int,
        split: SplitName = "train",
        seed: int = 0,
        *,
        trust_remote_code: bool = False,
    ) -> Questions:
        """The rows of a split. `seed` is the run's, taken where `data.seed` is null; `trust_remote_code` is the
        tokenizer's.

        Raises:
            ConfigError: files, columns, templates or lengths aren't as the configuration says.
            MachineError: a file can't be copied, the cache can't be written, or a process died.
        """
        seed = seed if config.seed is None else config.seed
        source = Source(config, tokenizer, max_prompt_tokens, split)
        make_workers = partial(
            PromptWorkers,
            config=config,
            tokenizer=tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            split=split,
            trust_remote_code=trust_remote_code,
        )
        fitting = np.arange(len(source))
        if config.filter_long_prompts:
            fitting = _fitting(_lengths(source, config.filter_workers, make_workers), max_prompt_tokens)
        most = config.train_rows if split == "train" else None
        numbers = fitting[drawn_rows(len(fitting), most, seed)]
        numbers = numbers[: config.validation_rows] if split == "validation" else numbers
        questions = cls(source, numbers, config, seed, make_workers)
        questions.left_out = len(source) - len(fitting)
        return questions

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: int) -> Question:
        """A row as a question; `data.keep_*` put into its `extra` what they name, under verl's names.

        Raises:
            ConfigError: the row can't be read, or lacks a column.
        """
        config, question = self._config, self._source[int(self._numbers[row])]
        kept: dict[str, Any] = {}
        if config.keep_raw_tokens:
            kept["raw_prompt_ids"] = list(self._tokens(row, question))
        if config.keep_messages:
            kept["raw_prompt"] = [dict(message) for message in question.messages]
        if config.keep_text:
            kept["full_prompts"] = self._source.text(question)
        return replace(question, extra={**question.extra, **kept}) if kept else question

    def __iter__(self) -> Iterator[Question]:
        return (self[row] for row in range(len(self)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each name in `train_files` (or `validation_files`) that are used."""
        ends = np.searchsorted(self._numbers, np.cumsum(self._source.sizes))
        return tuple(np.diff(ends, prepend=0).tolist())

    def prompt(self, row: int) -> tuple[int, ...]:
        """Tokens of a row's prompt, [tokens], at most `max_prompt_tokens`; the latest are kept.

        Raises:
            ConfigError: they are more and `data.truncation` is `error`.
        """
        return self._tokens(row, None)

    def loader(self) -> Loader:
        """The order of training, at its beginning: mixed by `data.weights`, shuffled where `data.shuffle` says so.

        Raises:
            ConfigError: a file that has a weight has no rows left.
        """
        sizes, weights = self.sizes, self._config.weights
        empty = [name for name, size in zip(self._source.names, sizes, strict=False) if not size]
        if weights and empty:
            told = f"data.weights: none of the rows of {empty[0]} is used"
            hint = "leave that file out, or raise data.train_rows or rollout.max_prompt_tokens"
            raise ConfigError(told, key="data.weights", value=empty[0], hint=hint)
        return Loader(sizes, weights, shuffle=self._config.shuffle, seed=self._seed)

    def batches(self, passed: int = 0) -> list[list[int]]:
        """All rows once, at most `data.validation_batch` at a time; `passed` counts the validations before, each
        of which has an order of its own where `data.validation_shuffle` says so."""
        rows, most = len(self), self._config.validation_batch or len(self)
        order = RowOrder((rows,), shuffle=self._config.validation_shuffle, seed=self._seed)
        every = [order[passed * rows + place] for place in range(rows)]
        return [every[start : start + most] for start in range(0, rows, most)]

    def prepare(self, rows: Sequence[int]) -> None:
        """Have `data.workers` processes make the prompts of rows that will be wanted; without any, nothing is done."""
        if not self._config.workers:
            return
        if self._workers is None:
            self._workers = self._make_workers(self._config.workers)
        wanted = [row for row in rows if row not in self._prompts and not self._workers.awaits(row)]
        self._workers.ask_tokens({row: int(self._numbers[row]) for row in wanted})

    def close(self) -> None:
        """End the processes that prepare rows; what they were asked for is made here when it is wanted."""
        if self._workers is not None:
            self._workers.close()
        self._workers = None

    def _tokens(self, row: int, question: Question | None) -> tuple[int, ...]:
        while row not in self._prompts and self._workers is not None and self._workers.awaits(row):
            for one, tokens in self._workers.next_tokens():
                self._keep(one, tokens)
        if row not in self._prompts:
            self._keep(row, self._source.tokens(question or self._source[int(self._numbers[row])]))
        self._prompts.move_to_end(row)
        return self._prompts[row]

    def _keep(self, row: int, tokens: tuple[int, ...]) -> None:
        self._prompts[row] = tokens
        while len(self._prompts) > KEPT:
            self._prompts.popitem(last=False)


def _lengths(source: Source, processes: int, make_workers: MakeWorkers) -> np.ndarray:
    """Tokens of each whole prompt, int64 [rows]; so many processes share the work."""
    rows = len(source)
    count = min(processes, rows // WORTH_A_PROCESS)
    if count < 2:
        return np.fromiter((source.length(number) for number in range(rows)), np.int64, rows)
    with make_workers(count) as workers:
        return np.fromiter(workers.lengths(rows), np.int64, rows)


def _fitting(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Rows whose whole prompt is within the limit, int64 [≤ rows]."""
    fitting: np.ndarray = np.flatnonzero(lengths <= limit)
    if not len(fitting):
        raise ConfigError(
            f"data.filter_long_prompts leaves no rows: the shortest of {len(lengths):,} prompts has "
            f"{lengths.min():,} tokens, more than rollout.max_prompt_tokens = {limit:,}",
            key="rollout.max_prompt_tokens",
            value=limit,
            hint="set it higher",
        )
    return fitting
