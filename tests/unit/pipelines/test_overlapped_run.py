"""If these fail, a run that generates while it trains does not train, validate, save or resume as other runs do."""

from __future__ import annotations

import io
import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from separate_engines import use_separate_engines

from quintet.config.compose import load_experiment
from quintet.errors import MachineError
from quintet.pipelines.rl import train
from quintet.records import Generation
from quintet.rollout.engines.engine import EngineError
from quintet.tracking.metrics import describe

WORDS = (
    "training.steps=4",
    "training.groups_per_step=4",
    "training.samples_per_group=2",
    "training.mini_batches=2",
    "training.threads=1",
    "warm_start={episodes: 20, updates: 2, turns_per_update: 8, until_success: null}",
    "rollout.max_turns=3",
    "rollout.async_ratio=1",
    "rollout.partial=true",
    "rollout.max_staleness=2",
    "validation.every_steps=2",
    "validation.episodes=4",
    "checkpoint.every_steps=2",
    "checkpoint.keep=5",
    "tracking.loggers=[jsonl]",
)


def run(directory: Path, *words: str) -> list[dict[str, Any]]:
    train(load_experiment(None, (*WORDS, f"output_dir={directory}", "name=run", *words)), Console(file=io.StringIO()))
    return [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]


def test_an_overlapped_run_trains_validates_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_separate_engines(monkeypatch, overlap=True)
    lines = run(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for line in lines[1:]:
        assert line["rollout/staleness/max"] <= 2
        assert line["channel/rollout/groups/gets"] == 4
        assert math.isfinite(line["actor/grad_norm"])
        assert line["engine/restarts"] == 0
        for name in set(line) - {"step", "time_seconds"}:
            describe(name)
    assert max(line["rollout/staleness/max"] for line in lines[1:]) >= 1, "nothing overlapped"
    # on-policy up to the staleness: engine and learner agree on tokens of the current weights
    assert lines[1]["training/rollout_probs_diff_max"] < 1e-4
    assert all("val/frozenlake/success_rate" in lines[step] for step in (0, 2, 4))
    state = json.loads((tmp_path / "run/checkpoints/global_step_2/state.json").read_text())
    assert len(state["starts"]["in_flight"]) == 4
    again = run(tmp_path, "training.steps=6")
    assert [line["step"] for line in again] == [0, 1, 2, 3, 4, 5, 6]
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout"]


def test_requests_of_a_dying_engine_are_answered_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        """Dies once, in the tenth step of all engines."""

        steps = 0

        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def step(self) -> Sequence[Generation]:
            Dying.steps += 1
            if Dying.steps == 10:
                raise EngineError("device lost")
            return self._engine.step()  # type: ignore[no-any-return]

    use_separate_engines(monkeypatch, overlap=True, wrap=Dying)  # type: ignore[arg-type]
    lines = run(tmp_path, "validation.every_steps=-1", "validation.before_training=false")
    assert sum(line["engine/restarts"] for line in lines if line["step"]) == 1
    assert sum(line["engine/requests_reassigned"] for line in lines if line["step"]) > 0
    assert all(line["trajectory/failed"] == 0 for line in lines if line["step"])


def test_a_failure_of_the_rollout_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(engine: Any) -> Any:
        def die() -> Any:
            raise EngineError("no device")

        engine.step = die
        return engine

    use_separate_engines(monkeypatch, overlap=True, wrap=broken)
    with pytest.raises(MachineError, match=r"died 4 times in a row|no device"):
        run(tmp_path, "validation.every_steps=-1", "validation.before_training=false", "warm_start.updates=0")
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout"]
