"""Cache of encoded rows of fine-tuning: a run that is resumed, or started again on the same data, reads their tokens.

Each file of the cache has the sequences of up to `ROWS_PER_FILE` rows. Its name begins with a fingerprint of everything
that the tokens follow from. Files are written at once and never changed, so that runs may share them.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from quintet import __version__
from quintet.arrow_values import checked
from quintet.data.conversations import TokenSequence
from quintet.data.data_files import write_atomically
from quintet.data.tables import remove_unused
from quintet.errors import MachineError

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_FILE: Final = 16384
"""Rows that are encoded before they are written; a killed run loses them."""
DIRECTORY: Final = "encoded"
"""Subdirectory of the cache."""
ROW, TOKENS, LOSS_MASK = "row", "tokens", "loss_mask"


class EncodedRows:
    """Sequences of rows by the number of the row."""

    def __init__(self, cache: Path, inputs: Mapping[str, Any], note: Callable[[str], None]) -> None:
        """Open the files of earlier runs.

        Args:
            cache: The cache; it may be missing, or not writable.
            inputs: JSON values that the tokens follow from, besides the version of Quintet.
            note: Called with a message if rows cannot be written.
        """
        self._cache = cache
        text = json.dumps({**inputs, "version": __version__}, sort_keys=True)
        self._fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._note = note
        self._added: dict[int, Sequence[TokenSequence]] = {}
        self._is_writable = True
        paths = sorted((cache / DIRECTORY).glob(f"{self._fingerprint}-*.arrow"))
        self._files = [file for path in paths if path != self._mark and (file := _open(path)) is not None]

    @property
    def are_checked(self) -> bool:
        """Whether a run with the same inputs has checked the columns of all rows."""
        return self._mark.exists()

    def set_checked(self) -> None:
        """Note that the columns of all rows were checked."""
        self._write(self._mark, {})

    @property
    def _mark(self) -> Path:
        """File without rows that notes the check."""
        return self._cache / DIRECTORY / f"{self._fingerprint}-checked.arrow"

    def __contains__(self, row: int) -> bool:
        return any(file.span(row) for file in self._files)

    def get(self, row: int) -> list[TokenSequence]:
        """Return the sequences of a row, none if it is not in the cache."""
        return next((sequences for file in self._files if (sequences := file.get(row))), [])

    def add(self, row: int, sequences: Sequence[TokenSequence]) -> None:
        """Add a row, which is written with others."""
        if self._is_writable:
            self._added[row] = sequences
            if len(self._added) >= ROWS_PER_FILE:
                self.flush()

    def flush(self) -> None:
        """Write the rows that were added; if that fails, no more are written."""
        if self._added:
            self._write(self._cache / DIRECTORY / f"{self._fingerprint}-{uuid.uuid4().hex}.arrow", self._added)
            self._added = {}

    def _write(self, path: Path, rows: Mapping[int, Sequence[TokenSequence]]) -> None:
        if not self._is_writable:
            return
        try:
            write_atomically(path, partial(_write, rows))
            remove_unused(self._cache, path)
        except MachineError as error:
            self._is_writable = False
            self._note(f"the next run will encode rows again: {error.message}")


class _EncodedFile:
    """Sequences of rows in a mapped Arrow file."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self._rows = np.frombuffer(batch.column(ROW).buffers()[1], np.int64, len(batch))
        tokens, masks = batch.column(TOKENS), batch.column(LOSS_MASK)
        self._ends = np.frombuffer(tokens.buffers()[1], np.int32, len(batch) + 1)
        self._tokens = np.frombuffer(tokens.values.buffers()[1], np.int32, len(tokens.values))
        self._masks = np.frombuffer(masks.values.buffers()[1], np.uint8, len(tokens.values))

    def get(self, row: int) -> list[TokenSequence]:
        """Return the sequences of a row, none if it is not in the file."""
        return [self._sequence(number) for number in self.span(row)]

    def span(self, row: int) -> range:
        """Return the numbers of the sequences of a row, whose rows are in ascending order."""
        return range(*(int(np.searchsorted(self._rows, row, side)) for side in ("left", "right")))

    def _sequence(self, number: int) -> TokenSequence:
        span = slice(self._ends[number], self._ends[number + 1])
        return TokenSequence(tuple(self._tokens[span].tolist()), tuple(map(bool, self._masks[span].tolist())))


def _schema() -> pa.Schema:
    import pyarrow as pa

    types = {ROW: pa.int64(), TOKENS: pa.list_(pa.int32()), LOSS_MASK: pa.list_(pa.uint8())}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in types.items()])


def _open(path: Path) -> _EncodedFile | None:
    """Return a file of the cache, None if it is damaged; its rows are then encoded again."""
    import pyarrow as pa

    with suppress(OSError):  # the cache may belong to somebody else
        os.utime(path)
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batch = checked(reader.get_batch(0)) if reader.schema == _schema() and reader.num_record_batches == 1 else None
    except (OSError, ValueError):
        return None
    return None if batch is None or not _is_consistent(batch) else _EncodedFile(batch)


def _is_consistent(batch: pa.RecordBatch) -> bool:
    """Return whether nothing is null, and each sequence has as many tokens as entries of its loss mask."""
    if any(column.null_count or column.offset for column in batch.columns):
        return False
    tokens, masks = (
        np.frombuffer(batch.column(name).buffers()[1], np.int32, len(batch) + 1) for name in (TOKENS, LOSS_MASK)
    )
    return np.array_equal(tokens, masks)


def _write(rows: Mapping[int, Sequence[TokenSequence]], path: Path) -> None:
    import pyarrow as pa

    sequences = [(row, sequence) for row in sorted(rows) for sequence in rows[row]]
    columns = [
        [row for row, _ in sequences],
        [sequence.tokens for _, sequence in sequences],
        [tuple(map(int, sequence.loss_mask)) for _, sequence in sequences],
    ]
    schema = _schema()
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
