"""Rows of fine-tuning that are encoded when a step needs them, by worker processes ahead of training."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from quintet.data.conversations import TokenizedConversations, TokenSequence
from quintet.errors import ConfigError
from quintet.records import Batch

Encode = Callable[[int], list[TokenSequence]]
"""Encodes the row with a number."""


class Conversations(Protocol):
    """Encoded rows of a split."""

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int]) -> Batch: ...

    def prepare(self, rows: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class EncodingWorkers(Protocol):
    """Processes that encode rows; results come in the order of the requests."""

    def submit(self, request: dict[str, Any]) -> None: ...

    def result(self) -> Any: ...

    def close(self) -> None: ...


class RowStore(Protocol):
    """Encoded rows that outlive the run, by the number of the row."""

    def get(self, row: int) -> list[TokenSequence]: ...

    def add(self, row: int, sequences: Sequence[TokenSequence]) -> None: ...

    def flush(self) -> None: ...


class LazyConversations:
    """Rows that are encoded once, when a batch first needs them, and then take five bytes per token, or nine with
    images.

    Rows that have no trained token, for example after truncation, are left out of their batches.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        encode: Encode,
        start_workers: Callable[[], EncodingWorkers] | None,
        note: Callable[[str], None],
        add_images: Callable[[Batch, list[int]], Batch] | None = None,
        store: RowStore | None = None,
    ) -> None:
        """`numbers` are the numbers of the rows over all files. `start_workers` starts the processes that encode in
        advance, None to encode in this one. `add_images` as in `TokenizedConversations`. `store` has rows that are
        encoded already, and gets the others."""
        self._numbers = numbers
        self._encode = encode
        self._start_workers = start_workers
        self._workers: EncodingWorkers | None = None
        self._note = note
        self._add_images = add_images
        self._store = store
        self._encoded: dict[int, list[tuple[array[int], bytes]]] = {}
        self._pending: deque[list[int]] = deque()
        """Rows of the requests whose results were not received."""
        self._has_dropped = False

    def __len__(self) -> int:
        return len(self._numbers)

    def prepare(self, rows: Sequence[int]) -> None:
        """Have the workers encode rows for a later batch."""
        if self._start_workers is None:
            return
        pending = {row for rows in self._pending for row in rows}
        missing = [row for row in dict.fromkeys(rows) if row not in pending and not self._is_encoded(row)]
        if missing:
            self._workers = self._workers or self._start_workers()
            self._workers.submit({"rows": [int(self._numbers[row]) for row in missing]})
            self._pending.append(missing)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return the sequences of rows as a batch in which each row is a trajectory.

        Raises:
            ConfigError: a row cannot be read or rendered, or is too long; or no row has a trained token.
            MachineError: a worker died.
        """
        sequences = TokenizedConversations(
            [self._row(row) for row in rows], self._add_images and self._with_images(rows)
        )
        if not len(sequences):
            message = f"no row of a step has a response left after truncation, of {len(rows)} rows"
            raise ConfigError(message, key="sft.max_tokens", hint="a larger sft.max_tokens, or another data.truncation")
        if len(sequences) < len(rows) and not self._has_dropped:
            self._has_dropped = True
            self._note("rows that have no response left after truncation are left out of their steps")
        batch = sequences.batch(range(len(sequences)))
        return replace(batch, group=torch.tensor([rows[index] for index in sequences.included_rows])[batch.group])

    def close(self) -> None:
        """End the workers, and write what was encoded to the store."""
        if self._workers is not None:
            self._workers.close()
        if self._store is not None:
            self._store.flush()

    def _is_encoded(self, row: int) -> bool:
        """Return whether a row was encoded, after taking it from the store if it has it."""
        store = None if row in self._encoded else self._store
        if store is not None and (sequences := store.get(int(self._numbers[row]))):
            self._keep(row, sequences)
        return row in self._encoded

    def _with_images(self, rows: Sequence[int]) -> Callable[[Batch, list[int]], Batch]:
        add_images = self._add_images

        def add(batch: Batch, indices: list[int]) -> Batch:
            return batch if add_images is None else add_images(batch, [rows[index] for index in indices])

        return add

    def _row(self, row: int) -> list[TokenSequence]:
        while row not in self._encoded and any(row in rows for rows in self._pending):
            self._receive()
        if not self._is_encoded(row):
            self._add(row, self._encode(int(self._numbers[row])))
        return [TokenSequence(tuple(tokens), tuple(map(bool, mask))) for tokens, mask in self._encoded[row]]

    def _receive(self) -> None:
        """Store the rows of the oldest request."""
        if self._workers is None:
            raise ValueError("no request is pending without workers")
        for row, sequences in zip(self._pending.popleft(), self._workers.result(), strict=True):
            self._add(row, decode_sequences(sequences))

    def _add(self, row: int, sequences: Sequence[TokenSequence]) -> None:
        if self._store is not None:
            self._store.add(int(self._numbers[row]), sequences)
        self._keep(row, sequences)

    def _keep(self, row: int, sequences: Sequence[TokenSequence]) -> None:
        kind = "i" if self._add_images is None else "q"
        self._encoded[row] = [(array(kind, each.tokens), bytes(each.loss_mask)) for each in sequences]


def decode_sequences(sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[TokenSequence]:
    """Return the sequences of a row in a worker's reply: tokens, and which of them are trained."""
    return [TokenSequence(tuple(tokens), tuple(map(bool, loss_mask))) for tokens, loss_mask in sequences]


def iter_batches(conversations: Conversations, batch_size: int) -> Iterator[Batch]:
    """Yield all rows in batches, of which the next one is encoded while one is used."""
    starts = range(0, len(conversations), batch_size)
    parts = [range(first, min(first + batch_size, len(conversations))) for first in starts]
    for number, rows in enumerate(parts):
        for later in parts[number + 1 : number + 2]:
            conversations.prepare(later)
        yield conversations.batch(rows)
