"""Device mesh of a learner's ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quintet.config.native.learners import ParallelConfig
from quintet.training.parallel.process_group import RankGroup

DIMENSIONS = ("replicate", "shard", "pipeline", "context", "ulysses", "tensor")
"""Mesh dimensions, from least to most communication. The first two are data-parallel."""
FSDP_DIMENSIONS = ("shard", "context", "ulysses")
"""Dimensions over which FSDP shards weights: ranks that split a sequence compute with the same weights, too."""


@dataclass(frozen=True, slots=True)
class LearnerMesh:
    """Device mesh of a learner and this process's groups in it; a single rank has no device mesh."""

    device_mesh: DeviceMesh | None = None
    """Mesh with the `DIMENSIONS`, each of size 1 or more."""
    data: RankGroup = field(default_factory=RankGroup)
    """Data-parallel ranks, which process different micro-batches."""

    @classmethod
    def build(
        cls, ranks: RankGroup, parallel: ParallelConfig, group_size: int | None = None, device: str = "cpu"
    ) -> LearnerMesh:
        """Build the mesh of all ranks of the default process group; all ranks call it. Weights are sharded within
        groups of `group_size` neighbours (default: all).

        Raises:
            ValueError: the number of ranks is not a multiple of the ranks of one model replica; for users,
                `config/checks/sharding.py` checks it before.
        """
        if ranks.size == 1:
            return cls()
        replica = math.prod((parallel.pipeline, parallel.context, parallel.ulysses, parallel.tensor))
        if ranks.size % replica:
            raise ValueError(f"{ranks.size} ranks are not a multiple of a model replica of {replica}")
        data = ranks.size // replica
        shard = shard_group_size(data, group_size, parallel)
        shape = (data // shard, shard, parallel.pipeline, parallel.context, parallel.ulysses, parallel.tensor)
        device_mesh = init_device_mesh(device, shape, mesh_dim_names=DIMENSIONS)
        return cls(device_mesh, _rank_group(device_mesh, ("replicate", "shard"), "data"))

    def size(self, *names: str) -> int:
        """Return the number of ranks along these dimensions."""
        return 1 if self.device_mesh is None else math.prod(int(self.device_mesh[name].size()) for name in names)

    def dimension(self, name: str) -> DeviceMesh:
        """Return the submesh along one dimension.

        Raises:
            ValueError: there is a single rank.
        """
        if self.device_mesh is None:
            raise ValueError("a single rank has no device mesh")
        return self.device_mesh[name]

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """Mesh over which FSDP shards weights; with several sharding groups (hybrid sharding) it is two-dimensional,
        replicate × shard.

        Raises:
            ValueError: there is a single rank.
        """
        return self._sharding_mesh(FSDP_DIMENSIONS, "fsdp")

    @property
    def vision_encoder_mesh(self) -> DeviceMesh:
        """Mesh over which FSDP shards a vision encoder, which tensor-parallel ranks do not split: these ranks as well.

        Raises:
            ValueError: there is a single rank.
        """
        return self._sharding_mesh((*FSDP_DIMENSIONS, "tensor"), "vision_encoder")

    def _sharding_mesh(self, names: tuple[str, ...], name: str) -> DeviceMesh:
        if self.device_mesh is None:
            raise ValueError("a single rank has no device mesh")
        flat = _flatten(self.device_mesh, names, name)
        return flat if self.size("replicate") == 1 else self.device_mesh["replicate", name]

    @property
    def replicas(self) -> RankGroup:
        """Ranks over which gradients are reduced: they compute with the same weights."""
        if self.device_mesh is None:
            return RankGroup()
        return _rank_group(self.device_mesh, ("replicate", *FSDP_DIMENSIONS), "replicas")

    def expert_meshes(self, size: int) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the mesh of `size` neighbours that divide the experts, and the mesh of ranks with the same experts.

        Raises:
            ValueError: the number of ranks is not a multiple of `size`.
        """
        if self.device_mesh is None or self.replicas.size % size:
            raise ValueError(f"{self.replicas.size} ranks cannot be divided into expert-parallel groups of {size}")
        replicas = _flatten(self.device_mesh, ("replicate", *FSDP_DIMENSIONS), "replicas")
        meshes = replicas._unflatten(0, (self.replicas.size // size, size), ("expert_replicas", "expert"))
        return meshes["expert"], meshes["expert_replicas"]


def shard_group_size(data: int, group_size: int | None, parallel: ParallelConfig) -> int:
    """Return the number of data-parallel ranks, of `data` in all, in one sharding group.

    Raises:
        ValueError: the ranks cannot be divided into groups of `group_size`.
    """
    per_sequence = parallel.context * parallel.ulysses
    if group_size is None or group_size >= data * per_sequence:
        return data
    shard = max(1, group_size // per_sequence)
    if data % shard or group_size % per_sequence:
        raise ValueError(
            f"{data * per_sequence} ranks cannot be divided into groups of {group_size} with {per_sequence} "
            "ranks per sequence"
        )
    return shard


def _flatten(device_mesh: DeviceMesh, names: tuple[str, ...], name: str) -> DeviceMesh:
    """Return several dimensions as one; torch creates its process group once."""
    return device_mesh[names]._flatten(name)


def _rank_group(device_mesh: DeviceMesh, names: tuple[str, ...], name: str) -> RankGroup:
    flat = _flatten(device_mesh, names, name)
    group = flat.get_group()
    return RankGroup(dist.get_rank(group), int(flat.size()), group)
