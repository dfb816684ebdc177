"""If these fail, a checkpoint of a learner with pipeline stages or expert parallelism cannot be restored, or changes
when it is restored in another parallel layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_ranks import EVERYTHING, step
from parallel_cases import Case, actor
from rank_processes import run_ranks
from test_resharding import read

from quintet.training.checkpoint.learner_state import restore_learner, snapshot_learner
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.checkpoint.state_dict import model_state_dict, optimizer_state_dict
from quintet.training.parallel.device_mesh import LearnerMesh

CHAIN = (
    "four ranks, experts × data",
    "four ranks, pipeline × data",
    "four ranks, experts × pipeline",
    "four ranks",
    "four ranks, experts × hybrid",
)


@pytest.fixture(scope="module")
def saved(mixture_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with what one process saved after a step, and four ranks after one step in each parallel layout."""
    directory = tmp_path_factory.mktemp("checkpoints")
    learner = actor(mixture_directory, LearnerMesh(), Case())
    step(learner)
    snapshot_learner(learner, "actor", EVERYTHING, HostBuffers()).write(directory / "0")
    run_ranks("checkpoint_ranks.py", 4, directory, mixture_directory, directory, *CHAIN)
    return directory


@pytest.mark.parametrize("number", range(1, len(CHAIN) + 1))
def test_another_parallel_layout_restores_every_bit(saved: Path, number: int) -> None:
    before, after = read(saved / f"{number - 1}", "actor"), read(saved / f"{number}", "again")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), f"{name} in {CHAIN[number - 1]}"


def test_steps_between_restores_agree_with_one_process(saved: Path, mixture_directory: Path) -> None:
    learner = actor(mixture_directory, LearnerMesh(), Case())
    for number in range(len(CHAIN) + 1):
        step(learner)
        saved_tensors = read(saved / f"{number}", "actor")
        expected = {f"model:{name}": tensor for name, tensor in model_state_dict(learner.strategy.module).items()}
        expected |= {
            f"optim:{name}": tensor
            for name, tensor in optimizer_state_dict(learner.strategy.module, learner.optimizer).items()
        }
        assert saved_tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            tolerance = 1e-4 * float(tensor.detach().abs().max())
            torch.testing.assert_close(
                saved_tensors[name], tensor.detach(), rtol=0, atol=tolerance, msg=f"{name} after {number}"
            )


def test_one_process_restores_what_four_saved(saved: Path, mixture_directory: Path) -> None:
    learner = actor(mixture_directory, LearnerMesh(), Case())
    restore_learner(learner, saved / f"{len(CHAIN)}", "actor", EVERYTHING)
    saved_tensors = read(saved / f"{len(CHAIN)}", "actor")
    for name, tensor in model_state_dict(learner.strategy.module).items():
        assert torch.equal(tensor, saved_tensors[f"model:{name}"]), name
