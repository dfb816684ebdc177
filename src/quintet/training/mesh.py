"""The ranks of one learner, ordered by what they share out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quintet.config.native.learners import ParallelConfig
from quintet.training.ranks import Ranks

__all__ = ["DIMENSIONS", "Mesh", "sharded_ranks"]

DIMENSIONS = ("replicate", "shard", "pipeline", "context", "ulysses", "tensor")
"""From ranks that are far from each other to such that talk most. The first two are the data-parallel ones."""
SPLIT_WEIGHTS = ("shard", "context", "ulysses")
"""Ranks that FSDP cuts weights up among: those that share a sequence compute with the same weights, too."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Where this process stands. Alone, there is no device mesh and nothing is sent."""

    devices: DeviceMesh | None = None
    """With the `DIMENSIONS`, each of at least one rank."""
    data: Ranks = field(default_factory=Ranks)
    """Those that do different micro-batches."""

    @classmethod
    def over(cls, ranks: Ranks, parallel: ParallelConfig, group_size: int | None = None, device: str = "cpu") -> Mesh:
        """All ranks of the default process group; every one calls this. With `group_size`, weights are cut up among so
        many neighbours only.

        Raises:
            ValueError: their number isn't a multiple of what one copy of the model takes, of which people are told
                before (`config/layouts.py`).
        """
        if ranks.size == 1:
            return cls()
        copy = math.prod((parallel.pipeline, parallel.context, parallel.ulysses, parallel.tensor))
        if ranks.size % copy:
            raise ValueError(f"{ranks.size} ranks for copies of {copy}")
        data = ranks.size // copy
        shard = sharded_ranks(data, group_size, parallel)
        shape = (data // shard, shard, parallel.pipeline, parallel.context, parallel.ulysses, parallel.tensor)
        devices = init_device_mesh(device, shape, mesh_dim_names=DIMENSIONS)
        return cls(devices, _ranks(devices, ("replicate", "shard"), "data"))

    def size(self, *names: str) -> int:
        """Ranks along those dimensions."""
        return 1 if self.devices is None else math.prod(int(self.devices[name].size()) for name in names)

    def along(self, name: str) -> DeviceMesh:
        """The ranks along one dimension.

        Raises:
            ValueError: there is but this process.
        """
        if self.devices is None:
            raise ValueError("a process that is alone has no device mesh")
        return self.devices[name]

    @property
    def weights(self) -> DeviceMesh:
        """Ranks among which FSDP cuts weights up; before them, where there are several such groups, the groups.

        Raises:
            ValueError: there is but this process.
        """
        if self.devices is None:
            raise ValueError("a process that is alone has no device mesh")
        flat = _flat(self.devices, SPLIT_WEIGHTS, "weights")
        if self.size("replicate") == 1:
            return flat
        return self.devices["replicate", "weights"]

    @property
    def copies(self) -> Ranks:
        """Ranks whose gradients belong together: they compute with the same weights."""
        if self.devices is None:
            return Ranks()
        return _ranks(self.devices, ("replicate", *SPLIT_WEIGHTS), "copies")

    def experts(self, size: int) -> tuple[DeviceMesh, DeviceMesh]:
        """`size` neighbours that share out experts, and the ranks that hold the same ones; both of those that compute
        with the same weights.

        Raises:
            ValueError: their number isn't a multiple of it.
        """
        if self.devices is None or self.copies.size % size:
            raise ValueError(f"{self.copies.size} ranks in groups of {size}")
        copies = _flat(self.devices, ("replicate", *SPLIT_WEIGHTS), "copies")
        both = copies._unflatten(0, (self.copies.size // size, size), ("same_experts", "expert"))
        return both["expert"], both["same_experts"]


def sharded_ranks(data: int, group_size: int | None, parallel: ParallelConfig) -> int:
    """Data-parallel ranks of one sharding group, of so many in all.

    Raises:
        ValueError: groups of that size don't come out even.
    """
    within = parallel.context * parallel.ulysses
    if group_size is None or group_size >= data * within:
        return data
    shard = max(1, group_size // within)
    if data % shard or group_size % within:
        raise ValueError(f"{data * within} ranks in groups of {group_size}, {within} of which share a sequence")
    return shard


def _flat(devices: DeviceMesh, names: tuple[str, ...], name: str) -> DeviceMesh:
    """The ranks of several dimensions as one; made once."""
    return devices[names]._flatten(name)


def _ranks(devices: DeviceMesh, names: tuple[str, ...], name: str) -> Ranks:
    flat = _flat(devices, names, name)
    group = flat.get_group()
    return Ranks(dist.get_rank(group), int(flat.size()), group)
