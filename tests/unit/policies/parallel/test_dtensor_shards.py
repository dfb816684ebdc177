"""If these fail, ranks with GPUs can't have their parts of weights and moments in host memory: what was moved away
comes back at once, a step mixes devices, or a checkpoint is read into a copy that nobody looks at."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from quintet.policies.parallel.dtensor_shards import dtensor_from_shard
from quintet.policies.parallel.expert_parallel import as_full_experts
from quintet.training.offload import copy_to_device
from quintet.training.optim.optimizer import DTensorStep


@pytest.fixture
def part() -> torch.Tensor:
    return torch.arange(6.0).view(3, 2)


def of_gpus(*names: str) -> DeviceMesh:
    """A mesh of one rank with a GPU, over which nobody talks."""
    ranks = torch.zeros([1] * len(names), dtype=torch.int)
    return DeviceMesh("cuda", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def in_main_memory(part: torch.Tensor) -> DTensor:
    return dtensor_from_shard(part, of_gpus("weights"), [Shard(0)], part.shape, part.stride())


def test_a_part_stays_where_it_is(part: torch.Tensor) -> None:
    whole = in_main_memory(part)
    assert whole.to_local().data_ptr() == part.data_ptr()
    assert (whole.shape, whole.stride(), whole.dtype) == (part.shape, part.stride(), part.dtype)
    assert whole.placements == (Shard(0),)


def test_what_moves_away_is_away(part: torch.Tensor) -> None:
    there = copy_to_device(in_main_memory(part), torch.device("cpu"))
    assert isinstance(there, DTensor)
    assert there.to_local().device.type == "cpu"
    assert torch.equal(there.to_local(), part)
    assert there.to_local().data_ptr() != part.data_ptr()


def test_moments_stay_beside_weights_in_main_memory(part: torch.Tensor) -> None:
    """Two steps: the second begins with the moments that the first left."""
    ours, theirs = nn.Parameter(in_main_memory(part.clone())), nn.Parameter(part.clone())
    steps, expected = (torch.optim.AdamW([one], lr=0.1, fused=True) for one in (ours, theirs))
    by_parts = DTensorStep(steps)
    for _ in range(2):
        ours.grad, theirs.grad = in_main_memory(torch.ones_like(part)), torch.ones_like(part)
        by_parts()
        expected.step()
    held = steps.state[ours]["exp_avg"]
    assert isinstance(held, DTensor)
    assert held.to_local().device.type == "cpu"
    assert torch.equal(ours.detach().to_local(), theirs.detach())  # type: ignore[attr-defined]


def test_experts_in_main_memory_are_read_into_where_they_are(part: torch.Tensor) -> None:
    whole = as_full_experts(in_main_memory(part), of_gpus("expert", "expert_replicas"))
    assert whole.to_local().data_ptr() == part.data_ptr()  # type: ignore[attr-defined]
