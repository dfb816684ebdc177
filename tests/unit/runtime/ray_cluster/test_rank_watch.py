"""If these fail, a launcher takes a rank that vanished for one that is done, names no cause, or waits for nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quintet.runtime.ray_cluster.node_processes import NodeProcesses
from quintet.runtime.ray_cluster.rank_watch import Node, RankFailureError, RankWatch
from quintet.runtime.signals import StopRequest
from quintet.tracking.run_processes import RunProcess

RUNS = RunProcess.of(os.getpid(), "rank", 2)
ENDED = replace(RUNS, outcome="ended")


class LocalNode(Node):
    """A node without Ray."""

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.actor, method)(*arguments)


class Launched:
    """Two ranks that end after some seconds with a status, and what the watch shows of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes = NodeProcesses()
        self.output = ""
        self.components = ("", "")

    def start(self, seconds: tuple[float, float], codes: tuple[int, int] = (0, 0)) -> None:
        program = "import os, sys, time; rank = int(os.environ['RANK']); time.sleep({0}[rank]); sys.exit({1}[rank])"
        environments = {rank: {"RANK": str(rank)} for rank in (0, 1)}
        self.processes.start([sys.executable, "-c", program.format(seconds, codes)], str(self.directory), environments)

    def watch(self, records: Mapping[int, RunProcess], restartable: frozenset[int] = frozenset()) -> int:
        def show(text: str) -> None:
            self.output += text

        nodes = [LocalNode("here", self.processes, (0, 1), 2.0)]
        return RankWatch(nodes, StopRequest(), show, restartable, 1, records.get, self.components).run()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path)
    yield launched
    launched.processes.kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_exits_with_0_before_its_work_is_done_is_a_failure(launched: Launched, rank: int) -> None:
    launched.start((0.0, 60.0) if rank == 0 else (60.0, 0.0))
    with pytest.raises(RankFailureError, match=f"rank {rank} on here ended with status 0: without a message"):
        launched.watch({0: RUNS, 1: RUNS})


def test_ranks_that_have_done_their_work_end_the_run(launched: Launched) -> None:
    launched.start((1.5, 0.0))
    assert launched.watch({0: ENDED, 1: ENDED}, restartable=frozenset({1})) == 0
    assert launched.output == ""  # an engine that ends before rank 0 is not restarted


def test_a_killed_rank_is_named_although_the_others_run_on(launched: Launched) -> None:
    launched.start((60.0, 60.0))
    launched.processes.send_signal(signal.SIGKILL, 1)
    started = time.monotonic()
    with pytest.raises(RankFailureError, match="rank 1 on here was killed by SIGKILL, probably because"):
        launched.watch({0: RUNS, 1: RUNS})
    assert time.monotonic() - started < 5


def test_a_rank_that_is_stopped_for_the_configured_time_is_lost(launched: Launched) -> None:
    launched.start((60.0, 60.0))
    launched.processes.send_signal(signal.SIGSTOP, 0)
    started = time.monotonic()
    with pytest.raises(RankFailureError, match=r"rank 0 on here is stopped \(SIGSTOP\)"):
        launched.watch({0: RUNS, 1: RUNS})
    assert 2 < time.monotonic() - started < 6


def test_an_engine_that_is_stopped_is_restarted_for_that_reason(launched: Launched) -> None:
    """It is killed, and must not be said to have run out of memory."""
    launched.start((4.0, 3.0))
    launched.processes.send_signal(signal.SIGSTOP, 1)
    assert launched.watch({0: ENDED, 1: RUNS}, restartable=frozenset({1})) == 0
    assert launched.output == "quintet: rank 1 on here is stopped (SIGSTOP); restarting it (1 of 1)\n"


def test_the_error_of_a_rank_that_does_not_print_is_shown(launched: Launched) -> None:
    launched.start((1.0, 0.0), (2, 1))
    failed = replace(RUNS, outcome="failed", message="ValueError: no such thing")
    assert launched.watch({0: replace(RUNS, outcome="failed"), 1: failed}) == 2
    assert launched.output == "quintet: rank 1 on here ended with status 1: ValueError: no such thing\n"


def test_a_controller_that_ends_without_a_message_is_named(launched: Launched) -> None:
    launched.start((0.5, 0.0), (1, 0))
    assert launched.watch({0: RUNS, 1: ENDED}) == 1
    assert launched.output == "quintet: rank 0 on here ended with status 1: without a message\n"


def test_an_engine_that_failed_is_restarted_and_its_error_is_shown(launched: Launched) -> None:
    launched.components = ("actor", "Samplers")
    launched.start((3.0, 0.0), (0, 1))
    failed = replace(RUNS, outcome="failed", message="RuntimeError: broken")
    assert launched.watch({0: ENDED, 1: failed}, restartable=frozenset({1})) == 0
    assert launched.output == (
        "quintet: rank 1 (Samplers) on here ended with status 1: RuntimeError: broken; restarting it (1 of 1)\n"
    )
