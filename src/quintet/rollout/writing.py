"""What running requests have written and where each one ends, in arrays: no step of decoding loops over requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quintet.records import Request

__all__ = ["Beginning", "WrittenRows"]

GRAIN = 64
MOST_STOP_SETS = 16
"""Different sets of tokens that end answers, which are remembered while nothing runs."""

Whole = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Beginning:
    """A request that begins to write, or goes on: what it wrote before was read with its prompt."""

    request: Request
    tokens: Sequence[int]
    logprobs: Sequence[float]
    limit: int
    """Tokens at which it ends, for want of room or because no more were asked for."""
    special: bool
    """Whether more than a temperature decides what is drawn."""


class WrittenRows:
    """The running requests in rows 0 … count - 1. The last ones move into gaps."""

    def __init__(self, slots: int) -> None:
        """So many requests at a time."""
        self.count = 0
        self.last = np.zeros(slots, np.int64)
        """The token that each wrote last."""
        self.written = np.zeros(slots, np.int64)
        """Tokens of its answer."""
        self.held = np.zeros(slots, np.int64)
        """Of these, tokens that were read with its prompt."""
        self.prompt = np.zeros(slots, np.int64)
        """Tokens of its prompt."""
        self.slot = np.zeros(slots, np.int64)
        """Where the keys and values of its answer lie."""
        self.seed = np.zeros(slots, np.int64)
        self.temperature = np.zeros(slots, np.float32)
        self.special = np.zeros(slots, np.bool_)
        """Whether more than a temperature decides what is drawn."""
        self._limit = np.zeros(slots, np.int64)
        self._least = np.zeros(slots, np.int64)
        self._stops = np.zeros(slots, np.int64)
        self._texts = np.zeros(slots, np.bool_)
        self._tokens = np.zeros((slots, GRAIN), np.int64)
        self._logprobs = np.zeros((slots, GRAIN), np.float32)
        self._columns: tuple[npt.NDArray[Any], ...] = (
            *(self.last, self.written, self.held, self.prompt, self.slot, self.seed, self.temperature, self.special),
            *(self._limit, self._least, self._stops, self._texts),
        )
        self._numbers: dict[tuple[int, ...], int] = {(): 0}
        self._is_stop = np.zeros((1, 1), np.bool_)

    def add(self, beginnings: Sequence[Beginning], slots: Sequence[int], vocabulary: int) -> None:
        """Requests behind the running ones, each with the place of its keys and values."""
        if not self.count and len(self._numbers) > MOST_STOP_SETS:
            self._numbers, self._is_stop = {(): 0}, np.zeros((1, 1), np.bool_)
        rows = slice(self.count, self.count + len(beginnings))
        requests = [begun.request for begun in beginnings]
        self.slot[rows] = slots
        self.written[rows] = self.held[rows] = [len(begun.tokens) for begun in beginnings]
        self.prompt[rows] = [len(request.prompt) for request in requests]
        self.seed[rows] = [request.seed for request in requests]
        self.temperature[rows] = [request.temperature for request in requests]
        self.special[rows] = [begun.special for begun in beginnings]
        self._limit[rows] = [begun.limit for begun in beginnings]
        self._least[rows] = [request.min_tokens for request in requests]
        self._texts[rows] = [bool(request.stop_texts) for request in requests]
        self._stops[rows] = [self._number_of(request.stop_ids, vocabulary) for request in requests]
        self._widen(int(self.written[rows].max(initial=0)))
        for row, begun in enumerate(beginnings, self.count):
            if begun.tokens:
                self._tokens[row, : len(begun.tokens)] = begun.tokens
                self._logprobs[row, : len(begun.tokens)] = begun.logprobs
        self.count += len(beginnings)

    def append(self, tokens: Whole, logprobs: npt.NDArray[np.float32]) -> None:
        """One token more for each row, [count]."""
        rows, written = np.arange(self.count), self.written[: self.count]
        self._widen(int(written.max()) + 1)
        self._tokens[rows, written] = self.last[: self.count] = tokens
        self._logprobs[rows, written] = logprobs
        written += 1

    def ended(self) -> list[int]:
        """Rows that end with the token appended last, and those whose text decides."""
        n, rows = self.count, slice(self.count)
        written = self.written[rows]
        stop = self._is_stop[self._stops[rows], np.minimum(self.last[rows], self._is_stop.shape[1] - 1)]
        nothing = np.isnan(self._logprobs[np.arange(n), written - 1])
        over = written >= self._limit[rows]
        found = (stop | self._texts[rows]) & (written >= self._least[rows]) | over | nothing
        return found.nonzero()[0].tolist()

    def tokens(self, row: int) -> list[int]:
        """What a row has written."""
        return self._tokens[row, : self.written[row]].tolist()  # type: ignore[no-any-return]

    def logprobs(self, row: int) -> list[float]:
        """Log-probs of its tokens, nats."""
        return self._logprobs[row, : self.written[row]].tolist()  # type: ignore[no-any-return]

    def leave(self, leaving: Iterable[int]) -> tuple[list[int], list[int]]:
        """Take rows out; gives the gaps and the rows that moved into them."""
        gone = set(leaving)
        count = self.count - len(gone)
        gaps = sorted(row for row in gone if row < count)
        movers = [row for row in range(count, self.count) if row not in gone]
        if gaps:
            for values in self._columns:
                values[gaps] = values[movers]
            used = int(self.written[gaps].max())
            self._tokens[gaps, :used] = self._tokens[movers, :used]
            self._logprobs[gaps, :used] = self._logprobs[movers, :used]
        self.count = count
        return gaps, movers

    def _number_of(self, stops: tuple[int, ...], vocabulary: int) -> int:
        """The row of `_is_stop` for a set of tokens; its last column is for tokens beyond the vocabulary."""
        if stops not in self._numbers:
            table = np.zeros((len(self._numbers) + 1, vocabulary + 1), np.bool_)
            table[: len(self._is_stop), : self._is_stop.shape[1]] = self._is_stop
            table[-1, [token for token in stops if 0 <= token < vocabulary]] = True
            self._numbers[stops], self._is_stop = len(self._numbers), table
        return self._numbers[stops]

    def _widen(self, columns: int) -> None:
        before = self._tokens.shape[1]
        if columns > before:
            more = max(-(-columns // GRAIN) * GRAIN, min(2 * before, before + 16 * GRAIN)) - before
            self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, more)))
