"""If these fail, a hint about the files of a run leads nowhere."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from hint_cases import HintCase, case, name_of, sites_without_case

from quintet.cli.configuration import inspect_config
from quintet.config.compose import load_experiment
from quintet.contained_files import contained_path
from quintet.errors import MachineError
from quintet.tracking.atomic_files import translate_os_errors, write_atomic
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.trajectories import parse_trajectory


def created(overrides: list[str]) -> None:
    """The directory of a run."""
    RunDirectory.create_for(load_experiment(None, overrides))


def failing(number: int) -> None:
    """An error of the system, as a full disk has it; 0 is none."""
    with translate_os_errors("runs/a"):
        if number:
            raise OSError(number, os.strerror(number))


def state_of(text: str | None) -> None:
    """The state of a run from a file with this text, or without a file."""
    directory = RunDirectory(Path("runs/a"))
    directory.create()
    directory.state.unlink(missing_ok=True)
    if text is not None:
        directory.write_text(directory.state.name, text)
    directory.read_state()


def running(names: Sequence[str]) -> None:
    """Runs at the same time."""
    with ExitStack() as runs:
        for name in names:
            directory = RunDirectory(Path("runs", name))
            directory.create()
            runs.enter_context(directory.lock())


def trajectories(lines: Sequence[str | None]) -> None:
    """Read files of one line each; None is one that was removed."""
    for number, line in enumerate(lines):
        if line is not None:
            path = Path(f"{number}.jsonl")
            path.write_text(line)
            parse_trajectory(path, 1, path.read_text())


def linked(is_link: bool) -> None:
    """Read a file of a run that is a link out of its directory, or a copy of what the link names."""
    path = Path("there/config.yaml")
    path.unlink(missing_ok=True)
    if is_link:
        path.symlink_to(Path("file").resolve())
    else:
        shutil.copy("file", path)
    contained_path(Path("there"), path.name)


def written(directory: str) -> None:
    write_atomic(Path(directory, "metrics.jsonl"), b"")


WRITABLE = "set output_dir=DIRECTORY to a writable directory"
CASES = [
    case(created, ["output_dir=/proc/x"], WRITABLE, ["output_dir=elsewhere"]),
    case(created, ["output_dir=file"], WRITABLE, ["output_dir=elsewhere"]),
    case(created, ["output_dir=dangling"], "create that directory or remove the link, or ", ["output_dir=elsewhere"]),
    case(failing, errno.EACCES, WRITABLE, 0),
    case(failing, errno.ENOSPC, "free some space, and the same command resumes from the last checkpoint; ", 0),
    case(written, "gone", "restore it, or set output_dir=DIRECTORY to another directory", "there"),
    case(state_of, "[]", "remove the file, or choose another run `name`", None),
    case(running, ["a", "a"], "wait for that run, stop it, or choose another `name` for this one", ["a"], ["a", "b"]),
    case(trajectories, ["{"], "the file was changed or cut: remove it", [None]),
    case(trajectories, ['{"turns": []}'], "the file was changed or cut: remove it", [None]),
    case(linked, True, "replace the link by a copy of what it names", False),
    case(trajectories, ["{}"], "the file was changed or cut: remove it", [None]),
]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    (tmp_path / "dangling").symlink_to("nothing")


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_files_of_a_run_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_about_files_of_a_run_is_followed() -> None:
    assert not sites_without_case("tracking", CASES, ())


def test_an_output_directory_is_set_by_the_key_of_the_framework(tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text("{actor_rollout_ref: {}, trainer: {default_local_dir: /proc/x/run}}")
    with pytest.raises(MachineError) as refused:
        RunDirectory.create_for(inspect_config("verl.yaml", [], "verl", "refuse").composed)
    assert refused.value.hint == "set trainer.default_local_dir=DIRECTORY/run to a writable directory"
