"""If these fail, spreading a vision-language model over devices hangs or changes what it learns from images."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import Case
from safetensors.torch import load_file
from vision_models import save_qwen2_5_vl
from vision_ranks import NAMES, tell

from quintet.training.parallel.device_mesh import LearnerMesh

SCRIPT = Path(__file__).parents[3] / "support" / "vision_ranks.py"
Told = dict[str, Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def model(place: Path) -> Path:
    return save_qwen2_5_vl(place / "model")


@pytest.fixture(scope="module")
def alone(model: Path, place: Path) -> Told:
    return tell(model, LearnerMesh(), Case(), place / "alone.safetensors")


@pytest.fixture(scope="module")
def two(model: Path, place: Path) -> list[Told]:
    command = [sys.executable, str(SCRIPT), str(model)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), str(place)], **pipes) for rank in range(2)]
    try:
        heard = [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, complaint) in zip(ranks, heard, strict=True):
        assert rank.returncode == 0, complaint[-3000:]
    return [json.loads(said) for said, _ in heard]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_as_one(name: str, alone: Told, two: list[Told], place: Path) -> None:
    """Also where one rank's micro-batch has images and the other's has none."""
    for rank in two:
        for what, expected in alone.items():
            assert rank[name][what] == pytest.approx(expected, rel=1e-5, abs=2e-6), what
    weights, expected_weights = (load_file(place / f"{each}.safetensors") for each in (name, "alone"))
    assert weights.keys() == expected_weights.keys()
    assert any("visual" in weight for weight in weights)
    for key, value in expected_weights.items():
        largest = float(value.abs().max())
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-4 * largest + 1e-6, msg=key)
