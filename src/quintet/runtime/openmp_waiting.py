"""How long OpenMP threads wait at barriers, by the load of other processes while this one runs.

A thread that spins keeps a CPU from the thread it waits for. Alone, spinning saves about a tenth; beside other
processes it costs more (`benchmarks/competing_load.py`). libgomp reads its spin counts once, when it is loaded, but
uses the shorter one, of 1,000 instead of 300,000 turns, as long as there are more OpenMP threads than CPUs (`do_spin`
in its `wait.h`). So while other processes need the CPUs, threads that only sleep are added.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path
from typing import Final

import torch

INTERVAL_SECONDS: Final = 2.0
"""Time over which the load is measured."""
TOLERATED_CORES: Final = 0.25
"""Cores that other processes may use before threads wait for less long."""
PARALLEL_NUMBERS: Final = 1 << 18
"""Size of a tensor that torch changes with all threads."""
VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables with which the user decides."""


class OtherLoad:
    """Cores that other processes use, since the last call."""

    def __init__(self, statistics: Path = Path("/proc/stat")) -> None:
        self._statistics = statistics
        self._last = self._read()

    def cores(self, seconds: float) -> float:
        """Return the mean number of cores that other processes used in the last `seconds`."""
        last, self._last = self._last, self._read()
        (busy_before, own_before), (busy, own) = last, self._last
        return max(0.0, busy - busy_before - (own - own_before)) / seconds

    def _read(self) -> tuple[float, float]:
        """Return the seconds of all processes on all cores, and of this process; time that the host of a virtual
        machine takes counts as used."""
        fields = self._statistics.read_text(encoding="utf-8").partition("\n")[0].split()
        user, nice, system, _idle, _wait, *others = map(int, fields[1:9])
        times = os.times()
        return sum((user, nice, system, *others)) / os.sysconf("SC_CLK_TCK"), times.user + times.system


class SleepingThreads:
    """OpenMP threads beyond the number of CPUs, which do nothing."""

    def __init__(self, count: int) -> None:
        """`count` is the number of threads that are to be started, each with those of its parallel regions."""
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="openmp-sleep", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        torch.ones(PARALLEL_NUMBERS).add_(1)  # starts the OpenMP threads of this thread, which end with it
        self._end.wait()

    def end(self) -> None:
        """End the threads."""
        self._end.set()
        for thread in self._threads:
            thread.join()


def sleeping_threads_needed(cpus: int, threads: int) -> int:
    """Return how many threads with parallel regions of `threads` exceed the CPUs beside one that has such regions.

    >>> sleeping_threads_needed(2, 2), sleeping_threads_needed(64, 16), sleeping_threads_needed(64, 1)
    (1, 4, 0)
    """
    return max(0, -(-(cpus + 1 - threads) // (threads - 1))) if threads > 1 else 0


class WaitingPolicy:
    """Makes OpenMP threads of this process wait for less long as long as other processes need the CPUs."""

    def __init__(self, load: OtherLoad, cpus: int, threads: int) -> None:
        self._load = load
        self._cpus = cpus
        self._threads = threads
        self._sleeping: SleepingThreads | None = None

    @property
    def is_short(self) -> bool:
        """Whether threads wait for less long now."""
        return self._sleeping is not None

    def follow(self, seconds: float) -> None:
        """Decide by the load of the last `seconds`."""
        is_contended = self._load.cores(seconds) + self._threads > self._cpus + TOLERATED_CORES
        if is_contended and self._sleeping is None:
            self._sleeping = SleepingThreads(sleeping_threads_needed(self._cpus, self._threads))
        elif not is_contended and self._sleeping is not None:
            self._sleeping.end()
            self._sleeping = None


@cache
def follow_load() -> None:
    """Start the thread that makes OpenMP follow the load, once per process; not if the user decides, with one thread,
    or without `/proc/stat`, which systems without libgomp do not have either."""
    threads, statistics = torch.get_num_threads(), Path("/proc/stat")
    if threads == 1 or any(name in os.environ for name in VARIABLES) or not statistics.exists():
        return
    policy = WaitingPolicy(OtherLoad(statistics), len(os.sched_getaffinity(0)), threads)

    def run() -> None:
        pause = threading.Event()
        while not pause.wait(INTERVAL_SECONDS):
            policy.follow(INTERVAL_SECONDS)

    threading.Thread(target=run, name="openmp-wait", daemon=True).start()
