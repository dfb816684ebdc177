"""A learner's part of a checkpoint: weights and optimizer as its ranks hold them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quintet.errors import MachineError
from quintet.training.lay import Lay
from quintet.training.pieces import Held, Place, Stored, held_pieces, write_pieces
from quintet.training.ranks import Ranks
from quintet.training.sharded_state import is_flat, load_moments, load_weights, moments, weights
from quintet.training.snapshot import HostMemory

__all__ = ["MODEL", "OPTIMIZER", "LearnerCopies", "copy_learner", "copy_tensors", "restore_learner"]

MODEL, OPTIMIZER = "model", "optim"
"""In the names of files, as verl has them."""


ALONE = Ranks()


class _Learner(Protocol):
    @property
    def lay(self) -> Lay: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    def at_hand(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class LearnerCopies:
    """What of a learner this rank writes, in main memory."""

    name: str
    ranks: Ranks
    parts: Mapping[str, list[Held]] = field(default_factory=dict)
    gathered: bool = False
    """The first rank has every tensor, and has it whole."""

    @property
    def whole(self) -> dict[str, Tensor]:
        """Those of the weights that this rank holds as a whole, by name."""
        return {held.name: held.tensor for held in self.parts.get(MODEL, []) if held.key == held.name}

    def write(self, checkpoint: Path, there: Mapping[int, Place] | None = None) -> None:
        """Write them; of weights that are `there` already, only where."""
        for stem, pieces in self.parts.items():
            write_pieces(checkpoint, f"{self.name}/{stem}", pieces, self.ranks, there)


def copy_learner(
    learner: _Learner, name: str, contents: Collection[str], memory: HostMemory, ranks: Ranks = ALONE
) -> LearnerCopies:
    """Weights and optimizer, as far as `contents` names them, as they are now. All `ranks` call it, those of every
    mesh dimension."""
    found: dict[str, Mapping[str, Tensor]] = {}
    with learner.at_hand() if is_flat(learner.lay.module) else nullcontext():
        if "model" in contents:
            found[MODEL] = weights(learner.lay.module)
        if "optimizer" in contents:
            found[OPTIMIZER] = moments(learner.lay.module, learner.optimizer)
        return copy_tensors(found, name, memory, ranks)


def copy_tensors(
    found: Mapping[str, Mapping[str, Tensor]], name: str, memory: HostMemory, ranks: Ranks = ALONE
) -> LearnerCopies:
    """Of each set of tensors the pieces that this rank has to write, as they are now."""
    parts: dict[str, list[Held]] = {}
    for stem, tensors in found.items():
        pieces = held_pieces(tensors, ranks)
        copies = memory.copy({held.key: held.tensor for held in pieces}, f"{name}/{stem}")
        parts[stem] = [Held(held.name, held.shape, held.offsets, copies[held.key]) for held in pieces]
    return LearnerCopies(name, ranks, parts)


def restore_learner(learner: _Learner, checkpoint: Path, name: str, contents: Collection[str]) -> None:
    """Take up what `copy_learner` had written, as far as `contents` names it, from whatever number of ranks.

    Raises:
        MachineError: it isn't there, or it is that of another model.
    """
    with learner.at_hand():
        if "model" in contents:
            load_weights(learner.lay.module, _stored(checkpoint, f"{name}/{MODEL}"))
        if "optimizer" in contents:
            load_moments(learner.lay.module, learner.optimizer, _stored(checkpoint, f"{name}/{OPTIMIZER}"))


def _stored(checkpoint: Path, stem: str) -> Stored:
    stored = Stored.at(checkpoint, stem)
    if stored is None:
        raise MachineError(f"{checkpoint} has no {stem}", "checkpoint.load_contents says what is read")
    return stored
