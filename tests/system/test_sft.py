"""If these fail, fine-tuning by command loses work, or ends with other weights after a stop than without one."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quintet.tracking.metrics import reproducible

Command = Any

CONFIG = """\
name: tuned
policy: {preset: grid-1m}
data: {train_files: [train.jsonl], validation_files: [held.jsonl], messages_key: messages}
sft: {epochs: 3, batch: 10, validate_before: true, optimizer: {learning_rate: 0.003}}
training: {threads: 1}
checkpoint: {every_steps: 1}
tracking: {loggers: [jsonl]}
"""


@pytest.fixture
def tuning(tmp_path: Path) -> Path:
    """A configuration with 40 conversations of two replies each, and 8 held-out ones."""
    for name, numbers in {"train": range(40), "held": range(40, 48)}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(talk(number)) for number in numbers))
    path = tmp_path / "tuning.yaml"
    path.write_text(CONFIG)
    return path


def talk(number: int) -> dict[str, Any]:
    said = [f"{number} + 1 = ?", str(number + 1), "And one more?", str(number + 2)]
    roles = ["user", "assistant", "user", "assistant"]
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]}


def weights(directory: Path) -> dict[str, str]:
    files = sorted(directory.rglob("*.safetensors"))
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def metrics(run: Path) -> list[dict[str, Any]]:
    return [reproducible(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_stopped_twice_ends_as_one_that_never_stopped(quintet: Command, tuning: Path, tmp_path: Path) -> None:
    words = ["sft.lora={rank: 4, alpha: 8}", "sft.choose=best"]
    quintet("sft", str(tuning), *words, "name=whole")
    whole, stopped = tmp_path / "runs/whole", tmp_path / "runs/stopped"
    stop(tuning, tmp_path, [*words, "name=stopped"], 2, signal.SIGKILL)
    stop(tuning, tmp_path, [*words, "name=stopped"], 5, signal.SIGTERM)
    assert not (stopped / "model").exists()
    again = quintet("sft", str(tuning), *words, "name=stopped")
    assert "going on from" in again.stdout
    for place in ("model", "lora_adapter", "checkpoints/global_step_12"):
        assert weights(whole / place) == weights(stopped / place)
    assert weights(whole / "model")
    assert metrics(whole) == metrics(stopped)
    described = (stopped / "model/config.json").read_text()
    assert "quintet" not in described
    assert "peft" not in described


def stop(tuning: Path, directory: Path, words: list[str], step: int, how: signal.Signals) -> None:
    """Start or continue a run, and send it a signal once that step's checkpoint is there."""
    with (directory / "log").open("wb") as log:
        command = [sys.executable, "-m", "quintet", "sft", str(tuning), *words]
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
        try:
            wait_for(directory / f"runs/stopped/checkpoints/global_step_{step}", process)
            process.send_signal(how)
            status = process.wait(timeout=60)
        finally:
            process.kill()
    assert status == (-signal.SIGKILL if how is signal.SIGKILL else 130)
    assert b"Traceback" not in (directory / "log").read_bytes()


def wait_for(path: Path, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.01)
    assert path.exists(), f"{path} didn't come"


def test_games_are_solved_learnt_and_played(quintet: Command, tmp_path: Path) -> None:
    """RAGEN's stages: a small policy that saw 100 solved lakes answers in their form on others."""
    games = "sft.games={games: 100, validation_games: 10, processes: 2}"
    quick = [
        "sft.batch=32",
        "sft.optimizer.learning_rate=0.004",
        "training.threads=1",
        "rollout.max_turns=4",
        "checkpoint.every_steps=0",
    ]
    done = quintet("sft", games, *quick, "sft.epochs=5", "validation.games=32", "sft.output_dir=out", "world.size=3")
    assert "success_rate" in done.stdout
    assert (tmp_path / "out/merged_model/model.safetensors").exists()
    lines = metrics(tmp_path / "runs/frozenlake")
    assert lines[-1]["val/frozenlake/valid_format"] > 0.5
    assert lines[-1]["step"] == lines[-2]["step"] + 1
    assert (tmp_path / "sft/data/frozenlake/train.parquet").exists()
