"""If these fail, a benchmark that attacks Quintet finds a fault, or would find none."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from saved_checkpoints import save_checkpoint
from warm_processes import run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = 300


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in ("attack_configurations", "attack_runs", "checkpoint_kills", "damaged_runs", "hostile_text"):
        if name not in before:
            sys.modules.pop(name, None)


def results(script: str, count: int, place: Path) -> Any:
    """Run a benchmark; return its results, or fail with what it has printed."""
    command = [sys.executable, str(BENCHMARKS / script), "--count", str(count), "--out", str(place / "results.json")]
    completed = run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (place / "results.json").exists(), completed.stderr[-4000:]
    found = json.loads((place / "results.json").read_text())
    assert completed.returncode == 0, json.dumps(found, indent=1)[:4000]
    return found


@pytest.mark.attack
def test_a_sample_of_mutated_configurations_has_no_effect(tmp_path: Path) -> None:
    found = results("attack_configurations.py", 12, tmp_path)
    assert found["planned"] + found["refused"] == 12
    assert found["effects"] == 0


@pytest.mark.attack
def test_a_sample_of_damaged_runs_has_no_effect(tmp_path: Path) -> None:
    found = results("attack_runs.py", 2, tmp_path)
    assert (found["opened"], found["ended"], found["effects"], found["hidden"]) == (12, 12, 0, 0)


def test_a_sample_of_kills_loses_no_step(tmp_path: Path) -> None:
    found = results("checkpoint_kills.py", 4, tmp_path)
    for part in ("one_process", "two_ranks"):
        assert found[part]["kills"] > 0
        assert found[part]["runs"] == found[part]["runs_equal_to_the_undisturbed_one_bit_for_bit"] > 0


@pytest.mark.parametrize(
    ("event", "arguments", "effect"),
    [
        ("open", ("/case/run.sh", "r", os.O_RDONLY), ""),
        ("open", ("/elsewhere/secret", "r", os.O_RDONLY), "open /elsewhere/secret"),
        ("open", ("/case/run.sh", "w", os.O_WRONLY), "open for writing /case/run.sh"),
        ("open", ("/case/../elsewhere/secret", "r", 0), "open /elsewhere/secret"),
        ("import", ("evil_module", None, None, None, None), "import evil_module"),
        ("import", ("json", None, None, None, None), ""),
        ("compile", (b"x", "/case/evil_module.py"), "compile /case/evil_module.py"),
        ("os.system", (b"touch x",), "os.system (b'touch x',)"),
        ("socket.connect", (None, ("127.0.0.1", 9)), "socket.connect (None, ('127.0.0.1', 9))"),
    ],
)
def test_effects_of_a_configuration_are_noticed(event: str, arguments: tuple[Any, ...], effect: str) -> None:
    recorder = importlib.import_module("attack_configurations").Recorder(("/case",), "/case")
    recorder(event, arguments)
    assert recorder.effects == ([effect] if effect else [])


@pytest.mark.parametrize(
    ("status", "output", "kind"),
    [
        (0, "", "planned"),
        (2 << 8, "quintet: x", "refused"),
        (1 << 8, "Traceback (most recent call last)", "traceback"),
        (1 << 8, "MemoryError", "memory"),
        (9, "", "timed_out"),
        (11, "", "traceback"),
    ],
)
def test_endings_of_a_command_are_told_apart(status: int, output: str, kind: str) -> None:
    assert importlib.import_module("attack_configurations")._kind(status, output) == kind


def test_a_rank_that_fails_because_another_was_killed_is_no_failure_of_the_run() -> None:
    kills = importlib.import_module("checkpoint_kills")
    processes = [subprocess.Popen(["sh", "-c", command]) for command in ("exit 1", "kill -9 $$")]
    for process in processes:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert kills.wait_until(lambda: False, [process.pid for process in processes]) is True
    assert kills.wait_until(lambda: False, [processes[0].pid]) is False
    assert [process.wait() for process in processes] == [1, -9]


def test_a_lost_checkpoint_is_counted(tmp_path: Path) -> None:
    kills = importlib.import_module("checkpoint_kills")
    killer = kills.Killer(kills.Run(tmp_path, "r", 1), None, random.Random(0), Counter())
    root = tmp_path / "r/checkpoints"
    for step in (1, 2):
        save_checkpoint(root, step, {}, lambda path: None, keep=2)
    assert killer._inspect(-1) == 2
    assert killer.counts["kills_that_lost_a_step"] == 0
    (root / "global_step_2/state.json").write_text("{")
    killer._inspect(2)
    assert (killer.counts["kills_that_lost_a_step"], killer.counts["checkpoints_refused"]) == (1, 1)


def test_parts_that_the_viewer_does_not_show_are_noticed() -> None:
    shown = importlib.import_module("attack_runs").Shown
    whole = shown(metrics={"a"}, settings={"seed"}, episodes=Counter({("train", 1): 2}))
    nothing = shown()
    assert whole.hidden_in(whole, []) == []
    assert whole.hidden_in(nothing, []) == ["hidden: metrics", "hidden: settings", "hidden: episodes of train step 1"]
    assert whole.hidden_in(nothing, [Path("metrics.jsonl"), Path("trajectories")]) == ["hidden: settings"]
