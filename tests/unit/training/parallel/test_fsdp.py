"""If these fail, sharding a learner's weights over devices changes what it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import CASES, OTHER_DTYPES, measure_in_one_process, run_cases
from safetensors.torch import load_file

from quintet.config.native.learners import ParallelConfig
from quintet.training.parallel.device_mesh import shard_group_size

FLOATS = ("logprobs", "divergence", "loss", "grad_norm", "values", "critic")
FOUR = [name for name in CASES if name.startswith(("hybrid", "four ranks"))]
TWO = [name for name in CASES if name not in FOUR]
Results = dict[str, Any]


@pytest.fixture(scope="module")
def single_process(
    policy_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Results, dict[str, torch.Tensor]]:
    """Results and weights of one process."""
    return measure_in_one_process(policy_directory, tmp_path_factory.mktemp("single") / "weights.safetensors")


@pytest.fixture(scope="module")
def two_ranks(
    policy_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, list[Results]], Path]:
    directory = tmp_path_factory.mktemp("two")
    return run_cases(policy_directory, [*TWO, *OTHER_DTYPES], 2, directory), directory


@pytest.fixture(scope="module")
def four_ranks(
    policy_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, list[Results]], Path]:
    directory = tmp_path_factory.mktemp("four")
    return run_cases(policy_directory, FOUR, 4, directory), directory


def assert_agrees(
    results: list[Results], weights: dict[str, torch.Tensor], single_process: tuple[Results, dict[str, torch.Tensor]]
) -> None:
    expected, expected_weights = single_process
    for rank in results:
        for name in FLOATS:
            assert rank[name] == pytest.approx(expected[name], rel=1e-5, abs=2e-6), name
    assert weights.keys() == expected_weights.keys()
    for name, value in expected_weights.items():
        # relative to the largest weight: AdamW amplifies the rounding of gradients near 0, which depends on the CPU
        largest = float(value.abs().max())
        torch.testing.assert_close(
            weights[name], value, rtol=0, atol=3e-5 * largest, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.proves("verl", "model.fsdp_config.cpu_offload", "model.fsdp_config.offload_params")
@pytest.mark.proves(
    "rlinf",
    "actor.fsdp_config.strategy",
    "actor.fsdp_config.cpu_offload",
    "actor.fsdp_config.enable_gradient_accumulation",
)
@pytest.mark.proves("roll", "actor_train.strategy_args.strategy_config.offload_policy")
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_as_one(
    name: str, two_ranks: tuple[dict[str, list[Results]], Path], single_process: tuple[Results, dict[str, torch.Tensor]]
) -> None:
    results, directory = two_ranks
    assert_agrees(results[name], load_file(directory / f"{name}.safetensors"), single_process)


@pytest.mark.proves("verl", "actor_rollout_ref.actor.fsdp_config.fsdp_size")
@pytest.mark.proves("rlinf", "actor.fsdp_config.fsdp_size")
@pytest.mark.proves("roll", "actor_train.strategy_args.strategy_config.fsdp_size")
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_one(
    name: str,
    four_ranks: tuple[dict[str, list[Results]], Path],
    single_process: tuple[Results, dict[str, torch.Tensor]],
) -> None:
    results, directory = four_ranks
    assert_agrees(results[name], load_file(directory / f"{name}.safetensors"), single_process)


@pytest.mark.proves("rlinf", "actor.fsdp_config.mixed_precision.param_dtype")
@pytest.mark.proves("roll", "actor_train.strategy_args.strategy_config.param_dtype")
@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_other_dtypes_give_nearly_equal_results(
    name: str, two_ranks: tuple[dict[str, list[Results]], Path], single_process: tuple[Results, dict[str, torch.Tensor]]
) -> None:
    expected = single_process[0]["logprobs"]
    for rank in two_ranks[0][name]:
        gaps = [abs(a - b) for a, b in zip(rank["logprobs"], expected, strict=True)]
        assert max(gaps) < (1e-4 if name.endswith("float64") else 0.1)
        assert name.endswith("float64") or max(gaps) > 1e-5  # else nothing was computed in that type
        assert rank["grad_norm"][0] == pytest.approx(single_process[0]["grad_norm"][0], rel=0.05)


@pytest.mark.proves(
    "rlinf",
    "actor.fsdp_config.sharding_strategy",
    "actor.fsdp_config.forward_prefetch",
    "actor.fsdp_config.limit_all_gathers",
    "actor.fsdp_config.backward_prefetch",
    "actor.fsdp_config.use_orig_params",
    "actor.fsdp_config.mixed_precision.reduce_dtype",
    "actor.fsdp_config.mixed_precision.buffer_dtype",
)
@pytest.mark.proves("roll", "actor_train.strategy_args.strategy_config.reduce_dtype")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fsdp2", {"units": 3, "forward_prefetch": 0, "backward_prefetch": 0, "offload": "OffloadPolicy"}),
        ("fsdp2", {"parameter_dtype": "torch.float32", "reduce_dtype": "torch.float32"}),
        ("fsdp2 prefetch", {"forward_prefetch": 1, "backward_prefetch": 1}),
        ("fsdp2 offload", {"offload": "CPUOffloadPolicy"}),
        ("fsdp2 bfloat16", {"parameter_dtype": "torch.bfloat16", "reduce_dtype": "torch.float64"}),
        ("fsdp2 bfloat16", {"buffer_dtype": "torch.float16"}),
        ("fsdp", {"units": 3, "strategy": "FULL_SHARD", "forward_prefetch": False, "backward_prefetch": None}),
        ("fsdp", {"limit_all_gathers": False, "original": False}),
        ("fsdp shard_grad_op", {"strategy": "SHARD_GRAD_OP", "limit_all_gathers": True}),
        ("fsdp original", {"original": True, "forward_prefetch": True}),
        ("fsdp offload", {"backward_prefetch": "BACKWARD_POST"}),
        ("fsdp units", {"backward_prefetch": "BACKWARD_PRE"}),
        ("fsdp bfloat16", {"parameter_dtype": "torch.bfloat16", "reduce_dtype": "torch.float64"}),
        ("fsdp bfloat16", {"buffer_dtype": "torch.float16"}),
        ("no_shard float64", {"parameter_dtype": "torch.float64"}),
    ],
)
def test_fsdp_options_reach_torch(
    name: str, expected: Results, two_ranks: tuple[dict[str, list[Results]], Path]
) -> None:
    options = two_ranks[0][name][0]["fsdp_options"]
    assert {key: options[key] for key in expected} == expected


@pytest.mark.proves("rlinf", "actor.fsdp_config.reshard_after_forward")
@pytest.mark.proves("roll", "actor_train.strategy_args.strategy_config.reshard_after_forward")
def test_reshard_after_forward_reaches_torch(two_ranks: tuple[dict[str, list[Results]], Path]) -> None:
    # by default the root module keeps its weights, because the backward pass begins with them
    expected = {"fsdp2": 2, "fsdp2 gathered": 0, "fsdp2 prefetch": 3, "fsdp2 shard_grad_op": 0}
    assert {name: sum(two_ranks[0][name][0]["fsdp_options"]["reshard"]) for name in expected} == expected


@pytest.mark.proves(
    "verl",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params",
    "actor_rollout_ref.ref.fsdp_config.wrap_policy.min_num_params",
    "model.fsdp_config.wrap_policy.min_num_params",
)
def test_a_smaller_min_parameters_gives_more_fsdp_units(two_ranks: tuple[dict[str, list[Results]], Path]) -> None:
    assert two_ranks[0]["fsdp2 units"][0]["fsdp_options"]["units"] > 3
    assert two_ranks[0]["fsdp units"][0]["fsdp_options"]["units"] > 3


def test_a_group_size_of_two_makes_two_groups_of_four_ranks(four_ranks: tuple[dict[str, list[Results]], Path]) -> None:
    assert four_ranks[0]["hybrid fsdp"][0]["fsdp_options"]["strategy"] == "HYBRID_SHARD"
    assert four_ranks[0]["hybrid fsdp shard_grad_op"][0]["fsdp_options"]["strategy"] == "_HYBRID_SHARD_ZERO2"


def test_a_group_size_that_does_not_divide_the_ranks_is_an_error() -> None:
    """At the start of a run the error names the key, see `tests/unit/config/plan/test_plan_placement.py`."""
    with pytest.raises(ValueError, match="4 ranks cannot be divided into groups of 3"):
        shard_group_size(4, 3, ParallelConfig())
