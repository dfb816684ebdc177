"""Order of rows in training: a pure function of seed and position, so that runs can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

import numpy as np

from quintet.config.native.data import DEFAULT_VALIDATION_ROWS, DataConfig
from quintet.errors import ConfigError

ROUND_SIZE: Final = 1_000
"""Rows of a round, in which each weighted part gets its exact share."""
MAX_ROUND_SIZE: Final = 1_000_000
Permutation = np.ndarray | range


class RowOrder:
    """Infinite sequence of row indices by position, counted from the beginning of the run.

    Without weights, each epoch contains all rows once. With weights, each part has its own epochs, and each round of
    `ROUND_SIZE` positions contains each part's share, rounded to whole rows. If a part's share would be 0, rounds are
    longer, and each block of `ROUND_SIZE` positions contains the shares up to rounding. With quotas, a round contains
    as many rows of each part as its quota.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] = (),
        *,
        shuffle: bool,
        seed: int,
        quotas: Sequence[int] = (),
    ) -> None:
        """`sizes` are the numbers of rows of the parts; `weights` has one weight per part, or none, and so has
        `quotas`.

        Raises:
            ConfigError: there are no rows, or the number of weights differs from the number of parts.
        """
        if weights and len(weights) != len(sizes):
            message = f"data.weights has {len(weights)} weights for {len(sizes)} files"
            raise ConfigError(
                message, key="data.weights", value=list(weights), hint="set one weight per entry of data.train_files"
            )
        if not sum(sizes) or (weights and not all(sizes)):
            raise ConfigError("data.train_files contain no rows", key="data.train_files", hint="name files with rows")
        self.rows = sum(sizes)
        self.has_epochs = not weights and not quotas
        """Whether all rows come before the first one comes again."""
        self.settings: dict[str, Any] = {
            "sizes": list(sizes),
            "weights": list(weights),
            "shuffle": shuffle,
            "seed": seed,
            **({"domains": list(quotas)} if quotas else {}),
        }
        """What the order follows from, as JSON data."""
        self._shuffle = shuffle
        self._seed = seed
        self._sizes = tuple(sizes) if weights or quotas else (self.rows,)
        self._starts = (0, *accumulate(self._sizes))
        self._quotas = tuple(quotas) or (_quotas(weights) if weights else (1,))
        self._round = sum(self._quotas)
        self._epochs = tuple(lru_cache(maxsize=2)(self._epoch_order(part)) for part in range(len(self._sizes)))
        self._cached_arrangement = lru_cache(maxsize=2)(self._arrange_round)

    def __getitem__(self, position: int) -> int:
        round_index, slot = divmod(position, self._round)
        parts, ranks = self._cached_arrangement(round_index)
        part = int(parts[slot])
        epoch, offset = divmod(round_index * self._quotas[part] + int(ranks[slot]), self._sizes[part])
        return self._starts[part] + int(self._epochs[part](epoch)[offset])

    def _epoch_order(self, part: int) -> Any:
        def order(epoch: int) -> Permutation:
            size = self._sizes[part]
            if not self._shuffle:
                return range(size)
            return np.random.default_rng((self._seed, part, epoch)).permutation(size)

        return order

    def _arrange_round(self, round_index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each slot of a round, and the slot's rank among the slots of its part."""
        positions = [(np.arange(quota) + 0.5) / quota for quota in self._quotas]
        owners = np.repeat(np.arange(len(self._quotas)), self._quotas)
        parts = owners[np.argsort(np.concatenate(positions), kind="stable")]
        if self._shuffle and len(self._quotas) > 1:
            # no part has this number: the stream differs from the streams of the parts
            rng = np.random.default_rng((self._seed, len(self._quotas), round_index))
            blocks = range(0, len(parts), ROUND_SIZE)
            parts = np.concatenate([rng.permutation(parts[block : block + ROUND_SIZE]) for block in blocks])
        ranks = np.empty(len(parts), np.int64)
        for part, quota in enumerate(self._quotas):
            ranks[parts == part] = np.arange(quota)
        return parts, ranks


def _quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Return integers ≥ 1 in the ratio of the weights, by largest remainders; they sum to the length of a round."""
    length = ROUND_SIZE
    while True:
        exact = np.asarray(weights, np.float64) / sum(weights) * length
        counts = np.floor(exact + 1e-9).astype(np.int64)
        order = np.argsort(-(exact - counts), kind="stable")
        counts[order[: length - int(counts.sum())]] += 1
        if counts.min() >= 1:
            return tuple(counts.tolist())
        if length >= MAX_ROUND_SIZE:
            message = f"data.weights: {min(weights):g} is less than a millionth of the sum"
            raise ConfigError(message, key="data.weights", value=list(weights), hint="remove that weight and its file")
        length *= 10


def sample_rows(rows: int, num_rows: int | None, seed: int) -> np.ndarray:
    """Sample `num_rows` of the rows without replacement, in the order of the files, int64 [≤ rows]; None for all."""
    if num_rows is None or num_rows >= rows:
        return np.arange(rows)
    # four numbers: the stream differs from the streams of `RowOrder`, seeded by three
    return np.sort(np.random.default_rng((seed, rows, 0, 1)).permutation(rows)[:num_rows])


def held_out_numbers(rows: int, data: DataConfig, seed: int) -> np.ndarray:
    """Return the numbers of the held-out rows among `rows`, int64: the first `data.validation_rows`, or all; without
    validation files, a sample of the training rows."""
    if data.validates_on_training_rows and data.validation_rows is None:
        return sample_rows(rows, DEFAULT_VALIDATION_ROWS, seed)
    return np.arange(rows)[: data.validation_rows]


class RowSampler:
    """Resumable sampler of batches of rows.

    Batches do not span epochs: the incomplete last batch of an epoch is dropped, as by verl's loader. With weights or
    quotas, there are no epochs over all rows, and none are dropped.
    """

    def __init__(self, order: RowOrder, rows: np.ndarray | None = None) -> None:
        """`rows`, int64 [sum of sizes], are the numbers of the rows of the parts; None counts them."""
        self._order = order
        self._numbers = rows
        self._position = 0

    @property
    def rows(self) -> int:
        """Rows per epoch."""
        return self._order.rows

    def take(self, batch: int) -> list[int]:
        """Return the next batch of rows and advance.

        Raises:
            ConfigError: an epoch has fewer rows.
        """
        start = self._start(batch)
        self._position = start + batch
        return self._rows(start, batch)

    def peek(self, batch: int) -> list[int]:
        """Return the rows of the next `take` without advancing."""
        return self._rows(self._start(batch), batch)

    def _rows(self, start: int, count: int) -> list[int]:
        rows = [self._order[position] for position in range(start, start + count)]
        return rows if self._numbers is None else self._numbers[rows].tolist()

    def _start(self, batch: int) -> int:
        if not self._order.has_epochs:
            return self._position
        if batch > self.rows:
            raise ConfigError(
                f"the training data has {self.rows:,} rows, fewer than the {batch:,} of one step",
                key="training.groups_per_step",
                value=batch,
                hint=f"at most: training.groups_per_step={self.rows}, or add rows",
            )
        num_used = self._position % self.rows
        return self._position if num_used + batch <= self.rows else self._position + self.rows - num_used

    def state(self) -> dict[str, Any]:
        """Return the position and settings as JSON data."""
        return {"position": self._position, **self._order.settings}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises:
            ConfigError: the state has other rows or another order.
        """
        for name, value in self._order.settings.items():
            if state.get(name) != value:
                key = {"sizes": "data.train_files", "seed": "data.seed"}.get(name, f"data.{name}")
                message = f"{key}: the checkpoint was made with {name} {state.get(name)}, now it is {value}"
                raise ConfigError(
                    message, key=key, value=value, hint="restore the old value, or start a new run with resume=never"
                )
        self._position = int(state["position"])
