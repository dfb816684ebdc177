"""State of the running sequences in arrays, so that a decode step does not loop over requests in Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quintet.policies.vision.image_tokens import position_shift
from quintet.records import Request

BLOCK = 64
"""Response tokens by which the arrays grow, at least."""
MAX_STOP_SETS = 16
"""Number of different `stop_token_ids` after which the table is dropped once nothing runs."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A request that starts to decode, or resumes: earlier response tokens were prefilled with its prompt."""

    request: Request
    tokens: Sequence[int]
    logprobs: Sequence[float]
    max_tokens: int
    """Number of response tokens at which it finishes: `Request.max_tokens` or the end of the context."""
    needs_processing: bool
    """Whether its logits need more than the temperature; see `LogitsProcessing`."""


class SequenceSlots:
    """Running sequences in rows 0 … `count` - 1. When rows are removed, the last ones move into the gaps."""

    def __init__(self, max_num_seqs: int) -> None:
        self.count = 0
        self.last_token = np.zeros(max_num_seqs, np.int64)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        """Response tokens."""
        self.num_prefilled = np.zeros(max_num_seqs, np.int64)
        """Response tokens that were prefilled with the prompt, of a resumed sequence."""
        self.first_position = np.zeros(max_num_seqs, np.int64)
        """Position of the first response token: the length of the prompt, if it has no images."""
        self.prompt_length = np.zeros(max_num_seqs, np.int64)
        self.table_row = np.zeros(max_num_seqs, np.int64)
        """Row of the cache's block tables."""
        self.seed = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.needs_processing = np.zeros(max_num_seqs, np.bool_)
        self._max_tokens = np.zeros(max_num_seqs, np.int64)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._stop_set = np.zeros(max_num_seqs, np.int64)
        self._needs_check = np.zeros(max_num_seqs, np.bool_)
        self._tokens = np.zeros((max_num_seqs, BLOCK), np.int64)
        self._logprobs = np.zeros((max_num_seqs, BLOCK), np.float32)
        self._columns: tuple[npt.NDArray[Any], ...] = (
            *(self.last_token, self.num_tokens, self.num_prefilled, self.first_position, self.prompt_length),
            *(self.table_row, self.seed, self.temperature, self.needs_processing),
            *(self._max_tokens, self._min_tokens, self._stop_set, self._needs_check),
        )
        self._stop_set_index: dict[tuple[int, ...], int] = {(): 0}
        self._is_stop = np.zeros((1, 1), np.bool_)

    def add(self, sequences: Sequence[NewSequence], table_rows: Sequence[int], vocab_size: int) -> None:
        """Append sequences behind the running ones."""
        if not self.count and len(self._stop_set_index) > MAX_STOP_SETS:
            self._stop_set_index, self._is_stop = {(): 0}, np.zeros((1, 1), np.bool_)
        rows = slice(self.count, self.count + len(sequences))
        requests = [sequence.request for sequence in sequences]
        self.table_row[rows] = table_rows
        self.prompt_length[rows] = [len(request.prompt) for request in requests]
        self.num_tokens[rows] = self.num_prefilled[rows] = [len(sequence.tokens) for sequence in sequences]
        self.first_position[rows] = [_next_position(request) for request in requests]
        self.seed[rows] = [request.seed for request in requests]
        self.temperature[rows] = [request.temperature for request in requests]
        self.needs_processing[rows] = [sequence.needs_processing for sequence in sequences]
        self._max_tokens[rows] = [sequence.max_tokens for sequence in sequences]
        self._min_tokens[rows] = [request.min_tokens for request in requests]
        self._needs_check[rows] = [bool(request.stop_strings or request.structured_output) for request in requests]
        self._stop_set[rows] = [self._index_of(request.stop_token_ids, vocab_size) for request in requests]
        self._widen(int(self.num_tokens[rows].max(initial=0)))
        for row, sequence in enumerate(sequences, self.count):
            if sequence.tokens:
                self._tokens[row, : len(sequence.tokens)] = sequence.tokens
                self._logprobs[row, : len(sequence.tokens)] = sequence.logprobs
        self.count += len(sequences)

    def append(self, tokens: IntArray, logprobs: npt.NDArray[np.float32]) -> None:
        """Append one token to each running sequence; both arrays [count]."""
        rows, num_tokens = np.arange(self.count), self.num_tokens[: self.count]
        self._widen(int(num_tokens.max()) + 1)
        self._tokens[rows, num_tokens] = self.last_token[: self.count] = tokens
        self._logprobs[rows, num_tokens] = logprobs
        num_tokens += 1

    def finish_candidates(self) -> list[int]:
        """Rows that finish with their last token, and rows with stop strings or structured outputs, which the caller
        has to check."""
        n, rows = self.count, slice(self.count)
        num_tokens = self.num_tokens[rows]
        stop = self._is_stop[self._stop_set[rows], np.minimum(self.last_token[rows], self._is_stop.shape[1] - 1)]
        is_nan = np.isnan(self._logprobs[np.arange(n), num_tokens - 1])
        is_full = num_tokens >= self._max_tokens[rows]
        candidates = (stop | self._needs_check[rows]) & (num_tokens >= self._min_tokens[rows]) | is_full | is_nan
        finishing: list[int] = candidates.nonzero()[0].tolist()
        return finishing

    def tokens(self, row: int) -> list[int]:
        """Response tokens of a row."""
        return self._tokens[row, : self.num_tokens[row]].tolist()  # type: ignore[no-any-return]

    def logprobs(self, row: int) -> list[float]:
        """Log-probs of the response tokens of a row, nats."""
        return self._logprobs[row, : self.num_tokens[row]].tolist()  # type: ignore[no-any-return]

    def remove(self, removed: Iterable[int]) -> tuple[list[int], list[int]]:
        """Remove rows; returns the gaps and the rows that moved into them."""
        removed = set(removed)
        count = self.count - len(removed)
        gaps = sorted(row for row in removed if row < count)
        moved = [row for row in range(count, self.count) if row not in removed]
        if gaps:
            for values in self._columns:
                values[gaps] = values[moved]
            used = int(self.num_tokens[gaps].max())
            self._tokens[gaps, :used] = self._tokens[moved, :used]
            self._logprobs[gaps, :used] = self._logprobs[moved, :used]
        self.count = count
        return gaps, moved

    def _index_of(self, stop_token_ids: tuple[int, ...], vocab_size: int) -> int:
        """Row of `_is_stop` for a set of tokens; its last column stands for tokens beyond the vocabulary."""
        if stop_token_ids not in self._stop_set_index:
            table = np.zeros((len(self._stop_set_index) + 1, vocab_size + 1), np.bool_)
            table[: len(self._is_stop), : self._is_stop.shape[1]] = self._is_stop
            table[-1, [token for token in stop_token_ids if 0 <= token < vocab_size]] = True
            self._stop_set_index[stop_token_ids], self._is_stop = len(self._stop_set_index), table
        return self._stop_set_index[stop_token_ids]

    def _widen(self, columns: int) -> None:
        before = self._tokens.shape[1]
        if columns > before:
            more = max(-(-columns // BLOCK) * BLOCK, min(2 * before, before + 16 * BLOCK)) - before
            self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, more)))


def _next_position(request: Request) -> int:
    """Return the position behind the prompt."""
    return len(request.prompt) + (position_shift(request.prompt) if request.images else 0)
