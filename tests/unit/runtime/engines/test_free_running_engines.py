"""If these fail, engines wait for one another in overlapped rollouts, or requests are lost while weights are loaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from concurrent_engines import ThreadedEngine

from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.engines.weight_source import TensorWeights
from quintet.runtime.engines.free_running_engines import FreeRunningEngines

WEIGHTS = TensorWeights([("w", torch.tensor(7.0))])


class Engines:
    """Free-running engines, with all that were built by number."""

    def __init__(self, seconds: list[float]) -> None:
        self.built: dict[int, list[ThreadedEngine]] = {number: [] for number in range(len(seconds))}
        self.seconds = seconds
        self.group = FreeRunningEngines([RestartingEngine(self._builder(n), None) for n in self.built])

    def _builder(self, number: int) -> Callable[[], ThreadedEngine]:
        def build() -> ThreadedEngine:
            self.built[number].append(ThreadedEngine(number, self.seconds[number]))
            return self.built[number][-1]

        return build

    def __getitem__(self, number: int) -> ThreadedEngine:
        return self.built[number][-1]

    def add(self, *numbers: int) -> None:
        for number in numbers:
            self.group.add_request(Request(number, (number,), 4, seed=number))

    def drain(self) -> dict[int, Generation]:
        generations, deadline = {}, time.monotonic() + 20
        while self.group.busy and time.monotonic() < deadline:
            generations |= {each.id: each for each in self.group.step()}
        return generations


@pytest.fixture
def engines() -> Iterator[Engines]:
    engines = Engines([0.0, 0.0, 0.0])
    yield engines
    engines.group.close()


def test_fast_engines_do_not_wait_for_a_slow_one() -> None:
    """The fast engine answers ten turns of an episode, one after the other, while the slow one takes a step."""
    engines = Engines([1.0, 0.0])
    engines.add(0, 1)
    order = []
    for turn in range(10):
        (generation,) = engines.group.step()
        order.append(generation.id)
        engines.group.add_request(Request(100 + turn, (1,), 4, seed=0))
    assert order == [1, *range(100, 109)]
    assert engines.drain()[0].tokens == (0, 0)
    engines.group.close()


def test_an_engine_generates_while_others_load_weights() -> None:
    engines = Engines([0.02, 0.02])
    engines[1].load_seconds = 0.5
    engines.add(0, 1)
    engines.group.step()
    sync = threading.Thread(target=engines.group.load_weights, args=(3, WEIGHTS))
    sync.start()
    steps_of_first, number = 0, 10
    while sync.is_alive():
        engines.add(number, number + 1)
        number += 2
        steps_of_first += sum(each.tokens[0] == 0 for each in engines.group.step())
    assert steps_of_first > 5, "engine 0 waited for engine 1"
    engines.drain()
    assert [engines[number].loaded for number in (0, 1)] == [[(3, {"w": 7.0})]] * 2


def test_all_requests_are_answered_once_while_weights_are_loaded_again_and_again(engines: Engines) -> None:
    """A stress test of the handover of engines between two threads."""
    answers: list[int] = []
    stop = threading.Event()

    def sync() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            engines.group.load_weights(version, WEIGHTS)

    thread = threading.Thread(target=sync)
    thread.start()
    try:
        for first in range(0, 600, 6):
            engines.add(*range(first, first + 6))
            answers += [each.id for each in engines.group.step()]
    finally:
        stop.set()
        thread.join()
    answers += engines.drain()
    assert sorted(answers) == list(range(600))


def test_requests_of_a_dead_engine_go_to_others_which_do_not_wait_for_its_replacement(engines: Engines) -> None:
    engines.add(*range(6))
    engines[1].dies = True
    generations = engines.drain()
    assert sorted(generations) == list(range(6))
    assert {generation.finish_reason for generation in generations.values()} == {FinishReason.STOP}
    assert {generation.tokens[0] for generation in generations.values()} == {0, 2}
    assert [generations[number].tokens[1] for number in range(6)] == list(range(6)), "another seed"
    assert len(engines.built[1]) == 1
    engines.add(*range(10, 16))
    assert {each.tokens[0] for each in engines.drain().values()} == {0, 2}
    assert engines.group.pop_metrics() == {"engine/restarts": 0, "engine/requests_reassigned": 2}


@pytest.mark.parametrize("is_sync", [False, True], ids=["load_missing_weights", "load_weights"])
def test_a_dead_engine_is_rebuilt_with_the_next_weights(engines: Engines, is_sync: bool) -> None:
    engines.group.load_weights(4, WEIGHTS)
    engines.add(*range(3))
    engines[1].dies = True
    engines.drain()
    if is_sync:
        engines.group.load_weights(5, WEIGHTS)
    else:
        engines.group.load_missing_weights()
    engines.drain()
    assert engines[1].loaded == [(4 + is_sync, {"w": 7.0})]
    assert len(engines[0].loaded) == 1 + is_sync
    engines.add(*range(10, 13))
    assert {each.tokens[0] for each in engines.drain().values()} == {0, 1, 2}
    assert engines.group.pop_metrics()["engine/restarts"] == 1


def test_requests_wait_if_every_engine_is_dead() -> None:
    engines = Engines([0.0])
    engines.group.load_weights(0, WEIGHTS)
    engines.drain()
    engines[0].dies = True
    engines.add(0, 1)
    assert engines.group.step() == []
    assert engines.group.busy
    engines.group.load_missing_weights()
    assert sorted(engines.drain()) == [0, 1]
    engines.group.close()


def test_aborted_requests_do_not_come_back(engines: Engines) -> None:
    """Aborted before they were sent, during their engine's step, and lost by it."""
    engines.add(0, 1, 2)
    assert [each.id for each in engines.group.abort([0])] == [0]
    engines[1].seconds = engines[2].seconds = 0.2
    engines.add(3)
    while 3 not in [each.id for each in engines.group.step()]:
        pass
    engines[1].dies = True
    assert engines.group.abort([1, 2]) == []
    assert set(engines.drain()) <= {2}, "its step may have ended before the abort"
    assert engines.group.pop_metrics()["engine/requests_reassigned"] == 0


def test_a_prompt_that_is_too_long_is_refused_at_once(engines: Engines) -> None:
    with pytest.raises(ValueError, match="100 tokens"):
        engines.group.add_request(Request(1, (1,) * 100, 4, seed=0))
    assert not engines.group.busy


def test_the_prefix_cache_is_reset_after_the_last_step(engines: Engines) -> None:
    """Aborted requests may still be running."""
    engines[0].seconds = 0.2
    engines.add(0, 1)
    engines.group.step()
    engines.group.abort([0])
    engines.group.reset_prefix_cache()
    engines.drain()
    assert [engines[number].prefix_resets for number in range(3)] == [1, 1, 1]
