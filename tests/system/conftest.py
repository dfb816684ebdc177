"""Whole commands on a run small enough for a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
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
Serve = Callable[..., "tuple[subprocess.Popen[str], str]"]


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


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start `quintet serve-envs …` and return its process and URL; ended with the test, however that ends."""
    monkeypatch.delenv("QUINTET_TOKEN", raising=False)
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "quintet", "serve-envs", "--port", "0", *words],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.fullmatch(r".* on (http://127\.0\.0\.1:\d+)\n", line)
        assert address, (line, process.communicate()[1])
        return process, address[1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
