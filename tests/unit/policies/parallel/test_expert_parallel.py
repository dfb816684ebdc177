"""If these fail, a mixture of experts with expert parallelism learns something else than on one device."""

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

Results = dict[str, Any]


@pytest.fixture(scope="module")
def single_process(mixture_directory: Path) -> Results:
    return model_parallel_steps.train_in_one_process(mixture_directory)


@pytest.fixture(scope="module")
def two_ranks(mixture_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Results]]:
    cases = ("alltoall", "allgather", "alltoall recomputed", "alltoall idle", "allgather idle")
    return model_parallel_steps.train_on_ranks(cases, mixture_directory, 2, tmp_path_factory.mktemp("ranks"))


def assert_close(actual: Results, expected: Results) -> None:
    for name in ("losses", "norms"):
        assert actual[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, sums in expected["weights"].items():
        # sums of all elements; processors round the steps before them differently
        assert actual["weights"][name] == pytest.approx(sums, rel=5e-5, abs=1e-5), name


@pytest.mark.parametrize("case", ["alltoall", "allgather", "alltoall recomputed"])
def test_two_ranks_learn_the_same_as_one(
    single_process: Results, two_ranks: list[dict[str, Results]], case: str
) -> None:
    assert abs(single_process["losses"][-1] - single_process["losses"][0]) > 0.1
    assert_close(two_ranks[0][case], single_process)
    assert two_ranks[0][case] == two_ranks[1][case]


@pytest.mark.parametrize("case", ["alltoall idle", "allgather idle"])
def test_a_rank_without_tokens_and_experts_without_tokens_take_part(
    two_ranks: list[dict[str, Results]], case: str
) -> None:
    assert len(two_ranks[0][case]["gaps"]) == 3
    assert min(two_ranks[0][case]["sizes"]) > 0.01
    assert max(two_ranks[0][case]["gaps"]) < 1e-6


@pytest.fixture
def single_rank_mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of only this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("expert",))["expert"]
    dist.destroy_process_group()


def test_a_copy_has_experts_of_its_own(mixture_directory: Path, single_rank_mesh: DeviceMesh) -> None:
    """Otherwise a frozen reference would change with the policy."""
    model = load_model(mixture_directory)
    apply_expert_parallel(model, single_rank_mesh)
    other, tokens = copy.deepcopy(model), torch.arange(12)[None]
    positions = {"layout": model_parallel_steps.one_sequence(12), "use_cache": False}
    before = model.model(tokens, **positions).last_hidden_state
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.zero_()
    assert torch.equal(other.model(tokens, **positions).last_hidden_state, before)
    assert not torch.equal(model.model(tokens, **positions).last_hidden_state, before)


def test_a_model_without_experts_is_refused(policy_directory: Path, single_rank_mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        apply_expert_parallel(load_model(policy_directory), single_rank_mesh)


def test_ranks_must_divide_the_experts(mixture_directory: Path, single_rank_mesh: DeviceMesh) -> None:
    class MeshOfThree:
        get_local_rank, size, get_group = (lambda self: 0), (lambda self: 3), (lambda self: None)

    with pytest.raises(ConfigError, match="does not divide the 4 experts") as error:
        apply_expert_parallel(load_model(mixture_directory), MeshOfThree())  # type: ignore[arg-type]
    assert error.value.hint == "valid values: 1, 2, 4"
