"""If this fails, an error of one rank leaves the controller waiting for the others."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quintet.runtime.calls.connection import WorkerConnection
from quintet.runtime.calls.messages import MessageSocket
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.transport import Transport
from quintet.training.parallel.rendezvous import RankDiedError

STEP = RemoteCall("engine", "step")


def connected_ranks(execute: Any = None, *, count: int = 1) -> tuple[Transport, list[MessageSocket]]:
    """A transport to rank 0, which executes calls by `execute`, and ranks from 1 on; the ends of their connections."""
    pairs = [socket.socketpair() for _ in range(count)]
    workers = [
        WorkerConnection(rank, os.getpid(), "this one", MessageSocket(ours)) for rank, (ours, _) in enumerate(pairs, 1)
    ]
    local, rendezvous = SimpleNamespace(execute=execute), SimpleNamespace(control_group=None)
    transport = Transport(workers, local=cast("Any", local), rendezvous=cast("Any", rendezvous))
    return transport, [MessageSocket(theirs) for _, theirs in pairs]


def test_a_corrupted_result_ends_the_run_instead_of_hanging_it() -> None:
    """The controller aborts requests while the error ends the run, and must not wait for the rank again."""
    transport, (rank,) = connected_ranks()
    finish = transport.call_others(STEP)
    rank._socket.sendall(b"R" + bytes(20))
    with pytest.raises(RankDiedError, match=r"the worker of rank 1 .*corrupted.*, and a run needs all of its ranks"):
        finish()
    with pytest.raises(RankDiedError, match="rank 1"):
        transport.call_others(RemoteCall("engine", "abort"))()


def test_a_failed_call_names_its_error_and_rank() -> None:
    transport, (rank,) = connected_ranks()
    finish = transport.call_others(STEP)
    rank.send_error(ValueError("no such device"))
    with pytest.raises(RankDiedError, match=r"ValueError: no such device \(on rank 1\)"):
        finish()


def test_results_are_kept_when_another_call_follows() -> None:
    transport, (rank,) = connected_ranks()
    finish = transport.call_others(STEP)
    rank.send_result("first")
    rank.send_result("second")
    assert transport.call_others(STEP)() == ["second"]
    assert finish() == ["first"]


def test_the_first_error_that_arrives_is_the_cause() -> None:
    transport, (first, second) = connected_ranks(count=2)
    finish = transport.call_others(STEP)
    second.send_error(ValueError("no such device"))
    with pytest.raises(RankDiedError, match=r"rank 2 failed: ValueError: no such device"):
        finish()
    first.send_result(None)
    transport.close()


def test_a_result_of_an_engine_that_was_not_taken_hides_no_error_of_another_rank() -> None:
    """The controller would wait for rank 1, which waits for rank 2 in a collective."""
    transport, (first, second) = connected_ranks(count=2)
    of_engine = transport.workers[0].start(STEP)
    first.send_result("asleep")
    finish = transport.call_others(STEP)
    second.send_error(ValueError("no such device"))
    with pytest.raises(RankDiedError, match=r"rank 2 failed: ValueError: no such device"):
        finish()
    assert of_engine.finish() == "asleep"
    first.send_result(None)
    transport.close()


def test_an_error_of_another_rank_takes_the_place_of_the_collective_that_it_breaks() -> None:
    def broken(call: RemoteCall) -> None:
        rank.send_error(ValueError("no such device"))
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")

    transport, (rank,) = connected_ranks(broken)
    with pytest.raises(RankDiedError, match=r"rank 1 failed: ValueError: no such device \(on rank 1\)"):
        transport.broadcast(STEP)


def test_an_error_of_an_engine_that_gathers_takes_the_place_of_the_collective_that_it_breaks() -> None:
    def broken(call: RemoteCall) -> None:
        rank.send_error(ValueError("no such device"))
        rank.shutdown()
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")

    transport, (rank,) = connected_ranks(broken)
    transport.workers[0].start(STEP)
    with pytest.raises(RankDiedError, match=r"rank 1 failed: ValueError: no such device \(on rank 1\)"):
        transport.broadcast(STEP, except_ranks=[1])


def test_a_lost_rank_is_named_in_place_of_the_collective_that_it_breaks() -> None:
    def broken(call: RemoteCall) -> None:
        rank.shutdown()
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")

    transport, (rank,) = connected_ranks(broken)
    with pytest.raises(RankDiedError, match=r"the worker of rank 1 \(process \d+\) has ended, or its connection broke"):
        transport.broadcast(STEP)


def test_an_error_of_this_rank_is_not_blamed_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.runtime.calls.transport.LOST_RANK_SECONDS", 0.1)

    def failing(call: RemoteCall) -> None:
        raise RuntimeError("CUDA out of memory")

    transport, _ = connected_ranks(failing)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        transport.broadcast(STEP)


def test_tensors_reach_ranks_over_their_connections_if_one_does_not_get_the_call() -> None:
    """It would not take part in the broadcast, for which all others wait."""
    transport, (first, second) = connected_ranks(lambda call: None, count=2)
    call = RemoteCall("robots", "update", {"chunk_steps": torch.arange(3), "rates": None})
    transport.broadcast(call, except_ranks=[1])
    assert second.receive_call().arguments["chunk_steps"].tolist() == [0, 1, 2]
    assert not wait([first], 0)


def test_a_call_to_all_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[RemoteCall] = []
    monkeypatch.setattr("quintet.runtime.calls.transport.encode", lambda call: (encoded.append(call), (b"{}", []))[1])
    transport, ranks = connected_ranks(count=3)
    finish = transport.call_others(STEP)
    for rank in ranks:
        rank.send_result(None)
    assert finish() == [None] * 3
    assert len(encoded) == 1
