"""If these fail, a rank that is stopped stays unnoticed, or one that works for a long time is taken for a lost one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quintet.runtime.calls.connection import Role, WorkerConnection, WorkerLostError
from quintet.runtime.calls.handshake import WorkerHello
from quintet.runtime.calls.listener import ControllerAddress, WorkerListener
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.worker_process import _connect_twice, _sent_heartbeats
from quintet.training.parallel import rendezvous as rendezvous_module
from quintet.training.parallel.rendezvous import LostRank, RankProcess, Rendezvous

LOST_SECONDS = 1.5
CALL_SECONDS = 0.5


@contextmanager
def silent_worker(role: Role) -> Iterator[tuple[WorkerListener, WorkerConnection, threading.Event]]:
    """A worker that does not answer calls, and sends heartbeats until the event is set."""
    listener = WorkerListener("127.0.0.1", {1: "Trainers"}, "the run", LOST_SECONDS, CALL_SECONDS)
    with closing(listener):
        hello = WorkerHello("calls", "a", 1, os.getpid(), "here", "the run", role)
        calls, heartbeats = _connect_twice(ControllerAddress.of(listener), hello)
        stopped = threading.Event()
        silent = SimpleNamespace(sendall=lambda _: stopped.is_set() or heartbeats.sendall(b"."), close=heartbeats.close)
        with calls, _sent_heartbeats(cast(Any, silent)):
            (worker,) = listener.wait_for([1], 10.0, role)
            yield listener, worker, stopped


def test_a_rank_of_the_actor_may_compute_for_any_time_while_it_sends_heartbeats() -> None:
    with silent_worker("actor") as (listener, worker, stopped):
        worker.start(RemoteCall("robots", "take_trajectories"))
        time.sleep(LOST_SECONDS + 3 * CALL_SECONDS)
        assert worker.lost_reason is None
        stopped.set()
        with pytest.raises(WorkerLostError, match=r"rank 1 \(Trainers, .*no heartbeat for 1.5 seconds: it is stopped"):
            worker.finish()
        while (lost := listener.lost_rank) is None:
            time.sleep(0.02)
        assert "rank 1 (Trainers" in lost.reason
        assert time.monotonic() - lost.last_heartbeat < LOST_SECONDS + 5


def test_the_loss_of_an_engine_does_not_end_the_run() -> None:
    with silent_worker("engine") as (listener, worker, stopped):
        stopped.set()
        with pytest.raises(WorkerLostError, match="no heartbeat"):
            worker.finish()
        time.sleep(0.2)
        assert listener.lost_rank is None


def test_a_standalone_worker_is_lost_if_a_call_takes_too_long() -> None:
    with silent_worker("learners") as (_, worker, _):
        worker.start(RemoteCall("learners", "extra_state"))
        with pytest.raises(WorkerLostError, match=r"has not answered a call for 0.5 seconds"):
            worker.finish()


@pytest.mark.parametrize(("silent_seconds", "expected_seconds"), [(0.0, 0.6), (30.0, 0.05)], ids=["ended", "stopped"])
def test_a_rank_that_waits_for_a_lost_one_ends_soon_after_its_last_sign_of_life(
    silent_seconds: float, expected_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has ended breaks collectives, whose errors say more than the watchdog; a stopped one does not."""
    for name, seconds in {"POLL_SECONDS": 0.02, "GRACE_SECONDS": 0.6, "MIN_GRACE_SECONDS": 0.05}.items():
        monkeypatch.setattr(rendezvous_module, name, seconds)
    processes = tuple(RankProcess(rank, "another machine", 1, "") for rank in range(2))
    ranks = Rendezvous(cast(Any, SimpleNamespace(rank=0, size=2)), cast(Any, None), processes)
    began, received = time.monotonic(), threading.Event()
    lost = LostRank("the worker of rank 1 is lost", began - silent_seconds)
    reasons: list[str] = []
    with ranks.watchdog(lambda reason: (reasons.append(reason), received.set())[0], lambda: lost):
        assert received.wait(20)
    assert reasons == ["the worker of rank 1 is lost"]
    assert time.monotonic() - began >= expected_seconds
    if silent_seconds:
        assert time.monotonic() - began < 0.5
