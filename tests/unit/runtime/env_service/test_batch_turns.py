"""If these fail, one client of an environment service delays the others, or changes the order of its own requests."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from quintet.runtime.env_service.batch_turns import TURN_SECONDS, BatchTurns, ReceivedBatch

pytestmark = pytest.mark.attack

LARGE, SMALL = 1, 2


class Clock:
    """Time that passes only while requests are executed."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock


def batch(*requests: Any) -> ReceivedBatch:
    message = {"requests": requests, "configs": [None], "format": "json", "max_bytes": 100}
    return ReceivedBatch(1, json.dumps(message).encode())


def executed(turns: BatchTurns, clock: Clock, count: int, seconds: float = 2 * TURN_SECONDS) -> list[Any]:
    """Return the next requests; each takes `seconds`, or as long as its own number says."""
    taken: list[Any] = []

    def execute(next_batch: ReceivedBatch) -> None:
        request = next_batch.take()
        clock.now += request if isinstance(request, float) else seconds
        taken.append(request)

    for _ in range(count):
        turns.execute_next(execute)
    return taken


def test_a_request_of_another_client_waits_for_at_most_one_of_a_large_batch(clock: Clock) -> None:
    turns = BatchTurns()
    turns.add(LARGE, 1, batch(*range(4000)))
    assert executed(turns, clock, 3) == [0, 1, 2]
    turns.add(SMALL, 2, batch("step"))
    assert "step" in executed(turns, clock, 2)
    assert executed(turns, clock, 2) == [4, 5]


def test_a_request_of_another_session_waits_for_at_most_one_of_a_large_batch(clock: Clock) -> None:
    turns = BatchTurns()
    turns.add(LARGE, 1, batch(*range(4000)))
    executed(turns, clock, 3)
    turns.add(LARGE, 2, batch("step"))
    assert "step" in executed(turns, clock, 2)


def test_many_sessions_of_one_client_delay_another_by_at_most_one_request(clock: Clock) -> None:
    turns = BatchTurns()
    for session in range(100):
        turns.add(LARGE, session, batch(*range(40)))
    executed(turns, clock, 150)
    turns.add(SMALL, 1000, batch("a", "b"))
    assert [name for name in executed(turns, clock, 4) if name in ("a", "b")] == ["a", "b"]


def test_slow_requests_have_fewer_turns_than_fast_ones(clock: Clock) -> None:
    """While a request of 1 s runs, a client with requests of 2 ms has the right to 500 of them."""
    turns = BatchTurns()
    turns.add(LARGE, 1, batch(*[1.0] * 10))
    turns.add(SMALL, 2, batch(*range(400)))
    assert executed(turns, clock, 401) == [1.0, *range(400)]


def test_a_client_that_was_idle_has_no_more_turns_than_others(clock: Clock) -> None:
    turns = BatchTurns()
    turns.add(LARGE, 1, batch(*["large"] * 100))
    executed(turns, clock, 50, seconds=10.0)
    turns.add(SMALL, 2, batch(*["small"] * 100))
    both = executed(turns, clock, 20)
    assert (both.count("large"), both.count("small")) == (10, 10)


def test_short_requests_of_a_batch_share_a_turn(clock: Clock) -> None:
    turns = BatchTurns()
    turns.add(LARGE, 1, batch(*range(4)))
    turns.add(SMALL, 2, batch("step"))
    assert executed(turns, clock, 1, seconds=0.3 * TURN_SECONDS) == [0, 1, 2, 3]


def test_the_batches_of_a_session_keep_their_order(clock: Clock) -> None:
    turns = BatchTurns()
    turns.add(LARGE, 1, batch("reset a", "reset b"))
    turns.add(LARGE, 2, batch("other", "other"))
    turns.add(LARGE, 1, batch("step a", "close b"))
    taken = executed(turns, clock, 6)
    assert [request for request in taken if request != "other"] == ["reset a", "reset b", "step a", "close b"]
    assert not turns
    assert turns.num_bytes == 0
