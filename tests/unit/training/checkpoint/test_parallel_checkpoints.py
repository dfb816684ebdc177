"""If these fail, a run whose layers lie in stages or whose experts lie apart can't be taken up again, or goes on as
another one on other devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import EVERYTHING, step
from parallel_cases import Case, actor
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
    """What one process saved after a step, and what four saved after one step each in each arrangement."""
    place = tmp_path_factory.mktemp("apart")
    one = actor(mixture_directory, LearnerMesh(), Case())
    step(one)
    snapshot_learner(one, "actor", EVERYTHING, HostBuffers()).write(place / "0")
    script = [
        sys.executable,
        str(Path(__file__).parents[3] / "support" / "checkpoint_ranks.py"),
        str(mixture_directory),
    ]
    started = [
        subprocess.Popen(
            [*script, str(rank), "4", str(place / "meeting"), str(place), *CHAIN], stderr=subprocess.PIPE, text=True
        )
        for rank in range(4)
    ]
    try:
        told = [process.communicate(timeout=280)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * 4, "\n".join(told)[-4000:]
    return place


@pytest.mark.parametrize("number", range(1, len(CHAIN) + 1))
def test_another_parallel_layout_restores_every_bit(saved: Path, number: int) -> None:
    before, after = read(saved / f"{number - 1}", "actor"), read(saved / f"{number}", "again")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), f"{name} in {CHAIN[number - 1]}"


def test_steps_between_restores_agree_with_one_process(saved: Path, mixture_directory: Path) -> None:
    one = actor(mixture_directory, LearnerMesh(), Case())
    for number in range(len(CHAIN) + 1):
        step(one)
        found = read(saved / f"{number}", "actor")
        own = {f"model:{name}": tensor for name, tensor in model_state_dict(one.strategy.module).items()}
        own |= {
            f"optim:{name}": tensor for name, tensor in optimizer_state_dict(one.strategy.module, one.optimizer).items()
        }
        assert found.keys() == own.keys()
        for name, tensor in own.items():
            near = 1e-4 * float(tensor.detach().abs().max())
            torch.testing.assert_close(found[name], tensor.detach(), rtol=0, atol=near, msg=f"{name} after {number}")


def test_one_process_restores_what_four_saved(saved: Path, mixture_directory: Path) -> None:
    one = actor(mixture_directory, LearnerMesh(), Case())
    restore_learner(one, saved / f"{len(CHAIN)}", "actor", EVERYTHING)
    found = read(saved / f"{len(CHAIN)}", "actor")
    for name, tensor in model_state_dict(one.strategy.module).items():
        assert torch.equal(tensor, found[f"model:{name}"]), name
