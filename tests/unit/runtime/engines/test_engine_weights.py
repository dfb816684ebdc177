"""If these fail, an engine that is restarted while weights are staged waits for weights that nobody sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from quintet.runtime.engines import engine_weights
from quintet.runtime.engines.engine_weights import _Broadcast

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
    broadcast = _Broadcast([MagicMock(rank=rank, pid=pid) for rank, pid in (A, B)], 1.0, "gloo")
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
