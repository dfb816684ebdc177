"""If these fail, a learner with pipeline stages or expert parallelism learns something else than one on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import EXPERTS, STAGES, Case, measure_in_one_process, run_cases
from safetensors.torch import load_file
from test_fsdp import assert_agrees

Results = dict[str, Any]
SingleProcess = tuple[Results, dict[str, torch.Tensor]]
ByCase = dict[str, tuple[list[Results], dict[str, torch.Tensor]]]


def train_on_ranks(directory: Path, cases: dict[str, Case], out_directory: Path) -> ByCase:
    """Return the results of all ranks and the weights of each case, on two or four ranks."""
    by_case: ByCase = {}
    for num_ranks in (2, 4):
        names = [name for name in cases if name.startswith("four") is (num_ranks == 4)]
        out = out_directory / str(num_ranks)
        out.mkdir()
        results = run_cases(directory, names, num_ranks, out)
        by_case |= {name: (results[name], load_file(out / f"{name}.safetensors")) for name in names}
    return by_case


@pytest.fixture(scope="module")
def stages(deep_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[SingleProcess, ByCase]:
    out_directory = tmp_path_factory.mktemp("stages")
    return measure_in_one_process(deep_directory, out_directory / "single_process.safetensors"), train_on_ranks(
        deep_directory, STAGES, out_directory
    )


@pytest.fixture(scope="module")
def experts(mixture_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[SingleProcess, ByCase]:
    out_directory = tmp_path_factory.mktemp("experts")
    return measure_in_one_process(mixture_directory, out_directory / "single_process.safetensors"), train_on_ranks(
        mixture_directory, EXPERTS, out_directory
    )


@pytest.mark.parametrize("name", STAGES)
def test_pipeline_stages_train_as_one_process(name: str, stages: tuple[SingleProcess, ByCase]) -> None:
    single_process, by_case = stages
    assert_agrees(*by_case[name], single_process)


@pytest.mark.parametrize("name", EXPERTS)
def test_expert_parallelism_trains_as_one_process(name: str, experts: tuple[SingleProcess, ByCase]) -> None:
    single_process, by_case = experts
    assert_agrees(*by_case[name], single_process)
