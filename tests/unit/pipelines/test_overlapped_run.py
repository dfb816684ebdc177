"""If these fail, a run that generates while it trains does not train, validate, save or resume as other runs do."""

from __future__ import annotations

import io
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from separate_engines import use_separate_engines
from standalone_workers import ThreadWorker

from quintet.cli.configuration import inspect_config
from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.errors import MachineError
from quintet.pipelines.policy_optimization import PolicyUpdates
from quintet.pipelines.rl import train
from quintet.records import Batch, Generation
from quintet.rollout.background_rollout import BackgroundRollout
from quintet.rollout.engines.engine import EngineError
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import WORKER
from quintet.runtime.calls.transport import Transport
from quintet.runtime.controller import Controller
from quintet.runtime.learners.remote_learners import LearnerGroup
from quintet.runtime.worker import Worker
from quintet.tracking.metrics import describe

OVERRIDES = (
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


def run(directory: Path, *overrides: str) -> list[dict[str, Any]]:
    train(
        load_experiment(None, (*OVERRIDES, f"output_dir={directory}", "name=run", *overrides)),
        Console(file=io.StringIO()),
    )
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


def rlinf_channels(path: Path) -> list[str]:
    """Overrides for the channels of an RLinf configuration."""
    file = path / "rlinf.yaml"
    channels = {
        "env": {"channel": {"name": "pipe", "queue_size": 3}},
        "rollout": {"channel": {"queue_size": 2}},
        "actor": {"channel": {"queue_name": "episodes", "queue_size": 1}},
    }
    file.write_text(yaml.safe_dump({"runner": {"task_type": "embodied"}, **channels}))
    placement = inspect_config(str(file), [], "rlinf", "refuse").composed.experiment.placement
    sections = {
        "rollout.channel": placement.rollout.channel,
        "rollout.action_channel": placement.rollout.action_channel,
        "envs.channel": placement.envs.channel,
    }
    return [f"placement.{name}={json.dumps(section.model_dump())}" for name, section in sections.items()]


@pytest.mark.proves("rlinf", "actor.channel.name", "actor.channel.queue_name", "actor.channel.queue_size")
@pytest.mark.parametrize("overlaps", [False, True], ids=["synchronous", "overlapped"])
def test_a_run_with_full_queues_trains_on_every_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    overrides = ["validation.every_steps=-1", "validation.before_training=false", "training.steps=2"]
    use_separate_engines(monkeypatch, overlap=overlaps)
    lines = run(tmp_path, *overrides, *(() if overlaps else PIPELINED), *rlinf_channels(tmp_path), "training.steps=2")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["trajectory/failed"] == 0
        assert line["channel/pipe/episodes/gets"] == 4
        assert line["channel/pipe/episodes/items"] <= 1
        assert line["channel/pipe/observations/items"] <= 3
        assert line["channel/pipe/actions/items"] <= 2
        assert line["channel/pipe/observations/gets"] > 0
        for name in set(line) - {"step", "time_seconds"}:
            describe(name)


PIPELINED = (
    "training.steps=3",
    "rollout.async_ratio=0",
    "rollout.partial=false",
    "rollout.max_staleness=null",
    "actor.shuffle=false",
    "algorithm.drop_groups_without_signal=false",
    "algorithm.advantage.name=raw",
    "checkpoint.every_steps=3",
    "validation.every_steps=-1",
    "validation.before_training=false",
)


@pytest.fixture
def log_prob_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function that lets a thread of this process compute log-probs with a copy of the policy."""
    groups: list[LearnerGroup] = []

    def build_learners(controller: Controller, config: Experiment, policy: Path, **_: bool) -> LearnerGroup:
        arguments = {"config": config, "policy": policy, "sft": False}
        controller._transport.broadcast(RemoteCall(WORKER, "build_learners", arguments))
        workers = Transport([ThreadWorker(1, Worker(shard_writer="1"))], "log-prob workers")
        groups.append(LearnerGroup(controller._transport, config, policy, {"logprobs": workers}))
        return groups[-1]

    def start() -> None:
        monkeypatch.setattr(Controller, "build_learners", build_learners)
        monkeypatch.setattr(Controller, "shard_writers", lambda *_: ["1"])

    yield start
    for group in groups:
        group.close()


@pytest.mark.parametrize("recompute", [False, True], ids=["log-probs of the engine", "log-prob workers"])
def test_pipelined_training_computes_the_numbers_of_a_synchronous_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_prob_workers: Callable[[], None], recompute: bool
) -> None:
    """With the groups in the same order, so that each mini-batch has the same ones."""
    overrides = (*PIPELINED, f"rollout.recompute_logprobs={str(recompute).lower()}")
    use_separate_engines(monkeypatch, overlap=False)
    synchronous = run(tmp_path / "synchronous", *overrides)
    if recompute:
        log_prob_workers()
    use_separate_engines(monkeypatch, overlap=True)
    complete: dict[int, Any] = {}
    taken = itertools.count()
    next_group = BackgroundRollout._next_group

    def in_order(rollout: BackgroundRollout) -> Any:
        number = next(taken)
        while number not in complete:
            group = next_group(rollout)
            complete[group.number] = group
        return complete[number]

    monkeypatch.setattr(BackgroundRollout, "_next_group", in_order)
    pipelined = run(tmp_path / "pipelined", *overrides, "training.pipelined=true")
    names = (
        "actor/pg_loss",
        "actor/grad_norm",
        "actor/entropy",
        "actor/ppo_kl",
        "critic/score/mean",
        "critic/advantages/mean",
        "critic/advantages/max",
        "training/groups_with_signal",
        "perf/total_num_tokens",
        "num_turns/max",
    )
    for one, other in zip(pipelined, synchronous, strict=True):
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert all(line["actor/grad_norm"] > 0 for line in pipelined), "nothing was learned"
    models = [
        load_file(tmp_path / kind / "run/checkpoints/global_step_3/hf/model.safetensors")
        for kind in ("synchronous", "pipelined")
    ]
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-4, atol=1e-5)


def test_pipelined_training_starts_before_the_last_episode_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that generates for the last group waits until the first mini-batch has been trained."""
    use_separate_engines(monkeypatch, overlap=True)
    order: list[str] = []
    update, next_group = PolicyUpdates.update_critic_and_actor, BackgroundRollout._next_group

    def recorded_update(updates: PolicyUpdates, batch: Batch) -> None:
        order.append("update")
        update(updates, batch)

    def recorded_group(rollout: BackgroundRollout) -> Any:
        group = next_group(rollout)
        order.append("group")
        return group

    monkeypatch.setattr(PolicyUpdates, "update_critic_and_actor", recorded_update)
    monkeypatch.setattr(BackgroundRollout, "_next_group", recorded_group)
    lines = run(tmp_path, *PIPELINED, "training.steps=1", "training.pipelined=true")
    assert order == ["group", "group", "update", "group", "group", "update"]
    assert lines[-1]["rollout/staleness/max"] == 0
    assert lines[-1]["channel/rollout/groups/gets"] == 4
