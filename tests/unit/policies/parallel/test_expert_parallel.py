"""If these fail, a mixture of experts that is shared out over several devices learns something else than on one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import model_parallel_steps
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quintet.errors import ConfigError
from quintet.policies.model_loading import load_model
from quintet.policies.parallel.expert_parallel import apply_expert_parallel

Told = dict[str, Any]


@pytest.fixture(scope="module")
def alone(mixture_directory: Path) -> Told:
    return model_parallel_steps.alone(mixture_directory)


@pytest.fixture(scope="module")
def on_two(mixture_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Told]]:
    ways = ("alltoall", "allgather", "alltoall recomputed", "alltoall idle", "allgather idle")
    return model_parallel_steps.on_ranks(ways, mixture_directory, 2, tmp_path_factory.mktemp("two") / "meeting")


def same(ours: Told, theirs: Told) -> None:
    for name in ("losses", "norms"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, sums in theirs["weights"].items():
        # sums of all elements; processors round the steps before them differently
        assert ours["weights"][name] == pytest.approx(sums, rel=5e-5, abs=1e-5), name


@pytest.mark.parametrize("way", ["alltoall", "allgather", "alltoall recomputed"])
def test_two_ranks_learn_the_same_as_one(alone: Told, on_two: list[dict[str, Told]], way: str) -> None:
    assert abs(alone["losses"][-1] - alone["losses"][0]) > 0.1
    same(on_two[0][way], alone)
    assert on_two[0][way] == on_two[1][way]


@pytest.mark.parametrize("way", ["alltoall idle", "allgather idle"])
def test_a_rank_without_tokens_and_experts_without_tokens_take_part(on_two: list[dict[str, Told]], way: str) -> None:
    assert len(on_two[0][way]["gaps"]) == 3
    assert min(on_two[0][way]["sizes"]) > 0.01
    assert max(on_two[0][way]["gaps"]) < 1e-6


@pytest.fixture
def by_itself(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("expert",))["expert"]
    dist.destroy_process_group()


def test_a_copy_has_experts_of_its_own(mixture_directory: Path, by_itself: DeviceMesh) -> None:
    """A frozen reference would change with the policy."""
    model = load_model(mixture_directory)
    apply_expert_parallel(model, by_itself)
    other, tokens = copy.deepcopy(model), torch.arange(12)[None]
    positions = {"layout": model_parallel_steps.one_sequence(12), "use_cache": False}
    before = model.model(tokens, **positions).last_hidden_state
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.zero_()
    assert torch.equal(other.model(tokens, **positions).last_hidden_state, before)
    assert not torch.equal(model.model(tokens, **positions).last_hidden_state, before)


def test_a_model_without_experts_is_refused(policy_directory: Path, by_itself: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        apply_expert_parallel(load_model(policy_directory), by_itself)


def test_ranks_must_divide_the_experts(mixture_directory: Path, by_itself: DeviceMesh) -> None:
    class Three:
        get_local_rank, size, get_group = (lambda self: 0), (lambda self: 3), (lambda self: None)

    with pytest.raises(ConfigError, match="does not divide the 4 experts") as error:
        apply_expert_parallel(load_model(mixture_directory), Three())  # type: ignore[arg-type]
    assert error.value.hint == "valid values: 1, 2, 4"
