"""If these fail, ranks wait forever for one that is no more, end one that is well, or fight over a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any, cast

import pytest

from quintet.config.plan.process_layout import LocalDevice
from quintet.errors import MachineError
from quintet.tracking.run_processes import process_namespace
from quintet.training.parallel import rendezvous as rendezvous_module
from quintet.training.parallel.process_group import RankGroup
from quintet.training.parallel.rendezvous import RankProcess, Rendezvous, _check_no_shared_gpus, _local_gpu


@pytest.mark.parametrize(("local_rank", "visible", "own"), [(0, 4, 0), (3, 4, 3), (3, 1, 0)])
def test_each_rank_uses_the_gpu_of_its_local_rank_or_the_only_visible_one(
    local_rank: int, visible: int, own: int
) -> None:
    assert _local_gpu(local_rank, LocalDevice(local_rank, local_rank, 4), visible) == own


def test_engines_on_one_device_use_the_same_gpu() -> None:
    """Device 5 of 8 is the third in use, and Ray shows only those three."""
    assert [_local_gpu(rank, LocalDevice(5, 2, 3), 8) for rank in (2, 3)] == [5, 5]
    assert [_local_gpu(rank, LocalDevice(5, 2, 3), 3) for rank in (2, 3)] == [2, 2]


def test_more_processes_than_gpus_is_an_error() -> None:
    with pytest.raises(MachineError, match="rank 6 uses device 2 of its machine, which has 2 GPUs"):
        _local_gpu(6, LocalDevice(2, 2, 4), 2)


def test_ranks_with_the_same_gpu_are_named() -> None:
    _check_no_shared_gpus({0: {"gpu": None}, 1: {"gpu": None}, 2: {"gpu": "a"}, 3: {"gpu": "b"}})
    with pytest.raises(MachineError, match="ranks 1, 3 have the same GPU"):
        _check_no_shared_gpus({0: {"gpu": "a"}, 1: {"gpu": "b"}, 2: {"gpu": "c"}, 3: {"gpu": "b"}})


@pytest.fixture
def other() -> Any:
    actual = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield actual
    actual.kill()
    actual.wait()


def beside(process: int, host: str | None = None) -> Rendezvous:
    """Rank 0 beside a process of rank 1."""
    host = host or process_namespace()
    processes = (RankProcess(0, process_namespace(), os.getpid(), ""), RankProcess(1, host, process, "", "Trainers"))
    return Rendezvous(RankGroup(0, 2), cast(Any, None), processes)


def test_the_watchdog_reports_a_dead_rank(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous_module, "GRACE_SECONDS", 0.3)
    results: list[str] = []
    received = threading.Event()
    with beside(other.pid).watchdog(lambda who: (results.append(who), received.set())[0]):
        assert not received.wait(0.6)  # while the other is there nobody is disturbed
        other.kill()
        assert received.wait(20)
    assert results == ["rank 1 (Trainers) has ended"]


def test_the_watchdog_does_not_interrupt_a_rank_that_ends_in_time(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(rendezvous_module, "GRACE_SECONDS", 0.5)
    received = threading.Event()
    other.kill()
    with beside(other.pid).watchdog(lambda who: received.set()):
        assert not received.wait(0.2)
    assert not received.wait(1.0)


def test_processes_on_other_machines_are_never_reported_dead(other: Any) -> None:
    other.kill()
    other.wait()
    assert beside(other.pid).ended_ranks() == "rank 1 (Trainers) has ended"
    assert beside(other.pid, "localhost another-boot pid:[7]").ended_ranks() == ""
