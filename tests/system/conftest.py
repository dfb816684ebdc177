"""Whole commands on a run small enough for a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import warm_processes

SMALL = """\
name: small
training: {steps: 4, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}
warm_start: {episodes: 20, updates: 8, turns_per_update: 16, until_success: null}
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


def run_quintet(directory: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `quintet …` in a directory and capture its output as text."""
    command = [sys.executable, "-m", "quintet", *arguments]
    return warm_processes.run(command, cwd=directory, check=check, text=True, capture_output=True, timeout=240)


@pytest.fixture
def quintet(tmp_path: Path) -> Command:
    """Run `quintet …` in an empty directory."""
    return partial(run_quintet, tmp_path)


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face directory of a small model with random weights."""
    directory = tmp_path_factory.mktemp("untrained")
    overrides = ("training.steps=0", "warm_start=null", "validation.before_training=false", "name=run")
    run_quintet(directory, "train", *overrides)
    return directory / "runs/run/checkpoints/global_step_0/hf"


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start `quintet serve-envs …` and return its process and URL; the process is killed at the end of the test."""
    monkeypatch.delenv("QUINTET_TOKEN", raising=False)
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
        process = warm_processes.Popen(
            [sys.executable, "-m", "quintet", "serve-envs", "--port", "0", *arguments],
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
