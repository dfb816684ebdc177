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
from spread_cases import CASES, Case, tell

from quintet.training.mesh import Mesh

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
    return spread(policy_directory, TWO, 2, place), place


@pytest.fixture(scope="module")
def four(policy_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Told]], Path]:
    place = tmp_path_factory.mktemp("four")
    return spread(policy_directory, FOUR, 4, place), place


def agrees(told: list[Told], weights: dict[str, torch.Tensor], alone: tuple[Told, dict[str, torch.Tensor]]) -> None:
    expected, expected_weights = alone
    for rank in told:
        for name, values in expected.items():
            assert rank[name] == pytest.approx(values, rel=1e-5, abs=2e-6), name
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
