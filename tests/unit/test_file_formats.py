"""If these fail, an upgrade of Quintet loses the runs of before, or an older version misreads those of a newer one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quintet import __version__
from quintet.errors import MachineError
from quintet.file_formats import FORMAT
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint.checkpoint import create_staging_directory, find_checkpoint, finish_checkpoint

SAMPLE = Path(__file__).parents[1] / "samples/run_without_format"
"""A run of version 0.1.0 before files had a format."""


def test_run_directories_and_checkpoints_name_their_format(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_state("running")
    state = json.loads(directory.state.read_text())
    assert (state["format"], state["quintet"]) == (FORMAT, __version__)
    create_staging_directory(tmp_path, 3)
    state = json.loads((finish_checkpoint(tmp_path, 3, {}, keep=1) / "state.json").read_text())
    assert (state["format"], state["quintet"]) == (FORMAT, __version__)


def test_a_newer_format_is_refused_by_the_version_that_wrote_it(tmp_path: Path) -> None:
    newer = {"format": FORMAT + 1, "quintet": "9.1.0"}
    directory = RunDirectory(tmp_path)
    directory.state.write_text(json.dumps({"status": "running", **newer}))
    with pytest.raises(MachineError, match=r"run\.json was written by Quintet 9\.1\.0 in format 2"):
        directory.read_state()
    create_staging_directory(tmp_path, 3)
    finish_checkpoint(tmp_path, 3, newer, keep=1)
    with pytest.raises(MachineError, match=r"global_step_3 was written by Quintet 9\.1\.0"):
        find_checkpoint(tmp_path, lambda path, reason: pytest.fail("a newer checkpoint counts as damaged"))


def test_a_run_of_before_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quintet.cli.train import run

    for name in ("model", "run_without_format"):
        shutil.copytree(SAMPLE / name, tmp_path / name, symlinks=True)
    monkeypatch.chdir(tmp_path)
    before = (tmp_path / "run_without_format/metrics.jsonl").read_text().splitlines()
    assert run("run_without_format/config.yaml", ["training.steps=2"], None, "refuse") == 0
    after = (tmp_path / "run_without_format/metrics.jsonl").read_text().splitlines()
    assert after[: len(before)] == before
    assert {json.loads(line)["step"] for line in after} == {0, 1, 2}
    assert json.loads((tmp_path / "run_without_format/run.json").read_text())["format"] == FORMAT
