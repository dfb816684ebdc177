"""If these fail, a run has its checkpoints and profiles elsewhere, or keeps, resumes or deletes others than
configured."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from quintet.config.compose import load_experiment
from quintet.pipelines.run import Run, open_run
from quintet.pipelines.training_steps import run_steps
from quintet.runtime.controller import Controller
from quintet.runtime.run_checkpoint import load_learners
from quintet.training.checkpoint.async_save import WriteFiles


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of `output_dir` is relative: without the configured one, a run would write into the repository."""
    monkeypatch.chdir(tmp_path)


@contextmanager
def opened(directory: Path, *overrides: str) -> Iterator[Run]:
    composed = load_experiment(None, (f"output_dir={directory}", "name=mine", *overrides))
    with open_run(composed, Console(file=io.StringIO())) as run:
        yield run
        run.wait()


def copy_nothing(_: Path) -> WriteFiles:
    return lambda directory: (directory / "weights").touch()


def save(run: Run, *steps: int) -> None:
    for step in steps:
        run.save(step, copy_nothing)


def saved_steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in root.glob("global_step_*"))


def test_only_the_newest_checkpoints_are_kept_in_the_directory_of_the_run(tmp_path: Path) -> None:
    with opened(tmp_path, "checkpoint.keep=1") as run:
        save(run, 1, 2, 3)
    assert saved_steps(tmp_path / "mine/checkpoints") == [3]


def test_a_checkpoint_names_its_contents_and_is_copied_to_the_store(tmp_path: Path) -> None:
    with opened(tmp_path, "checkpoint.contents=[model]", f"checkpoint.remote_dir={tmp_path}/store") as run:
        save(run, 1)
    assert json.loads((tmp_path / "store/global_step_1/state.json").read_text())["contents"] == ["model"]
    assert (tmp_path / "store/global_step_1/weights").is_file()


@pytest.mark.parametrize(("resume", "step"), [("auto", 2), ("never", 0), ("{run}/checkpoints/global_step_1", 1)])
def test_a_run_resumes_from_the_named_checkpoint(tmp_path: Path, resume: str, step: int) -> None:
    with opened(tmp_path) as run:
        save(run, 1, 2)
    with opened(tmp_path, f"resume={resume.format(run=tmp_path / 'mine')}") as run:
        assert run.steps_done == step


@pytest.mark.parametrize(("delete", "left"), [("true", [2, 3]), ("false", [1, 2, 3])])
def test_the_checkpoint_that_a_run_resumed_from_is_deleted_if_configured(
    tmp_path: Path, delete: str, left: list[int]
) -> None:
    options = ("checkpoint.keep=9", f"checkpoint.delete_after_load={delete}")
    with opened(tmp_path, *options) as run:
        save(run, 1)
    with opened(tmp_path, *options) as run:
        save(run, 2, 3)
    assert saved_steps(tmp_path / "mine/checkpoints") == left


def test_only_the_named_contents_are_loaded(tmp_path: Path) -> None:
    loaded: list[tuple[str, ...]] = []
    learners: Any = SimpleNamespace(load=lambda _directory, contents, _scales: loaded.append(contents))
    with opened(tmp_path) as run:
        save(run, 1)
    with opened(tmp_path, "checkpoint.load_contents=[model, extra]") as run:
        assert run.checkpoint is not None
        load_learners(learners, run.checkpoint, run.config)
    assert loaded == [("model", "extra")]


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4, 5]), (0, [5])])
def test_every_nth_step_and_the_last_one_are_saved(tmp_path: Path, every: int, steps: list[int]) -> None:
    saved: list[int] = []
    stop: Any = False
    with opened(tmp_path, f"checkpoint.every_steps={every}", "tracking.loggers=[jsonl]") as run:
        run_steps(run, stop, lambda step: {}, lambda number, timings: saved.append(number), steps=5)
    assert saved == steps


def test_profiles_are_written_to_the_configured_directory(tmp_path: Path) -> None:
    composed = load_experiment(None, (f"output_dir={tmp_path}", f"tracking.profile.directory={tmp_path}/profiles"))
    with open_run(composed, Console(file=io.StringIO()), Controller.in_process()) as run, run.profiled(1):
        pass
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["step_000001_rank_0.json"]
