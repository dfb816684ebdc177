"""If these fail, a dying engine ends the run, or its replacement has old weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from quintet.config.native.rollout import RolloutConfig
from quintet.envs.vector_env import LocalVectorEnv
from quintet.errors import ConfigError, MachineError
from quintet.policies.model_loading import load_tokenizer
from quintet.records import FinishReason, Generation, Observation, Outcome, Request, Step
from quintet.rollout.agent_loop import AgentLoop
from quintet.rollout.chat.chat_format import ChatFormat
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.engines.weight_source import TensorWeights, WeightSource
from quintet.rollout.episode import Episode
from quintet.rollout.episode_limits import EpisodeRules
from quintet.rollout.sampling_params import SamplingParams
from quintet.tracking.metrics import describe

Weights = Iterable[tuple[str, torch.Tensor]]


class Mortal:
    """Finishes a request per step; raises each scripted error once."""

    max_model_len = 100

    def __init__(self, deaths: dict[str, list[BaseException | None]], log: list[str]) -> None:
        self.deaths, self.log = deaths, log
        self.waiting: list[Request] = []
        self.weight_version = 0
        log.append("open")
        self.die("open")

    def die(self, where: str) -> None:
        death = self.deaths[where].pop(0) if self.deaths.get(where) else None
        if death is not None:
            raise death

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add_request(self, request: Request) -> None:
        if len(request.prompt) > 50:
            raise ValueError("too long")
        self.waiting.append(request)
        self.die("add_request")

    def step(self) -> list[Generation]:
        self.die("step")
        request = self.waiting.pop(0)
        return [Generation(request.id, (4, 2), (-0.5, -0.5), FinishReason.STOP, self.weight_version)]

    def abort(self, ids: Iterable[int]) -> list[Generation]:
        self.die("abort")
        gone = [request for request in self.waiting if request.id in ids]
        self.waiting = [request for request in self.waiting if request not in gone]
        return [Generation(one.id, (4,), (-0.5,), FinishReason.ABORT, self.weight_version) for one in gone]

    def load_weights(self, version: int, weights: WeightSource) -> None:
        names = ",".join(name for name, _ in weights.tensors())
        self.log.append(f"load {version} {names}")
        self.die("load")
        self.weight_version = version

    def reset_prefix_cache(self) -> None:
        self.die("reset_prefix_cache")

    def sleep(self) -> None:
        self.die("sleep")

    def wake_up(self) -> None:
        self.die("wake_up")

    def close(self) -> None:
        self.log.append("close")
        self.die("close")


def supervised(deaths: dict[str, list[BaseException | None]], most: int = 3) -> tuple[RestartingEngine, list[str]]:
    log: list[str] = []
    engine = RestartingEngine(lambda: Mortal(deaths, log), TensorWeights([("present", torch.zeros(1))]), most)
    return engine, log


def ask(engine: RestartingEngine, *numbers: int) -> None:
    for number in numbers:
        engine.add_request(Request(number, (1, 2), 5, seed=number))


def drain(engine: RestartingEngine) -> list[Generation]:
    results: list[Generation] = []
    while engine.busy:
        results += engine.step()
    return results


@pytest.mark.parametrize(
    "death",
    [EngineError("its process died of SIGKILL"), torch.OutOfMemoryError("no room"), MemoryError(), RuntimeError("?")],
    ids=lambda death: type(death).__name__,
)
def test_a_dead_engine_is_rebuilt_and_its_requests_fail(death: Exception) -> None:
    engine, log = supervised({"step": [None, death]})
    engine.load_weights(7, TensorWeights([("old", torch.zeros(1))]))
    ask(engine, 1, 2, 3)
    actual = drain(engine)
    assert [(one.id, one.finish_reason) for one in actual] == [
        (1, FinishReason.STOP),
        (2, FinishReason.FAILED),
        (3, FinishReason.FAILED),
    ]
    assert actual[1].failure is not None
    assert (actual[1].failure.where, actual[1].failure.error_type) == ("engine", type(death).__name__)
    assert str(death) in actual[1].failure.message
    assert actual[1].weight_version == 7
    assert log == ["open", "load 7 old", "close", "open", "load 7 present"]
    ask(engine, 4)
    (after,) = drain(engine)
    assert (after.id, after.finish_reason, after.weight_version) == (4, FinishReason.STOP, 7)
    assert (engine.pop_metrics(), engine.pop_metrics()) == ({"engine/restarts": 1}, {"engine/restarts": 0})
    assert engine.max_model_len == 100
    describe("engine/restarts")


def test_an_engine_that_keeps_dying_ends_the_run() -> None:
    engine, log = supervised({"step": [EngineError("first"), *[EngineError("again")] * 3]})
    for number in range(3):
        ask(engine, number)
        drain(engine)
    ask(engine, 3)
    with pytest.raises(MachineError, match=r"died 4 times in a row \(last, EngineError: again"):
        drain(engine)
    assert log.count("open") == 4


def test_a_finished_request_resets_the_restart_count() -> None:
    deaths: list[BaseException | None] = [EngineError("again"), EngineError("again"), EngineError("again"), None] * 3
    engine, _ = supervised({"step": deaths})
    stops = []
    for number in range(12):
        ask(engine, number)
        stops += [one.finish_reason for one in drain(engine)]
    assert stops == [FinishReason.FAILED, FinishReason.FAILED, FinishReason.FAILED, FinishReason.STOP] * 3
    assert engine.restarts == 9


@pytest.mark.parametrize("where", ["open", "load"])
def test_an_engine_that_cannot_be_rebuilt_ends_the_run(where: str) -> None:
    engine, _ = supervised({"step": [EngineError("first")], where: [None] * (where == "open")})
    broken: list[BaseException | None] = [EngineError("no port")] * 9
    engine._engine.deaths[where] = broken  # type: ignore[attr-defined]
    ask(engine, 1)
    with pytest.raises(MachineError, match="no port"):
        drain(engine)


@pytest.mark.parametrize("where", ["add_request", "abort", "load", "reset_prefix_cache", "sleep", "wake_up"])
def test_an_engine_may_die_at_any_time(where: str) -> None:
    engine, log = supervised({where: [None] * (2 if where == "add_request" else 0) + [EngineError("gone")]})
    ask(engine, 1, 2)
    calls: dict[str, Callable[[], object]] = {
        "add_request": lambda: ask(engine, 3),
        "abort": lambda: engine.abort([2]),
        "load": lambda: engine.load_weights(5, TensorWeights([])),
    }
    calls.get(where, getattr(engine, where, lambda: None))()
    expected = {"add_request": [1, 2, 3], "abort": [1]}.get(where, [1, 2])
    actual = drain(engine)
    assert [one.id for one in actual] == expected
    assert {one.finish_reason for one in actual} == {FinishReason.FAILED}
    assert log.count("open") == 2
    assert engine.weight_version == (5 if where == "load" else 0)
    ask(engine, 4)
    assert [one.finish_reason for one in drain(engine)] == [FinishReason.STOP]


def test_aborted_requests_are_not_returned_as_failed() -> None:
    engine, _ = supervised({"add_request": [None, EngineError("gone")]})
    ask(engine, 1, 2)
    assert engine.abort([1]) == []
    assert [one.id for one in drain(engine)] == [2]


def test_a_prompt_that_is_too_long_does_not_restart_the_engine() -> None:
    engine, log = supervised({"step": [EngineError("gone")]})
    with pytest.raises(ValueError, match="too long"):
        engine.add_request(Request(1, (1,) * 51, 5, seed=1))
    ask(engine, 2)
    assert [one.id for one in drain(engine)] == [2]
    assert log.count("open") == 2


def test_config_errors_do_not_restart_the_engine() -> None:
    engine, log = supervised({"step": [ConfigError("no such option")]})
    ask(engine, 1)
    with pytest.raises(ConfigError):
        drain(engine)
    assert log == ["open"]


def test_a_dead_engine_that_fails_to_close_is_dropped() -> None:
    engine, log = supervised({"step": [EngineError("gone")], "close": [EngineError("already gone")]})
    ask(engine, 1)
    assert [one.finish_reason for one in drain(engine)] == [FinishReason.FAILED]
    assert log == ["open", "close", "open", "load 0 present"]


def test_a_dead_engine_frees_its_memory_before_the_next_one_starts() -> None:
    class Cache:
        pass

    held: list[weakref.ref[Cache]] = []
    alive: list[bool] = []

    class Greedy(Mortal):
        def step(self) -> list[Generation]:
            cache = Cache()
            held.append(weakref.ref(cache))
            raise torch.OutOfMemoryError("no room")

    def build_mortal() -> Mortal:
        alive.extend(one() is not None for one in held)
        return Greedy({}, [])

    engine = RestartingEngine(build_mortal, TensorWeights([]))
    ask(engine, 1)
    drain(engine)
    assert alive == [False]


class Corridor:
    actions = ("Go",)

    def instruction(self) -> str:
        return "Go."

    def reset(self, seed: int) -> Observation:
        return Observation(f" {seed}")

    def step(self, action: str) -> Step:
        raise AssertionError("what it writes can't be parsed")

    def close(self) -> None: ...


def test_rollouts_continue_after_an_engine_restart(policy_directory: Path) -> None:
    engine, _ = supervised({"step": [None, EngineError("gone")]})
    chat = ChatFormat(load_tokenizer(policy_directory))
    loop = AgentLoop(engine, chat, LocalVectorEnv(Corridor), [EpisodeRules("corridor", RolloutConfig(max_turns=1))])  # type: ignore[arg-type]
    played = list(
        loop.collect_rollouts([Episode(number, number, 0) for number in range(3)], SamplingParams(0.0, 0, 1.0, 0))
    )
    assert sorted(episode.outcome for episode in played) == [Outcome.FAILED, Outcome.FAILED, Outcome.MAX_TURNS]
    again = list(
        loop.collect_rollouts([Episode(number, number, 0) for number in range(3)], SamplingParams(0.0, 0, 1.0, 0))
    )
    assert [episode.outcome for episode in again] == [Outcome.MAX_TURNS] * 3
