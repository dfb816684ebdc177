"""If these fail, spreading a learner's weights over devices changes what it learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import CASES, LOOSE, Case, tell
from safetensors.torch import load_file

from quintet.config.native.learners import ParallelConfig
from quintet.training.parallel.device_mesh import LearnerMesh, shard_group_size

FLOATS = ("logprobs", "divergence", "loss", "grad_norm", "values", "critic")
FOUR = [name for name in CASES if name.startswith(("hybrid", "four ranks"))]
TWO = [name for name in CASES if name not in FOUR]
Told = dict[str, Any]


@pytest.fixture(scope="module")
def alone(policy_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Told, dict[str, torch.Tensor]]:
    """Loss, norm and weights of one process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("alone") / "alone.safetensors"
    told = tell(policy_directory, LearnerMesh(), Case(), out)
    torch.set_num_threads(before)
    return told, load_file(out)


def spread(directory: Path, names: list[str], size: int, place: Path) -> dict[str, list[Told]]:
    """What each rank tells of each case."""
    script = str(Path(__file__).parents[3] / "support" / "parallel_cases.py")
    command = [sys.executable, script, str(directory)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(place / "meeting"), str(place), *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        heard = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, complaint) in zip(ranks, heard, strict=True):
        assert rank.returncode == 0, complaint[-3000:]
    answers = [json.loads(said) for said, _ in heard]
    return {name: [answer[name] for answer in answers] for name in names}


@pytest.fixture(scope="module")
def two(policy_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Told]], Path]:
    place = tmp_path_factory.mktemp("two")
    return spread(policy_directory, [*TWO, *LOOSE], 2, place), place


@pytest.fixture(scope="module")
def four(policy_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Told]], Path]:
    place = tmp_path_factory.mktemp("four")
    return spread(policy_directory, FOUR, 4, place), place


def agrees(told: list[Told], weights: dict[str, torch.Tensor], alone: tuple[Told, dict[str, torch.Tensor]]) -> None:
    expected, expected_weights = alone
    for rank in told:
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
    name: str, two: tuple[dict[str, list[Told]], Path], alone: tuple[Told, dict[str, torch.Tensor]]
) -> None:
    told, place = two
    agrees(told[name], load_file(place / f"{name}.safetensors"), alone)


@pytest.mark.proves("verl", "actor_rollout_ref.actor.fsdp_config.fsdp_size")
@pytest.mark.proves("rlinf", "actor.fsdp_config.fsdp_size")
@pytest.mark.proves("roll", "actor_train.strategy_args.strategy_config.fsdp_size")
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_one(
    name: str, four: tuple[dict[str, list[Told]], Path], alone: tuple[Told, dict[str, torch.Tensor]]
) -> None:
    told, place = four
    agrees(told[name], load_file(place / f"{name}.safetensors"), alone)


@pytest.mark.proves("rlinf", "actor.fsdp_config.mixed_precision.param_dtype")
@pytest.mark.proves("roll", "actor_train.strategy_args.strategy_config.param_dtype")
@pytest.mark.parametrize("name", LOOSE)
def test_other_dtypes_give_nearly_equal_results(
    name: str, two: tuple[dict[str, list[Told]], Path], alone: tuple[Told, dict[str, torch.Tensor]]
) -> None:
    expected = alone[0]["logprobs"]
    for rank in two[0][name]:
        gaps = [abs(ours - theirs) for ours, theirs in zip(rank["logprobs"], expected, strict=True)]
        assert max(gaps) < (1e-4 if name.endswith("float64") else 0.1)
        assert name.endswith("float64") or max(gaps) > 1e-5  # else nothing was computed in that type
        assert rank["grad_norm"][0] == pytest.approx(alone[0]["grad_norm"][0], rel=0.05)


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
    ("name", "held"),
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
def test_fsdp_options_reach_torch(name: str, held: Told, two: tuple[dict[str, list[Told]], Path]) -> None:
    found = two[0][name][0]["held"]
    assert {key: found[key] for key in held} == held


@pytest.mark.proves("rlinf", "actor.fsdp_config.reshard_after_forward")
@pytest.mark.proves("roll", "actor_train.strategy_args.strategy_config.reshard_after_forward")
def test_reshard_after_forward_reaches_torch(two: tuple[dict[str, list[Told]], Path]) -> None:
    # the root keeps its weights where nobody says otherwise: the backward pass begins with them
    wanted = {"fsdp2": 2, "fsdp2 gathered": 0, "fsdp2 prefetch": 3, "fsdp2 shard_grad_op": 0}
    assert {name: sum(two[0][name][0]["held"]["reshard"]) for name in wanted} == wanted


@pytest.mark.proves(
    "verl",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params",
    "actor_rollout_ref.ref.fsdp_config.wrap_policy.min_num_params",
    "model.fsdp_config.wrap_policy.min_num_params",
)
def test_a_smaller_min_parameters_gives_more_fsdp_units(two: tuple[dict[str, list[Told]], Path]) -> None:
    assert two[0]["fsdp2 units"][0]["held"]["units"] > 3
    assert two[0]["fsdp units"][0]["held"]["units"] > 3


def test_a_group_size_of_two_makes_two_groups_of_four_ranks(four: tuple[dict[str, list[Told]], Path]) -> None:
    assert four[0]["hybrid fsdp"][0]["held"]["strategy"] == "HYBRID_SHARD"
    assert four[0]["hybrid fsdp shard_grad_op"][0]["held"]["strategy"] == "_HYBRID_SHARD_ZERO2"


def test_a_group_size_that_does_not_divide_the_ranks_is_an_error() -> None:
    """A start says so by its key; `tests/unit/config/plan/test_plan_placement.py`."""
    with pytest.raises(ValueError, match="4 ranks cannot be divided into groups of 3"):
        shard_group_size(4, 3, ParallelConfig())
