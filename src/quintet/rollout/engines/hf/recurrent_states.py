"""States of recurrent layers, for each sequence in use."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quintet.policies.recurrent_layers import RecurrentState, Run
from quintet.rollout.engines.hf.paged_attention import PagedLayout


class RecurrentStates:
    """States of recurrent layers behind the computed tokens of sequences, by their row of the block tables. Blocks have
    no part of them, so a sequence cannot continue behind a block of another one."""

    def __init__(self) -> None:
        self._stored: dict[int, RecurrentState] = {}
        """By layer: tensors whose first dimension is the row."""

    def release_memory(self) -> None:
        """Free the memory of all states; no sequence may be in use."""
        self._stored.clear()

    def mix(self, layer: int, layout: PagedLayout, states: Tensor, run: Run) -> Tensor:
        """See `RecurrentLayout.mix`. Sequences with one new token, which decode, are computed together."""
        stored, out = self._stored.setdefault(layer, RecurrentState()), list[Tensor]()
        ends = layout.ends
        for part in _parts(layout):
            count = part.stop - part.start
            new = states[int(ends[part.start] - layout.counts[part.start]) : int(ends[part.stop - 1])]
            rows = torch.from_numpy(layout.rows[part].copy()).to(states.device)
            state = _rows_of(stored, rows) if layout.starts[part.start] else RecurrentState()
            out.append(run(new.view(count, -1, new.shape[1]), state).flatten(0, 1))
            _store(stored, rows, state, int(layout.tables.shape[0]))
        return torch.cat(out)


def _parts(layout: PagedLayout) -> Iterator[slice]:
    """Yield sequences that are computed together: one, or several that add one token each to earlier ones."""
    first, rows = 0, list[int]()
    for index in range(layout.num_sequences):
        row, is_single = int(layout.rows[index]), layout.counts[index] == 1 and layout.starts[index] > 0
        if rows and (not is_single or row in rows):
            yield slice(first, index)
            rows = []
        if not is_single:
            yield slice(index, index + 1)
            continue
        first = index if not rows else first
        rows.append(row)
    if rows:
        yield slice(first, layout.num_sequences)


def _rows_of(stored: RecurrentState, rows: Tensor) -> RecurrentState:
    state = RecurrentState()
    state.conv_states = {index: value[rows] for index, value in stored.conv_states.items()}
    state.recurrent_states = {index: value[rows] for index, value in stored.recurrent_states.items()}
    return state


def _store(stored: RecurrentState, rows: Tensor, state: RecurrentState, num_rows: int) -> None:
    for target, source in (
        (stored.conv_states, state.conv_states),
        (stored.recurrent_states, state.recurrent_states),
    ):
        for index, value in source.items():
            if index not in target:
                target[index] = value.new_zeros((num_rows, *value.shape[1:]))
            target[index][rows] = value
