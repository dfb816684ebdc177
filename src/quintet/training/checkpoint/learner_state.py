"""A learner's part of a checkpoint: sharded weights and optimizer state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quintet.errors import MachineError
from quintet.training.checkpoint.shards import ShardReader, TensorLocation, TensorShard, local_shards, write_shards
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.checkpoint.state_dict import (
    has_flat_parameters,
    load_model_state_dict,
    load_optimizer_state_dict,
    model_state_dict,
    optimizer_state_dict,
)
from quintet.training.parallel.process_group import SINGLE_RANK, RankGroup
from quintet.training.parallel.strategy import ParallelStrategy

MODEL_STEM, OPTIMIZER_STEM = "model", "optim"
"""Stems of file names, as in verl."""


class _Learner(Protocol):
    @property
    def strategy(self) -> ParallelStrategy: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    def on_device(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class LearnerSnapshot:
    """Copies, in host memory, of the shards of a learner that this rank writes."""

    name: str
    ranks: RankGroup
    shards: Mapping[str, list[TensorShard]] = field(default_factory=dict)
    gathered: bool = False
    """Whether the first rank has all full tensors."""

    @property
    def full_weights(self) -> dict[str, Tensor]:
        """Weights of which this rank has the full tensor, by name."""
        return {shard.name: shard.tensor for shard in self.shards.get(MODEL_STEM, []) if shard.key == shard.name}

    def write(self, checkpoint: Path, written: Mapping[int, TensorLocation] | None = None) -> None:
        """Write the shards; of tensors that are already `written`, only the location."""
        for stem, shards in self.shards.items():
            write_shards(checkpoint, f"{self.name}/{stem}", shards, self.ranks, written)


def snapshot_learner(
    learner: _Learner, name: str, contents: Collection[str], memory: HostBuffers, ranks: RankGroup = SINGLE_RANK
) -> LearnerSnapshot:
    """Copy the current weights and optimizer state, if `contents` names them. All `ranks` call it, those of every mesh
    dimension."""
    tensors: dict[str, Mapping[str, Tensor]] = {}
    with learner.on_device() if has_flat_parameters(learner.strategy.module) else nullcontext():
        if "model" in contents:
            tensors[MODEL_STEM] = model_state_dict(learner.strategy.module)
        if "optimizer" in contents:
            tensors[OPTIMIZER_STEM] = optimizer_state_dict(learner.strategy.module, learner.optimizer)
        return snapshot_tensors(tensors, name, memory, ranks)


def snapshot_tensors(
    tensors_by_stem: Mapping[str, Mapping[str, Tensor]], name: str, memory: HostBuffers, ranks: RankGroup = SINGLE_RANK
) -> LearnerSnapshot:
    """Copy the shards that this rank writes."""
    copied: dict[str, list[TensorShard]] = {}
    for stem, tensors in tensors_by_stem.items():
        shards = local_shards(tensors, ranks)
        copies = memory.copy({shard.key: shard.tensor for shard in shards}, f"{name}/{stem}")
        copied[stem] = [TensorShard(shard.name, shard.shape, shard.offsets, copies[shard.key]) for shard in shards]
    return LearnerSnapshot(name, ranks, copied)


def restore_learner(learner: _Learner, checkpoint: Path, name: str, contents: Collection[str]) -> None:
    """Restore weights and optimizer state, if `contents` names them, saved by any number of ranks.

    Raises:
        MachineError: they are missing or belong to another model.
    """
    with learner.on_device():
        if "model" in contents:
            shards = _open_shards(checkpoint, f"{name}/{MODEL_STEM}", "model")
            load_model_state_dict(learner.strategy.module, shards)
        if "optimizer" in contents:
            shards = _open_shards(checkpoint, f"{name}/{OPTIMIZER_STEM}", "optimizer")
            load_optimizer_state_dict(learner.strategy.module, learner.optimizer, shards)


def _open_shards(checkpoint: Path, stem: str, content: str) -> ShardReader:
    reader = ShardReader.open(checkpoint, stem)
    if reader is None:
        hint = f"remove {content} from checkpoint.load_contents, or use a checkpoint that was saved with it"
        raise MachineError(f"{checkpoint} has no {stem}", hint)
    return reader
