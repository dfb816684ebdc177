"""If these fail, a run that torchrun starts isn't the run of one process, hangs when a process dies, or leaves some."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_processes
from paused_runs import wait_for

from quintet.tracking.metrics import without_timing

TINY = """\
training: {steps: 3, groups_per_step: 2, samples_per_group: 4, mini_batches: 2, threads: 1, micro_batch_tokens: 512}
warm_start: {episodes: 20, updates: 2, turns_per_update: 8, until_success: null}
rollout: {max_turns: 2}
validation: {episodes: 4, every_steps: 3, before_training: false}
checkpoint: {every_steps: 1}
tracking: {loggers: [jsonl]}
sft: {episodes: {episodes: 12, validation_episodes: 4}, batch: 8, max_tokens: 400, then_reinforce: true}
"""
ONE = [sys.executable, "-m", "quintet"]
TWO = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "quintet"]
THREE = [*TWO[:4], "3", *TWO[5:]]
ROUNDING = ("ppo_kl", "rollout_probs_diff", "rollout_corr")
"""Of metrics that are rounding alone."""


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def start(
    workdir: Path, name: str, command: list[str], *overrides: str, popen: type[subprocess.Popen] = warm_processes.Popen
) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (workdir / f"{name}.log").open("a") as log:
        return popen(
            [*command, "train", "tiny.yaml", f"name={name}", *overrides],
            cwd=workdir,
            env=environment,
            stdout=log,
            stderr=log,
            text=True,
        )


def log(workdir: Path, name: str) -> str:
    return (workdir / f"{name}.log").read_text()


def all_metrics(run: Path) -> Iterator[dict[str, Any]]:
    for line in (run / "metrics.jsonl").read_text().splitlines():
        yield without_timing(json.loads(line))


def metrics(run: Path) -> Iterator[dict[str, Any]]:
    for line in all_metrics(run):
        yield {name: value for name, value in line.items() if not any(word in name for word in ROUNDING)}


def ranks(workdir: Path, name: str) -> dict[int, int]:
    """Return the process ids of a run's ranks by rank."""
    records = (workdir / f"runs/{name}/processes").glob("rank_*.json")
    return {int(path.stem.removeprefix("rank_")): json.loads(path.read_text())["pid"] for path in records}


def gone(processes: dict[int, int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(Path(f"/proc/{number}").exists() for number in processes.values()):
            return True
        time.sleep(0.05)
    return False


def test_two_processes_are_one_run_also_when_they_are_stopped_and_go_on(workdir: Path) -> None:
    """Fine-tuning, warm start and reinforcement learning."""
    alone = start(workdir, "one", ONE)
    assert alone.wait(timeout=240) == 0, log(workdir, "one")
    stopped = start(workdir, "two", TWO)
    try:
        wait_for(workdir / "runs/two/checkpoints/global_step_1", stopped)
        began = ranks(workdir, "two")
        stopped.send_signal(signal.SIGINT)
        stopped.wait(timeout=240)
    finally:
        stopped.kill()
    assert sorted(began) == [0, 1]
    assert gone(began, 60)
    actual = log(workdir, "two")
    assert actual.count("quintet: stopped by SIGINT after step") == 1, actual
    again = start(workdir, "two", TWO)
    assert again.wait(timeout=240) == 0, log(workdir, "two")
    assert "resuming from" in log(workdir, "two")
    for run in ("", "/sft"):
        pairs = zip(metrics(workdir / f"runs/one{run}"), metrics(workdir / f"runs/two{run}"), strict=True)
        for ours, theirs in pairs:
            assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-6)


def test_each_listed_rank_writes_its_profile(workdir: Path) -> None:
    overrides = ("sft=null", "warm_start=null", "training.steps=1", "tracking.profile={ranks: null, torch: {}}")
    assert start(workdir, "profiled", TWO, *overrides).wait(timeout=240) == 0, log(workdir, "profiled")
    directory = workdir / "runs/profiled/profile"
    for rank in range(2):
        events = json.loads((directory / f"step_000001_rank_{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        assert {"learners.actor.update", "forward_backward"} <= {event["name"] for event in events}
        assert (directory / f"step_000001_rank_{rank}.torch.json.gz").stat().st_size > 0


def test_two_processes_continue_a_stopped_warm_start(workdir: Path) -> None:
    overrides = ("sft=null", "training.steps=1", "warm_start.updates=24", "checkpoint.keep=24")
    whole, stopped = workdir / "runs/whole", workdir / "runs/stopped"
    assert start(workdir, "whole", TWO, *overrides).wait(timeout=240) == 0, log(workdir, "whole")
    run = start(workdir, "stopped", TWO, *overrides)
    try:
        wait_for(stopped / "warm_start/global_step_3", run)
        warm_processes.run([*ONE, "stop", "stopped"], cwd=workdir, check=True, timeout=240)
        run.wait(timeout=240)
    finally:
        run.kill()
    assert "of the warm start; runs/stopped can be resumed" in log(workdir, "stopped")
    assert start(workdir, "stopped", TWO, *overrides).wait(timeout=240) == 0, log(workdir, "stopped")
    assert "resuming from runs/stopped/warm_start/global_step_" in log(workdir, "stopped")
    assert list(metrics(stopped)) == list(metrics(whole))
    shards = list(whole.rglob("*.safetensors"))
    assert len(shards) > 2
    for path in shards:
        assert path.read_bytes() == (stopped / path.relative_to(whole)).read_bytes(), path


def test_megatron_on_two_processes_is_the_run_of_one(workdir: Path) -> None:
    """Fine-tuning, warm start and reinforcement learning."""
    pytest.importorskip("megatron.core", reason="pip install -e '.[megatron]'")
    overrides = ["training.steps=2", "algorithm.advantage={name: gae}", "algorithm.kl={place: loss}"]
    sections = ("actor", "critic", "reference")
    split = [f"{name}.{word}" for name in sections for word in ("backend=megatron", "parallel.tensor=2")]
    alone = start(workdir, "plain", ONE, *overrides)
    assert alone.wait(timeout=240) == 0, log(workdir, "plain")
    two = start(workdir, "megatron", TWO, *overrides, *split)
    try:
        assert two.wait(timeout=240) == 0, log(workdir, "megatron")
    finally:
        two.kill()
    for run in ("", "/sft"):
        pairs = zip(metrics(workdir / f"runs/plain{run}"), metrics(workdir / f"runs/megatron{run}"), strict=True)
        for ours, theirs in pairs:
            assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-5)
    on = start(workdir, "megatron", ONE, *overrides, "training.steps=3")
    assert on.wait(timeout=240) == 0, log(workdir, "megatron")
    assert "resuming from" in log(workdir, "megatron")


def test_a_killed_process_ends_the_run_with_its_rank(workdir: Path) -> None:
    run = start(workdir, "killed", TWO, "training.steps=200", "sft=null", popen=subprocess.Popen)
    try:
        wait_for(workdir / "runs/killed/checkpoints/global_step_1", run)
        began = ranks(workdir, "killed")
        os.kill(began[1], signal.SIGKILL)
        assert run.wait(timeout=60) != 0
    finally:
        run.kill()
    assert gone(began, 60)
    actual = log(workdir, "killed")
    # rank 0 prints its message, or torchrun does if it ends rank 0 earlier
    cause = r"(quintet|traceback) *: (the worker of )?rank 1 .*has ended.*, and a run needs all of its ranks"
    assert re.search(cause, actual), actual
    assert "rerun the same command to continue from the last checkpoint" in actual
    end = "\n".join(actual.splitlines()[-11:])
    assert "rank      : 1 " in end, "the cause is the rank that was killed, not the one that ended because of it"
    assert "SIGKILL" in end
    assert "rank 1 ended before the run was complete" in end
    assert "Its log: runs/killed/logs/rank_1.log" in end
    assert "To continue from the last checkpoint: torchrun --nproc-per-node 2 -m quintet train" in end
    assert (workdir / "runs/killed/logs/rank_1.log").exists()
    assert (workdir / "runs/killed/checkpoints/global_step_1").exists()


def test_a_stopped_process_ends_the_run_within_ten_seconds(workdir: Path) -> None:
    run = start(workdir, "stopped", TWO, "training.steps=200", "sft=null")
    cause = r"quintet: the worker of rank 1 .* it is stopped.*, and a run needs all of its ranks"
    try:
        wait_for(workdir / "runs/stopped/checkpoints/global_step_1", run)
        began = ranks(workdir, "stopped")
        os.kill(began[1], signal.SIGSTOP)
        stopped_at = time.monotonic()
        while not re.search(cause, log(workdir, "stopped")) and time.monotonic() < stopped_at + 60:
            time.sleep(0.05)
        assert time.monotonic() - stopped_at < 10, log(workdir, "stopped")
        os.kill(began[1], signal.SIGKILL)  # torchrun would wait for it
        assert run.wait(timeout=60) != 0
    finally:
        run.kill()
    assert gone(began, 5)


def test_log_probs_critic_reference_and_engine_on_other_devices_are_the_run_of_one_process(workdir: Path) -> None:
    """Also when a process is killed, and when the run goes on with all components on one device."""
    overrides = ("sft=null", "algorithm.advantage={name: gae}", "algorithm.kl={apply_to: loss}")
    overrides += ("rollout.recompute_logprobs=true",)
    devices = {"actor": 0, "logprobs": 1, "reference": 1, "critic": 1, "rollout": 2}
    apart = [f"placement.{name}.devices=[{device}]" for name, device in devices.items()]
    apart.append("placement.devices_per_node=3")
    assert start(workdir, "one", ONE, *overrides, "training.steps=4").wait(timeout=240) == 0, log(workdir, "one")
    run = start(workdir, "apart", THREE, *overrides, *apart)
    try:
        wait_for(workdir / "runs/apart/checkpoints/global_step_1", run)
        os.kill(ranks(workdir, "apart")[1], signal.SIGKILL)
        assert run.wait(timeout=120) != 0
    finally:
        run.kill()
    # rank 0 says it, or torchrun if it notices first
    assert "rank 1 " in log(workdir, "apart")
    assert "log-prob workers and reference and critic" in log(workdir, "apart")
    for command, more in ((THREE, apart), (ONE, ["training.steps=4"])):
        assert start(workdir, "apart", command, *overrides, *more).wait(timeout=240) == 0, log(workdir, "apart")
    assert log(workdir, "apart").count("resuming from") == 2
    assert list(metrics(workdir / "runs/apart")) == list(metrics(workdir / "runs/one"))
    end = "checkpoints/global_step_4"
    shards = list((workdir / "runs/one" / end).rglob("*.safetensors"))
    assert len(shards) > 3
    for path in shards:
        assert path.read_bytes() == (workdir / "runs/apart" / path.relative_to(workdir / "runs/one")).read_bytes(), path


def test_what_all_find_is_said_once(workdir: Path) -> None:
    run = start(workdir, "other", TWO, "placement.devices_per_node=4")
    assert run.wait(timeout=120) != 0
    actual = log(workdir, "other")
    assert actual.count("the run needs 4 devices, and torchrun started 2 processes") == 1, actual
    assert "torchrun --nproc-per-node 4 -m quintet train" in actual
