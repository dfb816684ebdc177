"""If these fail, clients that share a served engine wait for each other, get each other's words, or wait for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import pytest

from quintet.records import Failure, Generation, Request, StopReason
from quintet.rollout.engine import EngineFault
from quintet.rollout.served import EngineGone, EngineThread, Errand, finished


class Counting:
    """An engine whose answers count up from the prompt's first token, one token a step for all."""

    context = 100

    def __init__(self) -> None:
        self.weight_version = 3
        self.running: dict[int, tuple[Request, list[int]]] = {}
        self.together: list[int] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.closed = False

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def submit(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        if len(request.prompt) >= self.context:
            raise ValueError("too long")
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
                stop = StopReason.FAILED if failure else StopReason.LENGTH
                done.append(Generation(number, tuple(tokens), (-1.0,) * len(tokens), stop, 3, failure=failure))
                del self.running[number]
        return done

    def abort(self, ids: Collection[int]) -> list[Generation]:
        gone = [self.running.pop(number) for number in ids if number in self.running]
        return [Generation(r.id, tuple(t), (-1.0,) * len(t), StopReason.ABORT, 3) for r, t in gone]

    def close(self) -> None:
        self.closed = True


class Showing(Counting):
    def written(self, ids: Collection[int]) -> Mapping[int, tuple[Sequence[int], Sequence[float]]]:
        return {number: (self.running[number][1], [-1.0] * len(self.running[number][1])) for number in ids}


@pytest.fixture
def engine() -> Counting:
    return Counting()


@pytest.fixture
def thread(engine: Counting) -> Iterator[EngineThread]:
    made = EngineThread(engine)
    yield made
    engine.gate.set()
    made.close()
    assert engine.closed


def request(first: int, length: int = 3, seed: int = 0) -> Request:
    return Request(id=0, prompt=(first,), max_tokens=length, seed=seed)


def answers(errand: Errand) -> list[tuple[int, ...]]:
    done = finished(errand, lambda: False, 5)
    assert done is not None
    return [generation.tokens for generation in done]


def test_each_gets_the_answers_to_its_own_requests(thread: EngineThread) -> None:
    errands = [thread.begin([request(10 * n), request(10 * n + 5, 2)]) for n in range(5)]
    for n, errand in enumerate(errands):
        start = 10 * n
        assert answers(errand) == [(start + 1, start + 2, start + 3), (start + 6, start + 7)]
    load = thread.load()
    assert (load.open, load.requests, load.tokens, load.stops) == (0, 10, 25, {"length": 10})
    assert load.weight_version == 3


def test_what_several_hand_in_runs_side_by_side_in_one_thread(engine: Counting, thread: EngineThread) -> None:
    engine.gate.clear()
    first = thread.begin([request(0, 4)])
    while not engine.running:
        time.sleep(0.001)
    others = [thread.begin([request(n, 4)]) for n in (10, 20)]
    engine.gate.set()
    for errand in (first, *others):
        answers(errand)
    assert max(engine.together) == 3
    assert thread.load().most_together == 3
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_a_request_that_is_refused_costs_only_its_own_errand(engine: Counting, thread: EngineThread) -> None:
    good = thread.begin([request(0)])
    bad = thread.begin([request(1), Request(id=0, prompt=(1,) * 100, max_tokens=1, seed=0)])
    with pytest.raises(ValueError, match="too long"):
        answers(bad)
    assert answers(good) == [(1, 2, 3)]
    assert not engine.running


def test_a_request_that_fails_is_an_answer_like_others(thread: EngineThread) -> None:
    done = finished(thread.begin([request(0), request(5, seed=666)]), lambda: False, 5)
    assert done is not None
    assert [generation.stop for generation in done] == [StopReason.LENGTH, StopReason.FAILED]


def test_what_nobody_waits_for_any_more_can_be_dropped(engine: Counting, thread: EngineThread) -> None:
    engine.gate.clear()
    errand = thread.begin([request(0, 99), request(1, 99)])
    assert finished(errand, lambda: True, 0.01) is None
    thread.abort(errand)
    engine.gate.set()
    while not errand.done:
        errand.wait(1)
    assert {generation.stop for generation in errand.generations if generation} == {StopReason.ABORT}
    assert thread.load().stops == {"abort": 2}
    assert not engine.running


def test_what_is_being_written_can_be_watched() -> None:
    engine = Showing()
    thread = EngineThread(engine)
    engine.gate.clear()
    errand = thread.begin([request(0, 5)], watched=True)
    seen, lengths = 0, set[int]()
    engine.gate.set()
    while not errand.done:
        seen = errand.wait(5, seen)
        tokens, logprobs = errand.written(0)
        assert tokens == tuple(range(1, len(tokens) + 1))
        assert len(logprobs) == len(tokens)
        lengths.add(len(tokens))
    assert errand.written(0)[0] == (1, 2, 3, 4, 5)
    assert max(lengths) == 5
    thread.close()


def test_an_engine_that_dies_tells_all_who_wait_and_who_come(engine: Counting, thread: EngineThread) -> None:
    engine.gate.clear()
    errands = [thread.begin([request(0)]), thread.begin([request(1)])]
    engine.fault = EngineFault("out of memory")
    engine.gate.set()
    for errand in errands:
        with pytest.raises(EngineGone, match="out of memory"):
            answers(errand)
    with pytest.raises(EngineGone, match="out of memory"):
        answers(thread.begin([request(2)]))
    with pytest.raises(EngineGone):
        thread.run(lambda _: None)
    assert "out of memory" in str(thread.fault)


def test_work_with_the_engine_is_done_between_its_steps(engine: Counting, thread: EngineThread) -> None:
    def renew(own: Counting) -> int:
        own.weight_version = 4
        return threading.get_ident()

    assert {thread.run(renew)} == engine.threads | {thread._thread.ident}
    assert thread.load().weight_version == 4

    def broken(_: object) -> None:
        raise EngineFault("no such weight")

    with pytest.raises(EngineFault, match="no such weight"):
        thread.run(broken)
    assert answers(thread.begin([request(0)])) == [(1, 2, 3)], "it goes on"


def test_closing_ends_what_runs(engine: Counting) -> None:
    thread = EngineThread(engine)
    engine.gate.clear()
    errand = thread.begin([request(0, 99)])
    while not engine.running:
        time.sleep(0.001)
    closing = threading.Thread(target=thread.close)
    closing.start()
    engine.gate.set()
    closing.join(5)
    assert engine.closed
    assert [generation.stop for generation in errand.generations if generation] == [StopReason.ABORT]
    assert thread.fault is None, "nothing went wrong"
    with pytest.raises(EngineGone, match="closed"):
        answers(thread.begin([request(1)]))
