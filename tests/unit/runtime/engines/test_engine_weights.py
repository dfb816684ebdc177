"""If these fail, an engine waits for weights that nobody sends: it was restarted, or another one is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from quintet.config.compose import load_experiment
from quintet.runtime.calls.connection import WorkerLostError
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.engines import engine_weights
from quintet.runtime.engines.engine_weights import EngineWeights, _Broadcast
from quintet.training.parallel.broadcast_group import BroadcastGroup

A, B = (1, 71), (2, 72)
"""Ranks and processes of two workers."""


class Group:
    """A broadcast group that records what it sends, and waits until all members are there."""

    def __init__(self, *_: Any) -> None:
        self.sent: list[list[Tensor]] = []
        self.complete = threading.Event()

    def broadcast(self, buffers: list[Tensor]) -> None:
        self.sent.append(list(buffers))
        self.complete.wait(10.0)

    def close(self) -> None:
        self.complete.set()


@pytest.fixture
def broadcast(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Broadcast]:
    monkeypatch.setattr(engine_weights, "create_store", MagicMock())
    monkeypatch.setattr(engine_weights, "GroupAddress", MagicMock())
    monkeypatch.setattr(engine_weights, "RemoteCall", MagicMock())
    monkeypatch.setattr(engine_weights, "BroadcastGroup", Group)
    workers = [MagicMock(rank=rank, pid=pid, lost_reason=None) for rank, pid in (A, B)]
    broadcast = _Broadcast(workers, 1.0, "gloo")
    yield broadcast
    broadcast.close()


def group_of(broadcast: _Broadcast) -> Group:
    group = broadcast._group
    assert isinstance(group, Group)
    return group


def test_an_engine_that_restarts_while_weights_are_staged_starts_no_broadcast_of_the_last_ones(
    broadcast: _Broadcast,
) -> None:
    """No engine has loaded the first weights, and one is restarted between two calls of `EngineWeights.stage`."""
    old, new = [torch.zeros(2)], [torch.ones(2)]
    group_of(broadcast).complete.set()
    broadcast.prepare(old)
    assert broadcast.finish()
    assert not broadcast.take(A)  # over its connection instead
    broadcast.prepare(new)
    assert broadcast.take(A)
    assert broadcast.take(B)
    assert broadcast.finish()
    assert [sent[0] is new[0] for sent in group_of(broadcast).sent] == [True]


def test_an_engine_that_restarts_while_a_broadcast_waits_for_it_takes_part_in_that_one(broadcast: _Broadcast) -> None:
    old, new, ended = [torch.zeros(2)], [torch.ones(2)], []
    broadcast.prepare(old)
    assert broadcast.take(A)
    thread = threading.Thread(target=lambda: ended.append(broadcast.finish()))  # the training thread
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert broadcast.take(B)  # the rollout thread
    group_of(broadcast).complete.set()
    thread.join(10.0)
    assert ended == [True]
    broadcast.prepare(new)
    assert broadcast.take(A)
    assert broadcast.take(B)
    assert broadcast.finish()
    assert [sent[0] is buffers[0] for sent, buffers in zip(group_of(broadcast).sent, (old, new), strict=True)] == [
        True,
        True,
    ]


def test_a_broken_broadcast_is_reported(broadcast: _Broadcast, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: list[Tensor]) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(group_of(broadcast), "broadcast", broken)
    broadcast.prepare([torch.zeros(2)])
    assert broadcast.take(A)
    assert not broadcast.finish()


class JoiningWorker:
    """A worker that joins the real group in a thread."""

    lost_reason: str | None = None
    messages = SimpleNamespace(local_host="127.0.0.1")

    def __init__(self, rank: int) -> None:
        self.rank, self.pid = rank, rank
        self.groups: list[BroadcastGroup] = []

    def start(self, call: RemoteCall) -> threading.Thread:
        def join() -> None:
            with suppress(RuntimeError):
                self.groups.append(BroadcastGroup(call.arguments["address"], call.arguments["rank"]))

        thread: Any = threading.Thread(target=join)
        thread.start()
        thread.finish = thread.join
        return thread  # type: ignore[no-any-return]


def joined(*workers: JoiningWorker) -> _Broadcast:
    return _Broadcast(cast("Any", workers), 20.0, "gloo")


@pytest.mark.parametrize("lost", [0, 1])
def test_the_loss_of_a_member_ends_the_wait_of_the_others_at_once(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broadcast has several buckets, of which the lost member receives none."""
    monkeypatch.setattr("quintet.training.parallel.broadcast_group.BUCKET_BYTES", 1 << 10)
    workers = [JoiningWorker(1), JoiningWorker(2)]
    broadcast = joined(*workers)
    broadcast.prepare([torch.ones(1 << 20, dtype=torch.uint8)])
    assert broadcast.take((1, 1))
    assert broadcast.take((2, 2))
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            workers[1 - lost].groups[0].broadcast([torch.empty(1 << 20, dtype=torch.uint8)])
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    workers[lost].groups.pop().close()
    thread.join(10.0)
    assert not thread.is_alive(), "it would wait until the group's timeout"
    assert len(errors) == 1
    assert not broadcast.finish()
    assert not broadcast.take((1, 1))
    broadcast.close()


def test_engines_that_were_not_called_before_a_broadcast_broke_load_their_weights_in_another_way(
    broadcast: _Broadcast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: list[Tensor]) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(group_of(broadcast), "broadcast", broken)
    broadcast.prepare([torch.zeros(2)])
    assert broadcast.take(A)
    broadcast.finish()
    assert not broadcast.take(B)


def weights_over_group(workers: list[Any]) -> EngineWeights:
    overrides = ("placement.devices_per_node=3", "placement.actor.devices=[0]", "placement.rollout.devices=[1,2]")
    config = load_experiment(None, (*overrides, "placement.weight_transfer=process_group")).experiment
    weights = EngineWeights(config, lambda: iter([("weight", torch.ones(3))]))
    weights.connect(workers)
    return weights


def test_weights_are_not_broadcast_to_a_worker_that_is_known_to_be_lost() -> None:
    """The others would wait for it."""
    workers: list[Any] = [JoiningWorker(1), JoiningWorker(2)]
    for worker in workers:
        worker.host = "another machine"
    weights = weights_over_group(workers)
    workers[1].lost_reason = "has ended"
    weights.stage()
    assert weights.load_call(workers[0], 1).method == "load_weights"
    weights.close()


def test_a_worker_that_is_lost_before_it_joins_is_no_member() -> None:
    workers: list[Any] = [JoiningWorker(1), JoiningWorker(2)]
    workers[1].lost_reason = "has ended"
    for worker in workers:
        worker.host = "another machine"
    weights = weights_over_group(workers)
    assert weights._broadcast is not None
    assert weights._broadcast.members == {(1, 1)}
    weights.close()


def test_a_worker_that_is_lost_while_it_joins_leaves_the_others_their_connections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Lost(JoiningWorker):
        def start(self, call: RemoteCall) -> threading.Thread:
            raise WorkerLostError("the worker of rank 2 has ended")

    workers: list[Any] = [JoiningWorker(1), Lost(2)]
    for worker in workers:
        worker.host = "another machine"
    weights = weights_over_group(workers)
    weights.stage()
    assert weights.load_call(workers[0], 1).method == "load_weights"
    assert "instead of a process group: the worker of rank 2 has ended" in caplog.text
    weights.close()
