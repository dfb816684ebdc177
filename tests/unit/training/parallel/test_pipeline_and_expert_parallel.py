"""If these fail, a learner whose layers lie in stages, or whose experts lie apart, learns something else than on one
device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import EXPERTS, STAGES, Case, tell
from safetensors.torch import load_file
from test_fsdp import agrees, spread

from quintet.training.parallel.device_mesh import LearnerMesh

Told = dict[str, Any]
Alone = tuple[Told, dict[str, torch.Tensor]]
Heard = dict[str, tuple[list[Told], dict[str, torch.Tensor]]]


def of_one(directory: Path, place: Path) -> Alone:
    """What one process learns."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    told = tell(directory, LearnerMesh(), Case(), place / "alone.safetensors")
    torch.set_num_threads(before)
    return told, load_file(place / "alone.safetensors")


def of_several(directory: Path, cases: dict[str, Case], place: Path) -> Heard:
    """What two or four ranks learn, by case."""
    heard: Heard = {}
    for size in (2, 4):
        names = [name for name in cases if name.startswith("four") is (size == 4)]
        room = place / str(size)
        room.mkdir()
        told = spread(directory, names, size, room)
        heard |= {name: (told[name], load_file(room / f"{name}.safetensors")) for name in names}
    return heard


@pytest.fixture(scope="module")
def stages(deep_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Alone, Heard]:
    place = tmp_path_factory.mktemp("stages")
    return of_one(deep_directory, place), of_several(deep_directory, STAGES, place)


@pytest.fixture(scope="module")
def experts(mixture_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Alone, Heard]:
    place = tmp_path_factory.mktemp("experts")
    return of_one(mixture_directory, place), of_several(mixture_directory, EXPERTS, place)


@pytest.mark.parametrize("name", STAGES)
def test_pipeline_stages_train_as_one_process(name: str, stages: tuple[Alone, Heard]) -> None:
    alone, heard = stages
    agrees(*heard[name], alone)


@pytest.mark.parametrize("name", EXPERTS)
def test_expert_parallelism_trains_as_one_process(name: str, experts: tuple[Alone, Heard]) -> None:
    alone, heard = experts
    agrees(*heard[name], alone)
