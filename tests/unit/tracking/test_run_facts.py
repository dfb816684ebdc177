"""If these fail, a logger's page cannot tell runs apart by their settings, kind or code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from quintet import __version__
from quintet.config.compose import load_experiment
from quintet.tracking.run_facts import run_facts, working_commit


def test_loggers_get_the_whole_configuration_the_kind_and_the_versions() -> None:
    facts = run_facts(load_experiment(None, ["seed=7"]).experiment)
    assert (facts["seed"], facts["policy"]["preset"]) == (7, "grid-1m")
    assert facts["run"].items() >= {"kind": "reinforcement learning", "quintet": __version__}.items()
    assert facts["run"]["torch"]


def test_the_commit_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert working_commit() is None
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "b"]):
        subprocess.run(["git", *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert working_commit() == head
