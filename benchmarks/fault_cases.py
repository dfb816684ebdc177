"""Faults of `fault_drill.py`: five of each kind, and how each is injected into a running run."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

PIDFD_GETFD = 438
"""System call that copies a file descriptor of another process."""
CGROUP = Path("/sys/fs/cgroup/memory")
KILLED = r"was killed by SIGKILL"
NO_CAUSE = r"(?!)"


class Target(Protocol):
    """The run that a fault is injected into."""

    directory: Path
    """Run directory."""
    copied_checkpoints: Path
    """Directory with copies of checkpoints that are to be restored."""
    draws: random.Random

    def pid(self, rank: int) -> int:
        """Return the process of a rank; -1 is the launcher."""

    def lose_node(self, *, whole: bool) -> None:
        """Kill Ray on the second node, `whole`: and all ranks there."""

    def fill_disk(self) -> None:
        """Fill the disk of the run directory."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault."""

    target: str
    """Process that is hit, for the table."""
    cause: str
    """Regular expression of the message that names the cause."""
    inject: Callable[[Target], None] | None = None
    """Injects it from outside; None for a fault of `hook`."""
    hook: Mapping[str, Any] | None = None
    """Fault inside a rank, see `fault_hooks/sitecustomize.py`."""
    actors: int = 1
    """Ranks of the actor; two engines on the ranks after them."""
    at_start: bool = False
    """Whether it occurs while the ranks start, otherwise in a random step."""
    options: tuple[str, ...] = ()
    """Further overrides."""
    nodes: int = 1
    is_at_resume: bool = False
    """Whether it can be noticed only when the run is resumed."""
    is_silent: bool = False
    """Whether no message is wanted: the run only has to continue."""


def send(number: int, rank: int) -> Callable[[Target], None]:
    return lambda run: os.kill(run.pid(rank), number)


def stop_both_engines(run: Target) -> None:
    for rank in (1, 2):
        os.kill(run.pid(rank), signal.SIGSTOP)


def lose_ray(run: Target) -> None:
    run.lose_node(whole=False)


def lose_machine(run: Target) -> None:
    run.lose_node(whole=True)


def fill_disk(run: Target) -> None:
    run.fill_disk()


def pause(rank: int, seconds: float, pause_seconds: float) -> Callable[[Target], None]:
    """Stop and continue a rank again and again, until the run ends if that is earlier."""

    def inject(run: Target) -> None:
        pid, end = run.pid(rank), time.monotonic() + seconds
        with suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(pause_seconds)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.1)

    return inject


def limit_address_space(rank: int) -> Callable[[Target], None]:
    """Let the rank get 64 MiB of further address space."""

    def inject(run: Target) -> None:
        process = psutil.Process(run.pid(rank))
        resource.prlimit(process.pid, resource.RLIMIT_AS, (process.memory_info().vms + (64 << 20), -1))

    return inject


def limit_memory(rank: int) -> Callable[[Target], None]:
    """Let the rank get 32 MiB of further memory: the kernel kills it when it needs more."""

    def inject(run: Target) -> None:
        group = CGROUP / f"quintet_drill_{os.getpid()}"
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(32 << 20))
        (group / "cgroup.procs").write_text(str(run.pid(rank)))

    return inject


def drop_connection(rank: int, number: int) -> Callable[[Target], None]:
    """Shut down one of the connections between a rank and rank 0, in the order of their descriptors."""

    def inject(run: Target) -> None:
        process, controller = psutil.Process(run.pid(rank)), psutil.Process(run.pid(0))
        store = process.environ()["MASTER_PORT"]
        theirs = {connection.laddr for connection in controller.net_connections("tcp")}
        shared = [each for each in process.net_connections("tcp") if each.raddr and each.raddr in theirs]
        connections = sorted(each.fd for each in shared if str(each.raddr.port) != store)
        shut_down(process.pid, connections[number])

    return inject


def shut_down(pid: int, descriptor: int) -> None:
    """Shut down a connection of another process."""
    process = os.pidfd_open(pid)
    copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, descriptor, 0)
    os.close(process)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    with socket.socket(fileno=copy) as connected:
        connected.shutdown(socket.SHUT_RDWR)


def damage_checkpoint(how: str) -> Callable[[Target], None]:
    """Damage the newest checkpoint, `how == "all"` all of them, and kill the actor."""

    def inject(run: Target) -> None:
        os.kill(run.pid(0), signal.SIGKILL)
        paths = (run.directory / "checkpoints").glob("global_step_*")
        newest = sorted(paths, key=lambda path: int(path.name.rpartition("_")[2]), reverse=True)
        if how == "all":
            shutil.copytree(newest[0], run.copied_checkpoints / newest[0].name)
        for path in newest if how == "all" else newest[:1]:
            damage(path, how, run.draws)

    return inject


def damage(checkpoint: Path, how: str, draws: random.Random) -> None:
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    if how in ("manifest.json", "state.json"):
        (checkpoint / how).unlink()
        return
    path = draws.choice([each for each in files if each.name != "manifest.json" and each.stat().st_size])
    with path.open("r+b") as file:
        if how == "flip":
            data = file.read(1)
            file.seek(0)
            file.write(bytes([data[0] ^ 1]))
        else:
            file.truncate(path.stat().st_size // 2)


def hook(rank: int, at: str, action: str, argument: float = 0) -> dict[str, Any]:
    return {"rank": rank, "at": at, "action": action, "argument": argument}


def _signals(number: int, cause: str) -> list[Case]:
    return [
        Case("engine", rf"rank 1\b.*{cause}", send(number, 1)),
        Case("actor", rf"rank 0 .*on \S+ {cause}", send(number, 0)),
        Case("second rank of the actor", rf"rank 1 .*on \S+ {cause}", send(number, 1), actors=2),
        Case("engine, at the start", rf"rank 2\b.*{cause}", send(number, 2), at_start=True),
    ]


CORRUPT = r"rank 1.*corrupted"
CASES: Mapping[str, list[Case]] = {
    "kill -9": [
        *_signals(signal.SIGKILL, KILLED),
        Case("launcher", "died", send(signal.SIGKILL, -1)),
    ],
    "SIGSTOP": [
        *_signals(signal.SIGSTOP, r"is stopped"),
        Case("both engines", r"rank [12]\b.*is stopped", stop_both_engines),
    ],
    "exception": [
        Case("engine, RuntimeError", r"rank 1.*injected error", hook=hook(1, "engine step", "raise")),
        Case(
            "engine, ValueError",
            r"ValueError: injected error \(on rank 1\b",
            hook=hook(1, "engine step", "raise ValueError"),
        ),
        Case("engine, loading weights", r"rank 2.*injected error", hook=hook(2, "engine load", "raise")),
        Case("actor", r"RuntimeError: injected error", hook=hook(0, "learner", "raise")),
        Case("second rank of the actor", r"rank 1.*injected error", hook=hook(1, "learner", "raise"), actors=2),
    ],
    "exit 0": [
        Case("engine", r"rank 1 .*on \S+ ended with status 0", hook=hook(1, "engine step", "exit")),
        Case("engine, loading weights", r"rank 2 .*on \S+ ended with status 0", hook=hook(2, "engine load", "exit")),
        Case("actor", r"rank 0 .*on \S+ ended with status 0", hook=hook(0, "learner", "exit")),
        Case(
            "second rank of the actor",
            r"rank 1 .*on \S+ ended with status 0",
            hook=hook(1, "learner", "exit"),
            actors=2,
        ),
        Case(
            "engine of an actor on two ranks",
            r"rank 3 .*on \S+ ended with status 0",
            hook=hook(3, "engine step", "exit"),
            actors=2,
        ),
    ],
    "memory limit": [
        Case(
            "engine, cgroup",
            rf"rank 1 .*on \S+ {KILLED}, .*memory",
            limit_memory(1),
            hook(1, "engine step", "allocate", 512),
        ),
        Case(
            "actor, cgroup",
            rf"rank 0 .*on \S+ {KILLED}, .*memory",
            limit_memory(0),
            hook(0, "learner", "allocate", 512),
        ),
        Case(
            "second rank of the actor, cgroup",
            rf"rank 1 .*on \S+ {KILLED}, .*memory",
            limit_memory(1),
            hook(1, "learner", "allocate", 512),
            actors=2,
        ),
        Case(
            "engine, RLIMIT_AS",
            r"rank 2\b.*(MemoryError|memory|allocate)",
            limit_address_space(2),
            hook(2, "engine step", "allocate", 512),
        ),
        Case(
            "actor, RLIMIT_AS",
            r"MemoryError|out of memory|allocate",
            limit_address_space(0),
            hook(0, "learner", "allocate", 512),
        ),
    ],
    "full disk": [
        *[Case("actor", r"disk full: cannot write", fill_disk) for _ in range(3)],
        *[
            Case("two ranks of the actor", r"disk full|No space left|disk is full", fill_disk, actors=2)
            for _ in range(2)
        ],
    ],
    "lost node": [
        Case("node of engines, Ray", r"node 127\.0\.0\.3 is lost.*; continuing without it", lose_ray, nodes=2),
        Case("node of engines, all", r"node 127\.0\.0\.3 is lost.*; continuing without it", lose_machine, nodes=2),
        Case("node of an actor, Ray", r"node 127\.0\.0\.3 is lost", lose_ray, actors=2, nodes=2),
        Case("node of an actor, all", r"node 127\.0\.0\.3 is lost", lose_machine, actors=2, nodes=2),
        Case(
            "node of engines, at the start",
            r"node 127\.0\.0\.3 is lost",
            lose_machine,
            nodes=2,
            at_start=True,
            options=("placement.join_timeout_seconds=20",),
        ),
    ],
    "dropped connection": [
        Case("engine, calls", r"rank 1.*connection", drop_connection(1, 0)),
        Case("engine, heartbeats", r"rank 1.*connection", drop_connection(1, 1)),
        Case("second engine, calls", r"rank 2.*connection", drop_connection(2, 0)),
        Case("ranks of the actor, first", r"rank [01].*connection", drop_connection(1, 0), actors=2),
        Case("ranks of the actor, last", r"rank [01].*connection", drop_connection(1, -1), actors=2),
    ],
    "slow worker": [
        Case("engine, a step of 15 s", NO_CAUSE, hook=hook(1, "engine step", "sleep", 15), is_silent=True),
        Case("actor, a call of 15 s", NO_CAUSE, hook=hook(0, "learner", "sleep", 15), is_silent=True),
        Case(
            "second rank of the actor, 15 s", NO_CAUSE, hook=hook(1, "learner", "sleep", 15), actors=2, is_silent=True
        ),
        Case("engine, stopped 5 times in 6", NO_CAUSE, pause(1, 15, 0.5), is_silent=True),
        Case("engine, stopped for 5 s", NO_CAUSE, pause(2, 4, 5), is_silent=True),
    ],
    "corrupted result": [
        Case("engine, kind of the message", CORRUPT, hook=hook(1, "message", "corrupt message", 0)),
        Case("engine, length", CORRUPT, hook=hook(1, "message", "corrupt message", 8)),
        Case("engine, JSON", CORRUPT, hook=hook(1, "message", "corrupt message", 30)),
        Case("engine, a digit", CORRUPT, hook=hook(1, "message", "corrupt message", -30)),
        Case(
            "engine on the second rank of the actor, a digit",
            CORRUPT,
            hook=hook(1, "message", "corrupt message", -30),
            actors=2,
            options=("placement.rollout.devices=[0, 1]",),
        ),
    ],
    "failed start": [
        Case(
            "engine raises",
            r"rank 1 .*on \S+ ended with status 1.*injected error",
            hook=hook(1, "start", "raise"),
            at_start=True,
        ),
        Case(
            "engine exits with 0", r"rank 2 .*on \S+ ended with status 0", hook=hook(2, "start", "exit"), at_start=True
        ),
        Case(
            "engine hangs",
            r"rank 1.*did not connect",
            hook=hook(1, "start", "sleep", 300),
            at_start=True,
            options=("placement.join_timeout_seconds=8",),
        ),
        Case(
            "second rank of the actor hangs",
            r"rank 1 of 4 did not start",
            hook=hook(1, "start", "sleep", 300),
            at_start=True,
            actors=2,
            options=("placement.join_timeout_seconds=8",),
        ),
        Case(
            "actor exits with 1",
            r"rank 0 .*on \S+ ended with status 1",
            hook=hook(0, "start", "exit", 1),
            at_start=True,
        ),
    ],
    "broken checkpoint": [
        Case("truncated file", r"skipping checkpoint global_step_", damage_checkpoint("truncate"), is_at_resume=True),
        Case("changed byte", r"skipping checkpoint global_step_", damage_checkpoint("flip"), is_at_resume=True),
        Case("no manifest", r"skipping checkpoint global_step_", damage_checkpoint("manifest.json"), is_at_resume=True),
        Case(
            "no state, two ranks of the actor",
            r"skipping checkpoint global_step_",
            damage_checkpoint("state.json"),
            actors=2,
            is_at_resume=True,
        ),
        Case(
            "all checkpoints truncated",
            r"every checkpoint in \S+ is damaged",
            damage_checkpoint("all"),
            is_at_resume=True,
        ),
    ],
}
"""Cases by kind."""
