"""If these fail, a run can't move to another number of processes, or one that trains adapters can't go on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_processes
from paused_runs import stop_run
from safetensors.torch import load_file

from quintet.tracking.metrics import without_timing

Command = Any
SMALL = (
    "training.steps=2",
    "validation.episodes=4",
    "rollout.max_turns=3",
    "warm_start.updates=4",
    "warm_start.episodes=20",
    "algorithm.advantage.name=gae",
    "checkpoint.keep=9",
)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def on_ranks(size: int, directory: Path, *overrides: str) -> str:
    """`quintet train` as torchrun starts it; what rank 0 said."""
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [
        warm_processes.Popen(
            [sys.executable, "-m", "quintet", "train", *overrides],
            cwd=directory,
            env=os.environ | {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * size, "\n".join(outputs)[-3000:]
    return outputs[0]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [without_timing(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp"])
def test_a_run_goes_on_on_another_number_of_processes(
    quintet: Command, small: Path, tmp_path: Path, backend: str
) -> None:
    overrides = (str(small), *SMALL, "name=moved", "actor.optimizer.schedule=constant")
    two = (*overrides, f"actor.backend={backend}", f"critic.backend={backend}")
    on_ranks(2, tmp_path, *two, "training.steps=1")
    first = tmp_path / "runs/moved/checkpoints/global_step_1"
    assert len(list(first.glob("actor/*_world_size_2_rank_*.safetensors"))) == 4, "each rank wrote its own"
    assert "resuming from" in quintet("train", *overrides).stdout
    assert "resuming from" in on_ranks(2, tmp_path, *two, "training.steps=3")
    lines = metrics(tmp_path / "runs/moved")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["actor/skipped_updates"] == 0 for line in lines[1:])


def test_adapters_and_what_they_belong_to_come_back_exactly(quintet: Command, small: Path, tmp_path: Path) -> None:
    overrides = (*SMALL, "policy.lora={rank: 2}", "algorithm.kl={coefficient: 0.1}")
    quintet("train", str(small), *overrides, "name=whole")
    command = ["train", str(small), *overrides, "name=stopped"]
    stop_run(command, tmp_path, "runs/stopped/checkpoints/global_step_2", signal.SIGKILL)
    quintet("train", str(small), *overrides, "name=stopped")
    whole, stopped = (tmp_path / "runs" / name / "checkpoints/global_step_2" for name in ("whole", "stopped"))
    for path in sorted(whole.rglob("*.safetensors")):
        assert path.read_bytes() == (stopped / path.relative_to(whole)).read_bytes(), path
    assert metrics(tmp_path / "runs/whole") == metrics(tmp_path / "runs/stopped")
    names = load_file(whole / "actor/model_world_size_1_rank_0.safetensors")
    assert any(".lora_A." in name for name in names)
    assert any("base_layer" in name for name in names)
    assert not any("lora" in name for name in load_file(whole / "hf/model.safetensors"))
