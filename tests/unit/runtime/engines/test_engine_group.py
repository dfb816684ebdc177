"""If these fail, several engines serve requests twice, lose them, or work with different weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest
import torch

from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.engines.weight_source import TensorWeights, WeightSource
from quintet.runtime.engines.engine_group import RoutedEngines
from quintet.tracking.metrics import describe


class ScriptedEngine:
    """Finishes all of its requests in each step; the token that it samples is its own number."""

    def __init__(self, number: int, max_model_len: int = 100) -> None:
        self.number, self.max_model_len = number, max_model_len
        self.running: list[Request] = []
        self.weight_version = 0
        self.loaded: dict[str, float] = {}
        self.dies = False
        self.killed_by: int | None = None
        self.reason = FinishReason.STOP

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def add_request(self, request: Request) -> None:
        self.running.append(request)

    def step(self) -> list[Generation]:
        self._die()
        if self.killed_by in [request.id for request in self.running]:
            self.running = []
            raise EngineError(f"killed by request {self.killed_by}")
        return self._finish(self.running, self.reason)

    def _die(self) -> None:
        if self.dies:
            self.dies, self.running = False, []
            raise EngineError("device lost")

    def abort(self, ids: Collection[int]) -> list[Generation]:
        return self._finish([request for request in self.running if request.id in ids], FinishReason.ABORT)

    def _finish(self, requests: list[Request], reason: FinishReason) -> list[Generation]:
        self.running = [request for request in self.running if request not in requests]
        return [Generation(each.id, (self.number,), (0.0,), reason, self.weight_version) for each in requests]

    def load_weights(self, version: int, weights: WeightSource) -> None:
        self._die()
        self.weight_version = version
        self.loaded = {name: float(tensor) for name, tensor in weights.tensors()}

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def engines() -> list[ScriptedEngine]:
    return [ScriptedEngine(number, max_model_len=100 - number) for number in range(3)]


@pytest.fixture
def group(engines: list[ScriptedEngine]) -> RoutedEngines:
    weights = TensorWeights([("w", torch.tensor(7.0))])
    return RoutedEngines([RestartingEngine(lambda engine=engine: engine, weights) for engine in engines])


def request(number: int, *, keep_kv_cache: bool = False) -> Request:
    return Request(id=number, prompt=(1, number), max_tokens=4, seed=number, keep_kv_cache=keep_kv_cache)


def test_samples_of_a_prompt_share_an_engine_as_long_as_others_have_as_many_requests(
    group: RoutedEngines, engines: list[ScriptedEngine]
) -> None:
    """Fifteen groups of eight; at the beginning, there are too few requests to keep a group together."""
    for number in range(120):
        group.add_request(Request(number, prompt=(number // 8,), max_tokens=4, seed=number))
    caches = [{request.prompt for request in engine.running} for engine in engines]
    assert sum(map(len, caches)) <= 25, "45 if every engine had samples of every group"
    counts = sorted(len(engine.running) for engine in engines)
    assert sum(counts) == 120
    assert counts[-1] <= 1.5 * counts[0] + 1


def sampled_by(generations: list[Generation]) -> dict[int, int]:
    return {generation.id: generation.tokens[0] for generation in generations}


def test_every_engine_gets_the_same_share_of_requests(group: RoutedEngines, engines: list[ScriptedEngine]) -> None:
    for number in range(7):
        group.add_request(request(number))
    assert sorted(len(engine.running) for engine in engines) == [2, 2, 3]
    assert group.busy
    generations = group.step()
    assert sorted(generation.id for generation in generations) == list(range(7))
    assert not group.busy


def test_the_next_requests_go_to_engines_whose_requests_ended(
    group: RoutedEngines, engines: list[ScriptedEngine]
) -> None:
    for number in range(3):
        group.add_request(request(number))
    group.abort([1])
    group.add_request(request(3))
    assert [[each.id for each in engine.running] for engine in engines] == [[0], [3], [2]]


def test_the_turns_of_an_episode_stay_where_their_kv_cache_is(group: RoutedEngines) -> None:
    for number in range(3):
        group.add_request(request(number, keep_kv_cache=True))
    first = sampled_by(group.step())
    for number in (2, 0, 1):
        group.add_request(request(number))
    assert sampled_by(group.step()) == first
    # the episodes are over: their ids are free, and go to whichever engine has the fewest requests
    for number in (2, 0, 1):
        group.add_request(Request(number, prompt=(9, number), max_tokens=4, seed=number))
    assert sampled_by(group.step()) == {2: 0, 0: 1, 1: 2}


def test_requests_of_a_dead_engine_are_submitted_again(group: RoutedEngines, engines: list[ScriptedEngine]) -> None:
    for number in range(3):
        group.add_request(request(number, keep_kv_cache=number == 1))
    engines[1].dies = True
    generations = group.step()
    assert sampled_by(generations) == {0: 0, 2: 2}
    assert group.busy
    (again,) = group.step()
    assert (again.id, again.finish_reason) == (1, FinishReason.STOP)
    assert not group.busy
    assert engines[1].loaded == {"w": 7.0}
    assert group.pop_metrics() == {"engine/restarts": 1, "engine/requests_reassigned": 1}
    assert group.pop_metrics() == {"engine/restarts": 0, "engine/requests_reassigned": 0}
    describe("engine/requests_reassigned")


def test_a_request_that_kills_every_engine_fails_with_the_cause(
    group: RoutedEngines, engines: list[ScriptedEngine]
) -> None:
    for engine in engines:
        engine.killed_by = 1
    for number in range(6):
        group.add_request(request(number))
    generations = []
    while group.busy:
        generations += group.step()
    reasons = {generation.id: generation.finish_reason for generation in generations}
    assert reasons == {**dict.fromkeys(range(6), FinishReason.STOP), 1: FinishReason.FAILED}
    failure = next(generation.failure for generation in generations if generation.id == 1)
    assert failure is not None
    assert failure.message.startswith("killed by request 1")
    assert group.pop_metrics()["engine/restarts"] == 3


def test_a_request_that_fails_by_itself_is_not_submitted_again(
    group: RoutedEngines, engines: list[ScriptedEngine]
) -> None:
    engines[0].reason = FinishReason.FAILED
    group.add_request(request(0))
    (failed,) = group.step()
    assert failed.finish_reason is FinishReason.FAILED
    assert not group.busy
    assert group.pop_metrics() == {"engine/restarts": 0, "engine/requests_reassigned": 0}


def test_a_request_that_a_revived_engine_refuses_fails_alone_and_the_others_that_waited_are_answered() -> None:
    class Picky(ScriptedEngine):
        def add_request(self, request: Request) -> None:
            if request.id == 1:
                raise ValueError("an invalid grammar")
            super().add_request(request)

    engine, is_available = Picky(0), [False]
    engine.dies = True
    weights = TensorWeights([("w", torch.tensor(7.0))])
    group = RoutedEngines([RestartingEngine(lambda: engine, weights, is_available=lambda: is_available[0])])
    group.load_weights(1, weights)
    with pytest.raises(ValueError, match="the prompt has 100 tokens, the context 100"):
        group.add_request(Request(9, (1,) * 100, 4, seed=0))
    for number in range(3):
        group.add_request(request(number))
    assert group.step() == []
    is_available[0] = True
    generations = {generation.id: generation for generation in group.step()}
    assert {number: each.finish_reason for number, each in generations.items()} == {0: "stop", 1: "failed", 2: "stop"}
    assert generations[1].failure is not None
    assert "an invalid grammar" in generations[1].failure.message
    assert not group.busy


def test_an_aborted_request_does_not_come_back_from_a_dead_engine(
    group: RoutedEngines, engines: list[ScriptedEngine]
) -> None:
    group.add_request(request(0))
    engines[0].dies = True
    assert group.step() == []
    assert [generation.finish_reason for generation in group.abort([0])] == [FinishReason.ABORT]
    assert not group.busy
    assert group.step() == []


def test_engines_that_die_while_they_load_weights_keep_their_requests(
    group: RoutedEngines, engines: list[ScriptedEngine]
) -> None:
    group.add_request(request(0))
    engines[0].dies = True
    group.load_weights(1, TensorWeights([("w", torch.tensor(1.0))]))
    assert [generation.finish_reason for generation in group.step()] == [FinishReason.STOP]


class GeneratedWeights(TensorWeights):
    """Weights that are gathered for each load."""

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        yield "a", torch.tensor(1.0)
        yield "b", torch.tensor(2.0)


def test_all_engines_get_all_new_weights(group: RoutedEngines, engines: list[ScriptedEngine]) -> None:
    group.load_weights(5, GeneratedWeights(()))
    assert group.weight_version == 5
    assert [(engine.weight_version, engine.loaded) for engine in engines] == [(5, {"a": 1.0, "b": 2.0})] * 3


def test_prompts_must_fit_every_engine(group: RoutedEngines) -> None:
    assert group.max_model_len == 98
