"""If these fail, spreading a learner's weights over devices changes what it learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from spread_cases import CASES, LOOSE, Case, tell

from quintet.config.native.learners import ParallelConfig
from quintet.training.mesh import Mesh, sharded_ranks

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
    told = tell(policy_directory, Mesh(), Case(), out)
    torch.set_num_threads(before)
    return told, load_file(out)


def spread(directory: Path, names: list[str], size: int, place: Path) -> dict[str, list[Told]]:
    """What each rank tells of each case."""
    script = str(Path(__file__).with_name("spread_cases.py"))
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
        # relative to the largest: AdamW makes whole steps of gradients near 0, whose rounding nobody can promise
        largest = float(value.abs().max())
        torch.testing.assert_close(
            weights[name], value, rtol=0, atol=1e-5 * largest, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_learn_what_one_does(
    name: str, two: tuple[dict[str, list[Told]], Path], alone: tuple[Told, dict[str, torch.Tensor]]
) -> None:
    told, place = two
    agrees(told[name], load_file(place / f"{name}.safetensors"), alone)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_learn_what_one_does(
    name: str, four: tuple[dict[str, list[Told]], Path], alone: tuple[Told, dict[str, torch.Tensor]]
) -> None:
    told, place = four
    agrees(told[name], load_file(place / f"{name}.safetensors"), alone)


@pytest.mark.parametrize("name", LOOSE)
def test_another_type_gives_near_numbers(
    name: str, two: tuple[dict[str, list[Told]], Path], alone: tuple[Told, dict[str, torch.Tensor]]
) -> None:
    expected = alone[0]["logprobs"]
    for rank in two[0][name]:
        gaps = [abs(ours - theirs) for ours, theirs in zip(rank["logprobs"], expected, strict=True)]
        assert max(gaps) < (1e-4 if name.endswith("float64") else 0.1)
        assert name.endswith("float64") or max(gaps) > 1e-5  # else nothing was computed in that type
        assert rank["grad_norm"][0] == pytest.approx(alone[0]["grad_norm"][0], rel=0.05)


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
def test_torch_is_given_the_options(name: str, held: Told, two: tuple[dict[str, list[Told]], Path]) -> None:
    found = two[0][name][0]["held"]
    assert {key: found[key] for key in held} == held


def test_reshard_after_forward_is_what_is_asked_for(two: tuple[dict[str, list[Told]], Path]) -> None:
    # the root keeps its weights where nobody says otherwise: the backward pass begins with them
    wanted = {"fsdp2": 2, "fsdp2 gathered": 0, "fsdp2 prefetch": 3, "fsdp2 shard_grad_op": 0}
    assert {name: sum(two[0][name][0]["held"]["reshard"]) for name in wanted} == wanted


def test_small_units_are_more_units(two: tuple[dict[str, list[Told]], Path]) -> None:
    assert two[0]["fsdp2 units"][0]["held"]["units"] > 3
    assert two[0]["fsdp units"][0]["held"]["units"] > 3


def test_four_ranks_are_two_groups(four: tuple[dict[str, list[Told]], Path]) -> None:
    assert four[0]["hybrid fsdp"][0]["held"]["strategy"] == "HYBRID_SHARD"
    assert four[0]["hybrid fsdp shard_grad_op"][0]["held"]["strategy"] == "_HYBRID_SHARD_ZERO2"


def test_a_group_that_divides_no_ranks_is_no_mesh() -> None:
    """A start says so by its key; `tests/unit/config/plan/test_plan_placement.py`."""
    with pytest.raises(ValueError, match="4 ranks in groups of 3"):
        sharded_ranks(4, 3, ParallelConfig())
