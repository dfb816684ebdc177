"""If these fail, stored episodes are not read where a user or a notebook names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.tracking.trajectories import read_trajectories


def test_episodes_are_read_by_a_path_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/step_000000.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    file = Path("runs/step_000000.jsonl")
    for stored in (read_trajectories(file), read_trajectories(file, directory=file.parent)):
        assert len(stored.damage) == 1  # the line is read, and is no episode
