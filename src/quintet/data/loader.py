"""In which order rows are used: a pure function of a seed and a position, so that a run goes on where it was."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

import numpy as np

from quintet.errors import ConfigError

__all__ = ["Loader", "RowOrder", "drawn_rows"]

ROUND: Final = 1_000
"""Draws in which each weighted part gets its share exactly."""
LONGEST_ROUND: Final = 1_000_000
Permutation = np.ndarray | range


class RowOrder:
    """Which row comes at a position, counted from the beginning of the run; it never ends.

    Without weights all rows come once in each pass. With weights each part has its own passes, and of every
    `ROUND` draws each part gets its share to the nearest whole row. Where that would be none for one of them, so it is
    of as many draws as give it one, and of every `ROUND` of those each gets its share to half a row for each part.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] = (), *, shuffle: bool, seed: int) -> None:
        """`sizes` counts the rows of each part; `weights` has one for each part, or none.

        Raises:
            ConfigError: there are no rows, or more or fewer weights than parts.
        """
        if weights and len(weights) != len(sizes):
            told = f"data.weights has {len(weights)} for {len(sizes)} files"
            raise ConfigError(told, key="data.weights", value=list(weights), hint="give one for each of train_files")
        if not sum(sizes) or (weights and not all(sizes)):
            raise ConfigError("there are no rows", key="data.train_files", hint="name files with rows")
        self.rows = sum(sizes)
        self._shuffle = shuffle
        self._seed = seed
        self._sizes = tuple(sizes) if weights else (self.rows,)
        self._starts = (0, *accumulate(self._sizes))
        self._quotas = _quotas(weights) if weights else (1,)
        self._round = sum(self._quotas)
        self._passes = tuple(lru_cache(maxsize=2)(self._pass_of(part)) for part in range(len(self._sizes)))
        self._arranged = lru_cache(maxsize=2)(self._arrangement)

    def __getitem__(self, position: int) -> int:
        rounds, place = divmod(position, self._round)
        parts, ranks = self._arranged(rounds)
        part = int(parts[place])
        passed, within = divmod(rounds * self._quotas[part] + int(ranks[place]), self._sizes[part])
        return self._starts[part] + int(self._passes[part](passed)[within])

    def _pass_of(self, part: int) -> Any:
        def order(passed: int) -> Permutation:
            size = self._sizes[part]
            if not self._shuffle:
                return range(size)
            return np.random.default_rng((self._seed, part, passed)).permutation(size)

        return order

    def _arrangement(self, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        """The part of each place in a round, and the place's rank among those of its part."""
        spread = [(np.arange(quota) + 0.5) / quota for quota in self._quotas]
        owners = np.repeat(np.arange(len(self._quotas)), self._quotas)
        parts = owners[np.argsort(np.concatenate(spread), kind="stable")]
        if self._shuffle and len(self._quotas) > 1:
            # a number that no part has, so that this draw is no part's own
            drawn = np.random.default_rng((self._seed, len(self._quotas), rounds))
            blocks = range(0, len(parts), ROUND)
            parts = np.concatenate([drawn.permutation(parts[block : block + ROUND]) for block in blocks])
        ranks = np.empty(len(parts), np.int64)
        for part, quota in enumerate(self._quotas):
            ranks[parts == part] = np.arange(quota)
        return parts, ranks


def _quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the ratio of the weights, each at least 1, by largest remainders; they sum to a round."""
    length = ROUND
    while True:
        exact = np.asarray(weights, np.float64) / sum(weights) * length
        whole = np.floor(exact + 1e-9).astype(np.int64)
        order = np.argsort(-(exact - whole), kind="stable")
        whole[order[: length - int(whole.sum())]] += 1
        if whole.min() >= 1:
            return tuple(whole.tolist())
        if length >= LONGEST_ROUND:
            told = f"data.weights: {min(weights):g} is less than a millionth of the whole"
            raise ConfigError(told, key="data.weights", value=list(weights), hint="leave that file out")
        length *= 10


def drawn_rows(rows: int, wanted: int | None, seed: int) -> np.ndarray:
    """`wanted` of the rows, drawn once by the seed and in the order of the files, int64 [≤ rows]; all where null."""
    if wanted is None or wanted >= rows:
        return np.arange(rows)
    # the fourth number keeps this draw apart from those of an order, which have three
    return np.sort(np.random.default_rng((seed, rows, 0, 1)).permutation(rows)[:wanted])


class Loader:
    """Hands out rows batch by batch, and can say and be told where it is.

    A pass that has fewer rows left than are asked for ends there, as verl's loader drops its last batch: no
    batch holds rows of two passes. With weights there are no passes over all rows, and none are dropped.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] = (), *, shuffle: bool, seed: int) -> None:
        """See `RowOrder`."""
        self._order = RowOrder(sizes, weights, shuffle=shuffle, seed=seed)
        self._position = 0
        self._weighted = bool(weights)
        self._about = {"sizes": list(sizes), "weights": list(weights), "shuffle": shuffle, "seed": seed}

    @property
    def rows(self) -> int:
        """Rows of one pass."""
        return self._order.rows

    @property
    def passes(self) -> int:
        """Whole passes that lie behind; with weights, as many rows as all files have."""
        return self._position // self.rows

    def batches_in_a_pass(self, batch: int) -> int:
        """Whole batches of one pass; what is left over is dropped."""
        return self.rows // batch

    def take(self, batch: int) -> list[int]:
        """The next rows.

        Raises:
            ConfigError: a pass has fewer.
        """
        start = self._start(batch)
        self._position = start + batch
        return [self._order[position] for position in range(start, self._position)]

    def ahead(self, batch: int) -> list[int]:
        """The rows that the next `take` will give."""
        start = self._start(batch)
        return [self._order[position] for position in range(start, start + batch)]

    def _start(self, batch: int) -> int:
        if self._weighted:
            return self._position
        if batch > self.rows:
            raise ConfigError(
                f"there are {self.rows:,} rows, fewer than the {batch:,} of one step",
                key="training.groups_per_step",
                value=batch,
                hint=f"set it to {self.rows} or less, or give more rows",
            )
        behind = self._position % self.rows
        return self._position if behind + batch <= self.rows else self._position + self.rows - behind

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON takes it."""
        return {"position": self._position, **self._about}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from where another was.

        Raises:
            ConfigError: that one had other rows or another order.
        """
        for name, now in self._about.items():
            if state.get(name) != now:
                key = {"sizes": "data.train_files", "seed": "data.seed"}.get(name, f"data.{name}")
                told = f"{key}: the checkpoint was made with {name} {state.get(name)}, here it is {now}"
                raise ConfigError(told, key=key, value=now, hint="restore that, or start anew with resume=never")
        self._position = int(state["position"])
