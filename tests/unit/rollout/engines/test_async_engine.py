"""If these fail, clients of one engine wait for each other, get each other's responses, or wait forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import pytest

from quintet.errors import ConfigError
from quintet.records import Failure, FinishReason, Generation, Request
from quintet.rollout.engines.async_engine import (
    AsyncEngine,
    EngineDeadError,
    PartialResponse,
    PendingRequests,
)
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.request_queue import RequestQueue, client_name


class Counting:
    """An engine whose responses count up from the prompt's first token, one token per step."""

    max_model_len = 100

    def __init__(self) -> None:
        self.weight_version = 3
        self.running: dict[int, tuple[Request, list[int]]] = {}
        self.together: list[int] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.rejection: Exception = ValueError("too long")
        self.closed = False

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def add_request(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        if len(request.prompt) >= self.max_model_len:
            raise self.rejection
        self.running[request.id] = (request, [])

    def step(self) -> list[Generation]:
        self.threads.add(threading.get_ident())
        self.gate.wait(5)
        if self.fault is not None:
            raise self.fault
        self.together.append(len(self.running))
        done = []
        for number, (request, tokens) in list(self.running.items()):
            tokens.append(request.prompt[0] + len(tokens) + 1)
            if len(tokens) >= request.max_tokens:
                failure = Failure("engine", "NaN", "no number") if request.seed == 666 else None
                stop = FinishReason.FAILED if failure else FinishReason.LENGTH
                done.append(Generation(number, tuple(tokens), (-1.0,) * len(tokens), stop, 3, failure=failure))
                del self.running[number]
        return done

    def abort(self, ids: Collection[int]) -> list[Generation]:
        gone = [self.running.pop(number) for number in ids if number in self.running]
        return [Generation(r.id, tuple(t), (-1.0,) * len(t), FinishReason.ABORT, 3) for r, t in gone]

    def close(self) -> None:
        self.closed = True


class StreamingCounting(Counting):
    def partial_responses(self, ids: Collection[int]) -> Mapping[int, PartialResponse]:
        return {number: (self.running[number][1], [-1.0] * len(self.running[number][1]), ()) for number in ids}


@pytest.fixture
def engine() -> Counting:
    return Counting()


@pytest.fixture
def thread(engine: Counting) -> Iterator[AsyncEngine]:
    made = AsyncEngine(engine)
    yield made
    engine.gate.set()
    made.close()
    assert engine.closed


def request(first: int, length: int = 3, seed: int = 0) -> Request:
    return Request(id=0, prompt=(first,), max_tokens=length, seed=seed)


def finished(pending: PendingRequests) -> list[Generation]:
    deadline = time.monotonic() + 5
    while not pending.done:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return [generation for generation in pending.generations if generation is not None]


def responses(pending: PendingRequests) -> list[tuple[int, ...]]:
    return [generation.tokens for generation in finished(pending)]


def test_callers_get_the_responses_to_their_own_requests(thread: AsyncEngine) -> None:
    submitted = [thread.submit([request(10 * n), request(10 * n + 5, 2)]) for n in range(5)]
    for n, pending in enumerate(submitted):
        start = 10 * n
        assert responses(pending) == [(start + 1, start + 2, start + 3), (start + 6, start + 7)]
    stats = thread.stats()
    assert (stats.num_unfinished, stats.num_finished, stats.num_tokens, stats.finish_reasons) == (
        0,
        10,
        25,
        {"length": 10},
    )
    assert stats.weight_version == 3


def test_requests_of_several_callers_run_in_one_batch(engine: Counting, thread: AsyncEngine) -> None:
    engine.gate.clear()
    first = thread.submit([request(0, 4)])
    while not engine.running:
        time.sleep(0.001)
    others = [thread.submit([request(n, 4)]) for n in (10, 20)]
    engine.gate.set()
    for pending in (first, *others):
        responses(pending)
    assert max(engine.together) == 3
    assert thread.stats().max_batch_size == 3
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


@pytest.mark.parametrize("rejection", [ValueError("too long"), ConfigError("too long for this configuration")])
def test_a_rejected_request_fails_only_its_own_submission(
    engine: Counting, thread: AsyncEngine, rejection: Exception
) -> None:
    engine.rejection = rejection
    good = thread.submit([request(0)])
    bad = thread.submit([request(1), Request(id=0, prompt=(1,) * 100, max_tokens=1, seed=0)])
    with pytest.raises(ValueError, match="too long"):
        responses(bad)
    assert responses(good) == [(1, 2, 3)]
    assert not engine.running


def test_a_failed_request_is_returned_like_a_finished_one(thread: AsyncEngine) -> None:
    done = finished(thread.submit([request(0), request(5, seed=666)]))
    assert [generation.finish_reason for generation in done] == [FinishReason.LENGTH, FinishReason.FAILED]


def test_cancelled_requests_are_aborted(engine: Counting, thread: AsyncEngine) -> None:
    engine.gate.clear()
    pending = thread.submit([request(0, 99), request(1, 99)])
    thread.abort(pending)
    engine.gate.set()
    assert {generation.finish_reason for generation in finished(pending)} == {FinishReason.ABORT}
    assert thread.stats().finish_reasons == {"abort": 2}
    assert not engine.running


def test_partial_responses_are_streamed() -> None:
    engine = StreamingCounting()
    thread = AsyncEngine(engine)
    engine.gate.clear()
    updated = threading.Event()
    pending = thread.submit([request(0, 5)], streaming=True, notify=updated.set)
    lengths = set[int]()
    engine.gate.set()
    while not pending.done:
        assert updated.wait(5)
        updated.clear()
        tokens, logprobs, _ = pending.partial_response(0)
        assert tokens == tuple(range(1, len(tokens) + 1))
        assert len(logprobs) == len(tokens)
        lengths.add(len(tokens))
    assert pending.partial_response(0)[0] == (1, 2, 3, 4, 5)
    assert max(lengths) == 5
    thread.close()


def test_a_dead_engine_fails_waiting_and_later_callers(engine: Counting, thread: AsyncEngine) -> None:
    engine.gate.clear()
    submitted = [thread.submit([request(0)]), thread.submit([request(1)])]
    engine.fault = EngineError("out of memory")
    engine.gate.set()
    for pending in submitted:
        with pytest.raises(EngineDeadError, match="out of memory"):
            responses(pending)
    with pytest.raises(EngineDeadError, match="out of memory"):
        responses(thread.submit([request(2)]))
    with pytest.raises(EngineDeadError):
        thread.call(lambda _: None)
    assert "out of memory" in str(thread.error)


def test_calls_run_in_the_engine_thread_between_steps(engine: Counting, thread: AsyncEngine) -> None:
    def renew(own: Counting) -> int:
        own.weight_version = 4
        return threading.get_ident()

    assert {thread.call(renew)} == engine.threads | {thread._thread.ident}
    assert thread.stats().weight_version == 4

    def broken(_: object) -> None:
        raise EngineError("no such weight")

    with pytest.raises(EngineError, match="no such weight"):
        thread.call(broken)
    assert responses(thread.submit([request(0)])) == [(1, 2, 3)], "the engine continues"


def test_requests_of_one_client_do_not_delay_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, order = Counting(), list[int]()
    add = engine.add_request
    monkeypatch.setattr(engine, "add_request", lambda request: (order.append(request.prompt[0]), add(request)))
    thread = AsyncEngine(engine, max_running=2)
    engine.gate.clear()
    greedy = [thread.submit([request(n, 2)], client="a") for n in range(0, 60, 10)]
    honest = thread.submit([request(90, 2)], client="b")
    engine.gate.set()
    assert responses(honest) == [(91, 92)]
    assert [responses(pending) for pending in greedy] == [[(n + 1, n + 2)] for n in range(0, 60, 10)]
    assert order.index(90) <= 3, "in its turn, behind at most two that ran and one that waited"
    assert max(engine.together) == 2
    thread.close()


def test_a_slot_is_reserved_for_clients_without_running_requests() -> None:
    queue = RequestQueue(max_running=8)
    for number in range(20):
        queue.push("a", replace(request(0), id=number))
    assert [each.id for each in queue.admit()] == list(range(7))
    queue.push("b", replace(request(0), id=20))
    queue.push("b", replace(request(0), id=21))
    assert [each.id for each in queue.admit()] == [20]
    queue.release(3)
    assert not list(queue.admit()), "the reserved slot is in use, so the free one takes its place"
    queue.release(4)
    assert [each.id for each in queue.admit()] == [7]
    assert sorted(queue.remove({8, 9, 21, 3})) == [8, 9, 21]


def test_keys_take_turns_within_the_turns_of_their_address() -> None:
    """A greedy key delays neither another key of its address nor another address, however many keys an address has."""
    queue = RequestQueue(max_running=1)
    clients = [*["a"] * 3, *[client_name("a", "greedy")] * 3, client_name("a", "other"), *["b"] * 4]
    for number, client in enumerate(clients):
        queue.push(client, replace(request(0), id=number))
    order = []
    while admitted := next(queue.admit(), None):
        order.append(admitted.id)
        queue.release(admitted.id)
    assert order == [0, 7, 3, 8, 6, 9, 1, 10, 4, 2, 5]


def test_a_reserved_slot_is_for_an_address_and_not_for_another_key() -> None:
    queue = RequestQueue(max_running=8)
    for number in range(8):
        queue.push(client_name("a", "x"), replace(request(0), id=number))
    assert len(list(queue.admit())) == 7
    queue.push(client_name("a", "y"), replace(request(0), id=8))
    queue.push(client_name("b", "x"), replace(request(0), id=9))
    assert [each.id for each in queue.admit()] == [9]


def test_requests_that_wait_are_aborted(engine: Counting) -> None:
    thread = AsyncEngine(engine, max_running=1)
    engine.gate.clear()
    first, second = thread.submit([request(0, 4)]), thread.submit([request(1, 4)])
    thread.abort(second)
    engine.gate.set()
    assert responses(first) == [(1, 2, 3, 4)]
    assert second.generations == [Generation(1, (), (), FinishReason.ABORT, 3)]
    thread.close()


def test_close_aborts_running_requests(engine: Counting) -> None:
    thread = AsyncEngine(engine)
    engine.gate.clear()
    pending = thread.submit([request(0, 99)])
    while not engine.running:
        time.sleep(0.001)
    closing = threading.Thread(target=thread.close)
    closing.start()
    engine.gate.set()
    closing.join(5)
    assert engine.closed
    assert [generation.finish_reason for generation in pending.generations if generation] == [FinishReason.ABORT]
    assert thread.error is None, "nothing went wrong"
    with pytest.raises(EngineDeadError, match="closed"):
        responses(thread.submit([request(1)]))
