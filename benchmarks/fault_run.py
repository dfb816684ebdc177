"""The run that `fault_drill.py` disturbs, and the nodes of Ray that it may need."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fault_cases import Case
from quintet.tracking.run_processes import read_record

HERE = Path(__file__).resolve().parent
STEPS = 24
CONFIG = f"""\
training: {{steps: {STEPS}, groups_per_step: 2, samples_per_group: 4, mini_batches: 2, threads: 1,
  micro_batch_tokens: 512}}
algorithm: {{entropy_coefficient: 0.01}}
warm_start: {{episodes: 20, updates: 2, turns_per_update: 8, until_success: null}}
rollout: {{max_turns: 2}}
validation: {{episodes: 4, every_steps: 6, before_training: false}}
checkpoint: {{every_steps: 1, keep: 3}}
tracking: {{loggers: [jsonl]}}
sft: null
"""
DISK_BYTES = 160 << 20
RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64, "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(slots=True)
class DrillRun:
    """A run in a directory, see `fault_cases.Target`."""

    place: Path
    case: Case
    draws: random.Random
    process: subprocess.Popen[bytes] | None = None
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ray_address: str = "local"

    @property
    def directory(self) -> Path:
        return self.place / "runs/run"

    @property
    def copied_checkpoints(self) -> Path:
        """Directory with copies of checkpoints that are to be restored."""
        return self.place / "copied_checkpoints"

    @property
    def output(self) -> str:
        path = self.place / "output.log"
        return path.read_text() if path.exists() else ""

    @property
    def marker(self) -> Path:
        return self.place / "fault"

    def start(self) -> None:
        """Start the command."""
        actors, per_node = self.case.actors, (self.case.actors + 2) // self.case.nodes
        engines = range(actors, actors + 2)
        if self.case.nodes == 2:
            per_node, engines = 2, ([1, 3] if actors == 2 else [1, 2, 3])  # type: ignore[assignment]
        actor = [0, 2] if actors == self.case.nodes == 2 else list(range(actors))
        words = [f"placement.nodes={self.case.nodes}", f"placement.devices_per_node={per_node}"]
        words += [f"placement.actor.devices={actor}", f"placement.rollout.devices={list(engines)}"]
        command = [sys.executable, "-m", "quintet", "train", "run.yaml", "name=run", *words, *self.case.options]
        (self.place / "run.yaml").write_text(CONFIG)
        with (self.place / "output.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--ray", self.ray_address],
                cwd=self.place,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _environment(self) -> dict[str, str]:
        paths = [str(HERE / "fault_hooks"), os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if self.case.hook:
            fault = {**self.case.hook, "marker": str(self.marker), "delay": self.draws.uniform(0, 2)}
            variables["QUINTET_FAULT"] = json.dumps(fault)
        return variables | (RAY if self.nodes else {})

    def steps(self) -> list[int]:
        """Return the steps in the metrics file."""
        return [int(row["step"]) for row in rows(self.directory)]

    def pid(self, rank: int) -> int:
        if rank < 0:
            assert self.process is not None
            return self.process.pid
        record = read_record(self.directory / f"processes/rank_{rank}.json")
        assert record is not None, f"rank {rank} has not started"
        return record.process.pid

    def ranks(self) -> list[int]:
        """Return the processes of ranks in the directory."""
        return [process.pid for process in psutil.process_iter() if self._is_rank(process)]

    def _is_rank(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.cwd() == str(self.place) and "RANK" in process.environ()
        return False

    def add_node(self, host: str) -> None:
        """Start a node of Ray."""
        port = free_port() if not self.nodes else int(self.ray_address.rpartition(":")[2])
        words = [f"--address={self.ray_address}"] if self.nodes else ["--head", f"--port={port}"]
        self.ray_address = f"127.0.0.2:{port}"
        words += ["--include-dashboard=false"] if not self.nodes else []
        options = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        program = str(Path(sys.executable).with_name("ray"))
        quick = {"initial_delay_ms": 1000, "period_ms": 500, "timeout_ms": 500, "failure_threshold": 3}
        variables = {**os.environ, **RAY, **{f"RAY_health_check_{name}": str(value) for name, value in quick.items()}}
        with (self.place / f"ray_{host}.log").open("wb") as log:
            command = [program, "start", *words, f"--node-ip-address={host}", *options]
            self.nodes[host] = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
        wait_until(lambda: answers(port), 30)

    def lose_node(self, *, whole: bool) -> None:
        children = psutil.Process(self.nodes["127.0.0.3"].pid).children(recursive=True)
        for child in children:
            if whole or child.name() == "raylet":
                with suppress(psutil.NoSuchProcess):
                    child.kill()

    def fill_disk(self) -> None:
        with (self.place / "runs/filler").open("wb") as file, suppress(OSError):
            while True:
                file.write(b"\0" * (1 << 20))
                file.flush()

    def close(self) -> None:
        """End all processes."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for pid in self.ranks():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in self.nodes.values():
            node.terminate()
        for node in self.nodes.values():
            node.wait(timeout=60)


def rows(directory: Path) -> list[dict[str, Any]]:
    """Return the complete lines of the metrics."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.2", port), 1):
        return True
    return False


def wait_until(is_reached: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not is_reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.03)
    return True


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """Mount a small file system as the directory of runs."""
    (place / "runs").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place / "runs")], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place / "runs")], check=True)
