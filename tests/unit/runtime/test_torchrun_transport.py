"""If this fails, an error of one rank leaves the controller waiting for the others."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.standalone.connection import WorkerConnection
from quintet.runtime.standalone.messages import MessageSocket
from quintet.runtime.torchrun_transport import TorchrunTransport
from quintet.training.parallel.rendezvous import RankDiedError


def connected_rank() -> tuple[TorchrunTransport, MessageSocket]:
    """A transport to rank 1, and the end of its connection in rank 1."""
    ours, theirs = socket.socketpair()
    rendezvous = SimpleNamespace(control_group=None, death_cause=lambda error: None, dead_ranks=list)
    worker = WorkerConnection(1, os.getpid(), "this one", MessageSocket(ours))
    return TorchrunTransport(cast("Any", None), cast("Any", rendezvous), [worker]), MessageSocket(theirs)


def test_a_corrupted_result_ends_the_run_instead_of_hanging_it() -> None:
    """The controller aborts requests while the error ends the run, and must not wait for the rank again."""
    transport, rank = connected_rank()
    finish = transport.call_others(RemoteCall("engine", "step"))
    rank._socket.sendall(b"R" + bytes(20))
    with pytest.raises(RankDiedError, match=r"rank 1 .*corrupted"):
        finish()
    with pytest.raises(RankDiedError, match="rank 1"):
        transport.call_others(RemoteCall("engine", "abort"))()


def test_a_failed_call_names_its_error_and_rank() -> None:
    transport, rank = connected_rank()
    finish = transport.call_others(RemoteCall("engine", "step"))
    rank.send_error(ValueError("no such device"))
    with pytest.raises(RankDiedError, match=r"ValueError: no such device \(on rank 1\)"):
        finish()


def test_results_are_kept_when_another_call_follows() -> None:
    transport, rank = connected_rank()
    finish = transport.call_others(RemoteCall("engine", "step"))
    rank.send_result("first")
    rank.send_result("second")
    assert transport.call_others(RemoteCall("engine", "step"))() == ["second"]
    assert finish() == ["first"]
