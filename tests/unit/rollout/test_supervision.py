"""If these fail, an engine that dies takes the run with it, or goes on with weights of before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from quintet.config.native import RolloutConfig
from quintet.errors import ConfigError, MachineError
from quintet.policies.causal_lm import load_tokenizer
from quintet.records import Generation, Observation, Outcome, Request, Step, StopReason
from quintet.rollout.agent_loop import AgentLoop, Game, Sampling
from quintet.rollout.dialogue import ChatFormat
from quintet.rollout.engine import EngineFault
from quintet.rollout.supervision import Supervised
from quintet.tracking.metrics import describe

Weights = Iterable[tuple[str, torch.Tensor]]


class Mortal:
    """Finishes a request each step; dies of what it is told to, once each."""

    context = 100

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

    def submit(self, request: Request) -> None:
        if len(request.prompt) > 50:
            raise ValueError("too long")
        self.waiting.append(request)
        self.die("submit")

    def step(self) -> list[Generation]:
        self.die("step")
        request = self.waiting.pop(0)
        return [Generation(request.id, (4, 2), (-0.5, -0.5), StopReason.STOP, self.weight_version)]

    def abort(self, ids: Iterable[int]) -> list[Generation]:
        self.die("abort")
        gone = [request for request in self.waiting if request.id in ids]
        self.waiting = [request for request in self.waiting if request not in gone]
        return [Generation(one.id, (4,), (-0.5,), StopReason.ABORT, self.weight_version) for one in gone]

    def load_weights(self, version: int, weights: Weights) -> None:
        names = ",".join(name for name, _ in weights)
        self.log.append(f"load {version} {names}")
        self.die("load")
        self.weight_version = version

    def forget(self) -> None:
        self.die("forget")

    def sleep(self) -> None:
        self.die("sleep")

    def wake(self) -> None:
        self.die("wake")

    def close(self) -> None:
        self.log.append("close")
        self.die("close")


def supervised(deaths: dict[str, list[BaseException | None]], most: int = 3) -> tuple[Supervised, list[str]]:
    log: list[str] = []
    engine = Supervised(lambda: Mortal(deaths, log), lambda: [("present", torch.zeros(1))], most)
    return engine, log


def ask(engine: Supervised, *numbers: int) -> None:
    for number in numbers:
        engine.submit(Request(number, (1, 2), 5, seed=number))


def drain(engine: Supervised) -> list[Generation]:
    found: list[Generation] = []
    while engine.busy:
        found += engine.step()
    return found


@pytest.mark.parametrize(
    "death",
    [EngineFault("its process died of SIGKILL"), torch.OutOfMemoryError("no room"), MemoryError(), RuntimeError("?")],
    ids=lambda death: type(death).__name__,
)
def test_what_a_dead_engine_was_writing_comes_back_failed_and_another_is_opened(death: Exception) -> None:
    engine, log = supervised({"step": [None, death]})
    engine.load_weights(7, [("old", torch.zeros(1))])
    ask(engine, 1, 2, 3)
    found = drain(engine)
    assert [(one.id, one.stop) for one in found] == [
        (1, StopReason.STOP),
        (2, StopReason.FAILED),
        (3, StopReason.FAILED),
    ]
    assert found[1].failure is not None
    assert (found[1].failure.where, found[1].failure.kind) == ("engine", type(death).__name__)
    assert str(death) in found[1].failure.message
    assert found[1].weight_version == 7
    assert log == ["open", "load 7 old", "close", "open", "load 7 present"]
    ask(engine, 4)
    (after,) = drain(engine)
    assert (after.id, after.stop, after.weight_version) == (4, StopReason.STOP, 7)
    assert (engine.measures(), engine.measures()) == ({"engine/restarts": 1}, {"engine/restarts": 0})
    assert engine.context == 100
    describe("engine/restarts")


def test_an_engine_that_keeps_dying_ends_the_run_and_says_of_what() -> None:
    engine, log = supervised({"step": [EngineFault("first"), *[EngineFault("again")] * 3]})
    for number in range(3):
        ask(engine, number)
        drain(engine)
    ask(engine, 3)
    with pytest.raises(MachineError, match=r"died 4 times in a row \(last, EngineFault: again"):
        drain(engine)
    assert log.count("open") == 4


def test_a_finished_request_begins_the_count_anew() -> None:
    deaths: list[BaseException | None] = [EngineFault("again"), EngineFault("again"), EngineFault("again"), None] * 3
    engine, _ = supervised({"step": deaths})
    stops = []
    for number in range(12):
        ask(engine, number)
        stops += [one.stop for one in drain(engine)]
    assert stops == [StopReason.FAILED, StopReason.FAILED, StopReason.FAILED, StopReason.STOP] * 3
    assert engine.restarts == 9


@pytest.mark.parametrize("where", ["open", "load"])
def test_an_engine_that_cannot_be_opened_again_ends_the_run(where: str) -> None:
    engine, _ = supervised({"step": [EngineFault("first")], where: [None] * (where == "open")})
    broken: list[BaseException | None] = [EngineFault("no port")] * 9
    engine._engine.deaths[where] = broken  # type: ignore[attr-defined]
    ask(engine, 1)
    with pytest.raises(MachineError, match="no port"):
        drain(engine)


@pytest.mark.parametrize("where", ["submit", "abort", "load", "forget", "sleep", "wake"])
def test_an_engine_may_die_at_any_time(where: str) -> None:
    engine, log = supervised({where: [None] * (2 if where == "submit" else 0) + [EngineFault("gone")]})
    ask(engine, 1, 2)
    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: ask(engine, 3),
        "abort": lambda: engine.abort([2]),
        "load": lambda: engine.load_weights(5, []),
    }
    calls.get(where, getattr(engine, where, lambda: None))()
    expected = {"submit": [1, 2, 3], "abort": [1]}.get(where, [1, 2])
    found = drain(engine)
    assert [one.id for one in found] == expected
    assert {one.stop for one in found} == {StopReason.FAILED}
    assert log.count("open") == 2
    assert engine.weight_version == (5 if where == "load" else 0)
    ask(engine, 4)
    assert [one.stop for one in drain(engine)] == [StopReason.STOP]


def test_what_was_aborted_does_not_come_back() -> None:
    engine, _ = supervised({"submit": [None, EngineFault("gone")]})
    ask(engine, 1, 2)
    assert engine.abort([1]) == []
    assert [one.id for one in drain(engine)] == [2]


def test_a_prompt_that_is_too_long_is_no_death() -> None:
    engine, log = supervised({"step": [EngineFault("gone")]})
    with pytest.raises(ValueError, match="too long"):
        engine.submit(Request(1, (1,) * 51, 5, seed=1))
    ask(engine, 2)
    assert [one.id for one in drain(engine)] == [2]
    assert log.count("open") == 2


def test_what_the_user_can_mend_is_not_tried_again() -> None:
    engine, log = supervised({"step": [ConfigError("no such option")]})
    ask(engine, 1)
    with pytest.raises(ConfigError):
        drain(engine)
    assert log == ["open"]


def test_one_that_does_not_close_either_is_let_go() -> None:
    engine, log = supervised({"step": [EngineFault("gone")], "close": [EngineFault("already gone")]})
    ask(engine, 1)
    assert [one.stop for one in drain(engine)] == [StopReason.FAILED]
    assert log == ["open", "close", "open", "load 0 present"]


def test_the_dead_engine_s_memory_is_free_before_the_next_asks_for_its_own() -> None:
    class Cache:
        pass

    held: list[weakref.ref[Cache]] = []
    alive: list[bool] = []

    class Greedy(Mortal):
        def step(self) -> list[Generation]:
            cache = Cache()
            held.append(weakref.ref(cache))
            raise torch.OutOfMemoryError("no room")

    def opened() -> Mortal:
        alive.extend(one() is not None for one in held)
        return Greedy({}, [])

    engine = Supervised(opened, list)
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


def test_a_round_goes_on_after_its_engine_has_died(policy_directory: Path) -> None:
    engine, _ = supervised({"step": [None, EngineFault("gone")]})
    chat = ChatFormat(load_tokenizer(policy_directory))
    loop = AgentLoop(engine, chat, Corridor, RolloutConfig(max_turns=1), "corridor")  # type: ignore[arg-type]
    played = list(loop.play([Game(number, number, 0) for number in range(3)], Sampling(0.0, 0, 1.0, 0)))
    assert sorted(game.outcome for game in played) == [Outcome.FAILED, Outcome.FAILED, Outcome.MAX_TURNS]
    again = list(loop.play([Game(number, number, 0) for number in range(3)], Sampling(0.0, 0, 1.0, 0)))
    assert [game.outcome for game in again] == [Outcome.MAX_TURNS] * 3
