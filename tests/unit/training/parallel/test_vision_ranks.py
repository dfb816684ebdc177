"""If these fail, spreading a vision-language model over devices hangs or changes what it learns from images."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import Case, actor
from safetensors.torch import load_file
from vision_ranks import EVERYTHING, MODELS, SAVED, batch_with_images, steps, tell

from quintet.training.checkpoint.learner_state import restore_learner
from quintet.training.parallel.device_mesh import LearnerMesh

SCRIPT = Path(__file__).parents[3] / "support" / "vision_ranks.py"
Told = dict[str, Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Told]:
    """What one process says of each model."""
    return {
        name: tell(save(place / name), LearnerMesh(), Case(), place / f"{name} alone.safetensors")
        for name, (save, _) in MODELS.items()
    }


@pytest.fixture(scope="module")
def two(alone: dict[str, Told], place: Path) -> list[dict[str, dict[str, Told]]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(place)], **pipes) for rank in range(2)]
    try:
        heard = [rank.communicate(timeout=400) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, complaint) in zip(ranks, heard, strict=True):
        assert rank.returncode == 0, complaint[-3000:]
    return [json.loads(said) for said, _ in heard]


@pytest.mark.parametrize(("model", "name"), [(model, name) for model, (_, names) in MODELS.items() for name in names])
def test_two_ranks_train_as_one(
    model: str, name: str, alone: dict[str, Told], two: list[dict[str, dict[str, Told]]], place: Path
) -> None:
    """Also where one rank's micro-batch, or its part of one, has images and the other's has none."""
    for rank in two:
        for what, expected in alone[model].items():
            assert rank[model][name][what] == pytest.approx(expected, rel=1e-5, abs=1e-5), what
    weights, expected_weights = (load_file(place / f"{model} {each}.safetensors") for each in (name, "alone"))
    assert weights.keys() == expected_weights.keys()
    assert any("visual" in weight for weight in weights)
    for key, value in expected_weights.items():
        largest = float(value.abs().max())
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-4 * largest + 1e-6, msg=key)


@pytest.mark.parametrize("model", [model for model, (_, names) in MODELS.items() if SAVED in names])
def test_one_process_resumes_what_two_ranks_saved(
    model: str, two: list[dict[str, dict[str, Told]]], place: Path
) -> None:
    """The second step afterwards depends on the moments of the optimizer."""
    learner = actor(place / model, LearnerMesh(), Case())
    restore_learner(learner, place / f"{model} saved", "actor", EVERYTHING)
    expected = two[0][model][SAVED]["resumed"]
    assert steps(learner, batch_with_images(), 2) == pytest.approx(expected, rel=1e-5)
