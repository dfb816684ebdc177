"""Whole commands on a run small enough for a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SMALL = """\
name: small
training: {steps: 4, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}
warm_start: {episodes: 60, updates: 30, turns_per_update: 32, until_success: null}
rollout: {max_turns: 4}
validation: {episodes: 16, every_steps: 2}
checkpoint: {every_steps: 1}
tracking: {trajectories_every_steps: 2}
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def quintet(tmp_path: Path) -> Command:
    """Run `quintet …` in an empty directory; its output as text."""

    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "quintet", *arguments],
            cwd=tmp_path,
            check=check,
            text=True,
            capture_output=True,
            timeout=240,
        )

    return run
