"""Prompts of one split: filtered, sampled, tokenized and cached."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from quintet.config.native.data import DataConfig
from quintet.data.prompt_format import ToolSchema
from quintet.data.prompt_source import PromptRows, PromptSettings, SplitName
from quintet.data.prompt_workers import PromptWorkers
from quintet.data.row_images import PromptImages
from quintet.data.row_order import RowOrder, RowSampler, held_out_numbers, sample_rows
from quintet.errors import ConfigError
from quintet.records import ImageInput, PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MIN_ROWS_PER_WORKER: Final = 1024
"""Number of rows below which another process does not pay off."""
MAX_CACHED_PROMPTS: Final = 8192
"""Number of tokenized prompts in the cache."""
MAX_CACHED_BYTES: Final = 256 << 20
"""Bytes of the images in the cache, which the samples of a group share."""

logger = logging.getLogger(__name__)

CreateWorkers = Callable[[int], PromptWorkers]


class PromptSplit:
    """The used rows of a split: `split[row]` is a `PromptRow`, `split.prompt(row)` its tokens.

    Rows are numbered from 0 without filtered ones; `PromptRow.id` is the row number over all files. Create it with
    `PromptSplit.from_config`.
    """

    def __init__(
        self,
        source: PromptRows,
        numbers: np.ndarray,
        config: DataConfig,
        seed: int,
        create_workers: CreateWorkers,
        images: PromptImages | None = None,
    ) -> None:
        """`numbers` int64 [rows] selects rows of the source, in its order."""
        self.num_filtered = 0
        """Number of rows removed by `data.filter_long_prompts`."""
        self._source = source
        self._row_numbers = numbers
        self._config = config
        self._seed = seed
        self._create_workers = create_workers
        self._workers: PromptWorkers | None = None
        self._prompts: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._converter = images
        self._images: OrderedDict[int, tuple[ImageInput, ...]] = OrderedDict()
        self._cached_bytes = 0

    @classmethod
    def from_config(
        cls,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerFast,
        max_prompt_tokens: int,
        split: SplitName = "train",
        seed: int = 0,
        images: PromptImages | None = None,
        *,
        trust_remote_code: bool = False,
        tools: Sequence[ToolSchema] = (),
        users: Collection[str] = (),
    ) -> PromptSplit:
        """Read and filter a split. `seed` is used if `data.seed` is null; `images` converts images, None if the policy
        reads none; `trust_remote_code` is the tokenizer's; `tools` are described to the policy; `users` are the names
        of simulated users.

        Raises:
            ConfigError: files, columns, templates or lengths do not match the configuration.
            MachineError: a file cannot be copied, the cache cannot be written, or a worker died.
        """
        seed = seed if config.seed is None else config.seed
        settings = PromptSettings(config, tokenizer, max_prompt_tokens, split, images, tools, users)
        source = PromptRows(settings)
        create_workers = partial(PromptWorkers, settings=settings, trust_remote_code=trust_remote_code)
        rows_within_limit = np.arange(len(source))
        if config.filter_long_prompts:
            rows_within_limit = _rows_within_limit(
                _prompt_lengths(source, config.filter_workers, create_workers), max_prompt_tokens
            )
        max_rows = config.train_rows if split == "train" else None
        numbers = rows_within_limit[sample_rows(len(rows_within_limit), max_rows, seed)]
        if split == "validation":
            numbers = numbers[held_out_numbers(len(numbers), config, seed)]
        split_rows = cls(source, numbers, config, seed, create_workers, images)
        split_rows.num_filtered = len(source) - len(rows_within_limit)
        return split_rows

    def __len__(self) -> int:
        return len(self._row_numbers)

    def __getitem__(self, row: int) -> PromptRow:
        """Return a row; `data.keep_*` add entries to its `extra`, under verl's names.

        Raises:
            ConfigError: the row cannot be read, or a column is missing.
        """
        config, prompt_row = self._config, self._source[int(self._row_numbers[row])]
        extra: dict[str, Any] = {}
        if config.keep_raw_tokens:
            extra["raw_prompt_ids"] = self._raw_tokens(row, prompt_row)
        if config.keep_messages:
            extra["raw_prompt"] = [dict(message) for message in prompt_row.messages]
        if config.keep_text:
            extra["full_prompts"] = self._source.text(prompt_row)
        return replace(prompt_row, extra={**prompt_row.extra, **extra}) if extra else prompt_row

    def source_row(self, row: int) -> Mapping[str, Any]:
        """Return all columns of a row.

        Raises:
            ConfigError: the row cannot be read.
        """
        return self._source.source_row(int(self._row_numbers[row]))

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[row] for row in range(len(self)))

    @property
    def has_domains(self) -> bool:
        """Whether rows belong to domains."""
        return bool(self._config.domains)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of used rows per entry of `train_files` (or `validation_files`)."""
        ends = np.searchsorted(self._row_numbers, np.cumsum(self._source.sizes))
        return tuple(np.diff(ends, prepend=0).tolist())

    def prompt(self, row: int) -> tuple[int, ...]:
        """Return the tokens of a row's prompt, at most `max_prompt_tokens`; the latest prompts are cached.

        Raises:
            ConfigError: the prompt is longer and `data.truncation` is `error`.
        """
        return self._tokens(row, None)

    def images(self, row: int) -> tuple[ImageInput, ...]:
        """Return the distinct images of a row's prompt; the latest images are cached.

        Raises:
            ConfigError: an image cannot be decoded.
        """
        if self._converter is None:
            return ()
        if row not in self._images:
            loaded = [image.load(self._converter) for image in self._source.images(int(self._row_numbers[row]))]
            self._images[row] = tuple({image.key: image for image in loaded}.values())
            self._cached_bytes += _size(self._images[row])
            while self._cached_bytes > MAX_CACHED_BYTES and len(self._images) > 1:
                self._cached_bytes -= _size(self._images.popitem(last=False)[1])
        self._images.move_to_end(row)
        return self._images[row]

    def _raw_tokens(self, row: int, prompt_row: PromptRow) -> list[int]:
        tokens = self._tokens(row, prompt_row)
        if min(tokens, default=0) < 0:
            message = f"data.keep_raw_tokens: row {prompt_row.id} has images, which have no token ids"
            raise ConfigError(message, key="data.keep_raw_tokens", value=True, hint="data.keep_raw_tokens=false")
        return list(tokens)

    def create_sampler(self, prompts_per_step: int = 1) -> RowSampler:
        """Create a sampler of training rows, mixed by `data.domains` or `data.weights`, and shuffled if `data.shuffle`
        is set.

        Raises:
            ConfigError: a domain or a weighted file has too few rows left.
        """
        if self._config.domains:
            return self._create_domain_sampler(self._config.prompts_per_domain(prompts_per_step))
        sizes, weights = self.sizes, self._config.weights
        empty = [name for name, size in zip(self._source.names, sizes, strict=False) if not size]
        if weights and empty:
            message = f"data.weights: no row of {empty[0]} is used"
            hint = "remove that file and its weight, or increase data.train_rows or rollout.max_prompt_tokens"
            raise ConfigError(message, key="data.weights", value=empty[0], hint=hint)
        return RowSampler(RowOrder(sizes, weights, shuffle=self._config.shuffle, seed=self._seed))

    def check_domains(self, max_rows: int) -> None:
        """Raise `ConfigError` if one of the first rows belongs to no domain of `data.domains`."""
        if not self._config.domains:
            return
        for number in self._row_numbers[:max_rows].tolist():
            if self._source.domain(number) is None:
                raise ConfigError(
                    f"{self._source.describe_row(number)}: a held-out row belongs to no domain of data.domains",
                    key="data.domains",
                    hint="add its data source to `sources` of a domain, or '*' for all other sources",
                )

    def _create_domain_sampler(self, quotas: Mapping[str, int]) -> RowSampler:
        """Create a sampler of steps with as many rows of each domain as its quota."""
        rows: dict[str, list[int]] = {name: [] for name in quotas}
        for row, number in enumerate(self._row_numbers.tolist()):
            name = self._source.domain(number)
            if name is not None:
                rows[name].append(row)
        for name, quota in quotas.items():
            if len(rows[name]) < quota:
                raise ConfigError(
                    f"data.domains.{name} has {len(rows[name])} rows in data.train_files, fewer than the {quota} of a"
                    " step",
                    key=f"data.domains.{name}",
                    value=quota,
                    hint=f"add rows of its `sources` ({', '.join(self._config.domains[name].sources)}), or lower its"
                    " `share`",
                )
        sizes = [len(numbers) for numbers in rows.values()]
        if unused := len(self) - sum(sizes):
            logger.info("%d rows of data.train_files belong to no domain of data.domains and are not used", unused)
        order = RowOrder(sizes, shuffle=self._config.shuffle, seed=self._seed, quotas=tuple(quotas.values()))
        return RowSampler(order, np.concatenate([np.asarray(numbers, np.int64) for numbers in rows.values()]))

    def batches(self, num_validations: int = 0) -> list[list[int]]:
        """Return all rows once, in batches of at most `data.validation_batch`.

        `num_validations` counts earlier validations; with `data.validation_shuffle`, each has another order.
        """
        rows, max_rows = len(self), self._config.validation_batch or len(self)
        order = RowOrder((rows,), shuffle=self._config.validation_shuffle, seed=self._seed)
        rows_in_order = [order[num_validations * rows + index] for index in range(rows)]
        return [rows_in_order[start : start + max_rows] for start in range(0, rows, max_rows)]

    def prepare(self, rows: Sequence[int]) -> None:
        """Start tokenizing prompts in `data.workers` processes, if there are any."""
        if not self._config.workers:
            return
        if self._workers is None:
            self._workers = self._create_workers(self._config.workers)
        missing = [row for row in rows if row not in self._prompts and not self._workers.is_pending(row)]
        self._workers.request_tokens({row: int(self._row_numbers[row]) for row in missing})

    def close(self) -> None:
        """Stop the workers; pending prompts are tokenized in this process when they are needed."""
        if self._workers is not None:
            self._workers.close()
        self._workers = None

    def _tokens(self, row: int, prompt_row: PromptRow | None) -> tuple[int, ...]:
        while row not in self._prompts and self._workers is not None and self._workers.is_pending(row):
            for received_row, tokens in self._workers.receive_tokens():
                self._cache(received_row, tokens)
        if row not in self._prompts:
            self._cache(row, self._source.tokens(prompt_row or self._source[int(self._row_numbers[row])]))
        self._prompts.move_to_end(row)
        return self._prompts[row]

    def _cache(self, row: int, tokens: tuple[int, ...]) -> None:
        self._prompts[row] = tokens
        while len(self._prompts) > MAX_CACHED_PROMPTS:
            self._prompts.popitem(last=False)


def _size(images: Sequence[ImageInput]) -> int:
    return sum(len(image.patches) for image in images)


def _prompt_lengths(source: PromptRows, max_workers: int, create_workers: CreateWorkers) -> np.ndarray:
    """Return the number of tokens of each untruncated prompt, int64 [rows], using up to `max_workers` processes."""
    rows = len(source)
    num_workers = min(max_workers, rows // MIN_ROWS_PER_WORKER)
    if num_workers < 2:
        return np.fromiter((source.num_tokens(number) for number in range(rows)), np.int64, rows)
    with create_workers(num_workers) as workers:
        return np.fromiter(workers.iter_lengths(rows), np.int64, rows)


def _rows_within_limit(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Return the rows whose untruncated prompt is within the limit, int64 [≤ rows]."""
    rows_within_limit: np.ndarray = np.flatnonzero(lengths <= limit)
    if not len(rows_within_limit):
        raise ConfigError(
            f"data.filter_long_prompts leaves no rows: the shortest of {len(lengths):,} prompts has "
            f"{lengths.min():,} tokens, more than rollout.max_prompt_tokens = {limit:,}",
            key="rollout.max_prompt_tokens",
            value=limit,
            hint=f"at least: rollout.max_prompt_tokens={lengths.min()}",
        )
    return rows_within_limit
