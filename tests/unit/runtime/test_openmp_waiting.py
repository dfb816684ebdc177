"""If these fail, OpenMP threads spin on CPUs that other processes need, or sleep on CPUs that nobody else needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.runtime import openmp_waiting
from quintet.runtime.openmp_waiting import OtherLoad, WaitingPolicy

SPINNING = """
import os, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import torch
from quintet.runtime.openmp_waiting import WaitingPolicy

class Load:
    used = 0.0
    def cores(self, seconds): return self.used

def cpu_seconds():
    before = time.process_time()
    for _ in range(20):
        numbers.add_(1)
        time.sleep(0.03)
    return time.process_time() - before

torch.set_num_threads(2)
numbers, load = torch.ones(1 << 18), Load()
policy, results = WaitingPolicy(load, 2, 2), []
for load.used in (0.0, 1.0, 0.0):
    policy.follow(1.0)
    cpu_seconds()
    results.append(cpu_seconds())
alone, beside_others, alone_again = results
print(beside_others < alone / 3, alone_again > 3 * beside_others)
"""


def write_statistics(path: Path, busy: int, idle: int) -> None:
    path.write_text(f"cpu  {busy} 0 0 {idle} 50 0 0 0 0 0\ncpu0 1 2 3\n")


def test_load_of_others_is_what_this_process_does_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(10.0, 2.0), (14.0, 2.0), (14.0, 2.0)])
    monkeypatch.setattr(os, "times", lambda: os.times_result((*next(times), 0.0, 0.0, 0.0)))
    ticks = os.sysconf("SC_CLK_TCK")
    write_statistics(tmp_path / "stat", 100 * ticks, 7)
    load = OtherLoad(tmp_path / "stat")
    write_statistics(tmp_path / "stat", 107 * ticks, 9)
    assert load.cores(2.0) == 1.5, "seven seconds of all, four of this process, in two seconds"
    assert load.cores(2.0) == 0.0


class Load(OtherLoad):
    def __init__(self) -> None:
        self.used = 0.0

    def cores(self, seconds: float) -> float:
        return self.used


class NoThreads:
    def __init__(self, count: int) -> None:
        self.count = count

    def end(self) -> None:
        self.count = 0


@pytest.mark.parametrize(("cpus", "used", "is_short"), [(2, 0.2, False), (2, 0.3, True), (64, 61.0, False)])
def test_threads_wait_for_less_long_only_while_others_need_the_cpus(
    cpus: int, used: float, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openmp_waiting, "SleepingThreads", NoThreads)
    load = Load()
    policy = WaitingPolicy(load, cpus, 2)
    for load.used, expected in ((0.0, False), (used, is_short), (used, is_short), (0.0, False)):
        policy.follow(2.0)
        assert policy.is_short is expected


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="threads on one CPU never spin for long")
def test_spinning_ends_while_others_need_the_cpus() -> None:
    """Seconds of CPU of pauses after parallel regions, on two of the CPUs: 10 ms each with spinning."""
    environment = {name: value for name, value in os.environ.items() if name not in openmp_waiting.VARIABLES}
    environment["OMP_NUM_THREADS"] = "2"
    command = [sys.executable, "-c", SPINNING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"
