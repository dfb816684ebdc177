"""If these fail, sharding a vision-language model over devices hangs or changes what it learns from images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import Case, actor
from rank_processes import run_ranks
from safetensors.torch import load_file
from vision_ranks import EVERYTHING, MODELS, SAVED, batch_with_images, measure, steps

from quintet.training.checkpoint.learner_state import restore_learner
from quintet.training.parallel.device_mesh import LearnerMesh

Results = dict[str, Any]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def single_process(directory: Path) -> dict[str, Results]:
    """Results of one process by model."""
    return {
        name: measure(save(directory / name), LearnerMesh(), Case(), directory / f"{name} alone.safetensors")
        for name, (save, _) in MODELS.items()
    }


@pytest.fixture(scope="module")
def two_ranks(single_process: dict[str, Results], directory: Path) -> list[dict[str, dict[str, Results]]]:
    return [json.loads(output) for output in run_ranks("vision_ranks.py", 2, directory, directory)]


@pytest.mark.parametrize(("model", "name"), [(model, name) for model, (_, names) in MODELS.items() for name in names])
def test_two_ranks_train_as_one(
    model: str,
    name: str,
    single_process: dict[str, Results],
    two_ranks: list[dict[str, dict[str, Results]]],
    directory: Path,
) -> None:
    """Also if the micro-batch of one rank, or its part of one, has images and that of the other has none."""
    for rank in two_ranks:
        for key, expected in single_process[model].items():
            assert rank[model][name][key] == pytest.approx(expected, rel=1e-5, abs=1e-5), key
    weights, expected_weights = (load_file(directory / f"{model} {each}.safetensors") for each in (name, "alone"))
    assert weights.keys() == expected_weights.keys()
    assert any("visual" in weight for weight in weights)
    for key, value in expected_weights.items():
        largest = float(value.abs().max())
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-4 * largest + 1e-6, msg=key)


@pytest.mark.parametrize("model", [model for model, (_, names) in MODELS.items() if SAVED in names])
def test_one_process_resumes_what_two_ranks_saved(
    model: str, two_ranks: list[dict[str, dict[str, Results]]], directory: Path
) -> None:
    """The second step depends on the restored moments of the optimizer."""
    learner = actor(directory / model, LearnerMesh(), Case())
    restore_learner(learner, directory / f"{model} saved", "actor", EVERYTHING)
    expected = two_ranks[0][model][SAVED]["resumed"]
    assert steps(learner, batch_with_images(), 2) == pytest.approx(expected, rel=1e-5)
