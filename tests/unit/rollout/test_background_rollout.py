"""If these fail, overlapped rollouts lose groups, train on stale ones, run ahead, hang, or hide errors."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import pytest
from test_async_rollout import SAMPLING, played

from quintet.config.native.experiment import Experiment
from quintet.records import Outcome, Trajectory
from quintet.rollout.background_rollout import BackgroundRollout, PausingEnvs
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import SamplingParams


class TimedLoop:
    """Episodes end after `steps` steps, by start state and sample; a step takes a few milliseconds."""

    def __init__(self, steps: dict[tuple[int, int], int] | None = None, seconds: float = 0.002) -> None:
        self.steps = steps or {}
        self.seconds = seconds
        self.running: list[tuple[Episode, int]] = []
        self.started: list[tuple[int, int]] = []
        self.num_steps = 0
        self.version = 0
        self.error: Exception | None = None
        self.threads: set[str] = set()
        self._in_use = threading.Lock()

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def start(self, episodes: Sequence[Episode], sampling: SamplingParams) -> None:
        with self._used():
            self.running += [(episode, self.steps.get((episode.seed, episode.sample), 1)) for episode in episodes]
            self.started += [(episode.seed, episode.sample) for episode in episodes]

    def step(self) -> list[Trajectory]:
        with self._used():
            if self.error is not None:
                raise self.error
            self.num_steps += 1
            self.threads.add(threading.current_thread().name)
            time.sleep(self.seconds)
            self.running = [(episode, left - 1) for episode, left in self.running]
            ended = [episode for episode, left in self.running if left <= 0]
            self.running = [(episode, left) for episode, left in self.running if left > 0]
            return [played(episode, Outcome.SUCCESS, self.version) for episode in ended]

    def abort(self, groups: Collection[int]) -> list[Trajectory]:
        with self._used():
            aborted = [episode for episode, _ in self.running if episode.group in groups]
            self.running = [(episode, left) for episode, left in self.running if episode.group not in groups]
            return [played(episode, Outcome.ABORTED, self.version) for episode in aborted]

    def collect_rollouts(self, episodes: Sequence[Episode], sampling: SamplingParams) -> Iterator[Trajectory]:
        with self._used():
            for episode in episodes:
                time.sleep(self.seconds)
                yield played(episode, Outcome.SUCCESS, self.version)

    def _used(self) -> Any:
        assert not self._in_use.locked(), "two threads use the loop"
        return self._in_use


class Counting:
    """Start states 0, 1, 2, …"""

    def __init__(self) -> None:
        self._next = count()
        self.drawn = 0

    def take(self, number: int) -> list[int]:
        self.drawn += number
        return [next(self._next) for _ in range(number)]

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}


class Rollouts:
    """Builds rollouts and closes them at the end."""

    def __init__(self) -> None:
        self.built: list[BackgroundRollout] = []

    def __call__(
        self, loop: TimedLoop, size: int = 0, missing: Any = lambda: None, **rollout: Any
    ) -> BackgroundRollout:
        config = Experiment.model_validate(
            {
                "training": {"groups_per_step": 2, "samples_per_group": 2},
                "rollout": {"async_ratio": 1.0, "partial": True, **rollout},
                "placement": {"rollout": {"channel": {"size": size}}},
            }
        )
        self.built.append(BackgroundRollout(loop, Counting(), config, missing))  # type: ignore[arg-type]
        return self.built[-1]


@pytest.fixture
def rollouts() -> Iterator[Rollouts]:
    rollouts = Rollouts()
    yield rollouts
    for rollout in rollouts.built:
        rollout.close()
        assert not rollout._thread.is_alive()


def wait_until_idle(loop: TimedLoop) -> None:
    """Wait until the thread has nothing to do."""
    before, deadline = -1, time.monotonic() + 10
    while before != loop.num_steps and time.monotonic() < deadline:
        before = loop.num_steps
        time.sleep(0.1)


def seeds(episodes: Sequence[Trajectory]) -> list[int]:
    return sorted({episode.seed for episode in episodes})


def test_the_next_step_is_generated_during_training(rollouts: Rollouts) -> None:
    """One step ahead with async_ratio=1, and no further."""
    loop = TimedLoop()
    rollout = rollouts(loop)
    first, metrics = rollout.take(1, SAMPLING)
    assert seeds(first) == [0, 1]
    assert [(episode.group, episode.sample) for episode in first] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert metrics["rollout/staleness/max"] == 0
    wait_until_idle(loop)
    assert not loop.busy
    assert sorted(set(loop.started)) == [(seed, sample) for seed in range(4) for sample in range(2)]
    assert loop.threads == {"rollout"}
    loop.seconds = 1.0  # step 2 needs no further step of the loop
    second, metrics = rollout.take(2, SAMPLING)
    assert seeds(second) == [2, 3]
    assert metrics["rollout/staleness/max"] == 1
    assert metrics["channel/rollout/groups/gets"] == 2
    assert metrics["channel/rollout/groups/get_seconds"] < 0.5


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("staleness", [None, 1])
def test_every_group_is_complete_and_trained_once(
    rollouts: Rollouts, partial: bool, size: int, staleness: int | None
) -> None:
    loop = TimedLoop({(seed, 1): 1 + seed * 7 % 11 for seed in range(200)}, seconds=0.0)
    rollout = rollouts(loop, size, partial=partial, max_staleness=staleness, async_ratio=1.5)
    trained: list[tuple[int, int]] = []
    for step in range(1, 41):
        episodes, metrics = rollout.take(step, SAMPLING)
        assert [episode.group for episode in episodes] == [0, 0, 1, 1]
        assert metrics["rollout/groups_in_flight"] <= 3
        assert staleness is None or metrics["rollout/staleness/max"] <= staleness
        trained += [(episode.seed, episode.sample) for episode in episodes]
    assert len(set(trained)) == len(trained) == 160
    assert max(seed for seed, _ in trained) < 83


def test_a_full_channel_stops_the_rollout(rollouts: Rollouts) -> None:
    """With room for one group, it has that group, and another one that waits for room."""
    loop = TimedLoop()
    rollout = rollouts(loop, size=1, async_ratio=20)
    rollout.take(1, SAMPLING)
    wait_until_idle(loop)
    steps = loop.num_steps
    assert len(rollout._channel) == 1
    _, metrics = rollout.take(2, SAMPLING)
    assert metrics["channel/rollout/groups/put_seconds"] > 0.05
    assert loop.num_steps - steps <= 2


def test_stale_groups_are_restarted_even_if_they_are_complete(rollouts: Rollouts) -> None:
    loop = TimedLoop()
    rollout = rollouts(loop, max_staleness=0)
    rollout.take(1, SAMPLING)
    wait_until_idle(loop)
    assert loop.started.count((2, 0)) == 1
    episodes, metrics = rollout.take(2, SAMPLING)
    assert seeds(episodes) == [2, 3]
    assert metrics["rollout/staleness/max"] == 0
    assert metrics["rollout/episodes_restarted"] == 4
    assert loop.started.count((2, 0)) == 2


def test_an_error_of_the_thread_reaches_the_main_thread_with_its_traceback(rollouts: Rollouts) -> None:
    loop = TimedLoop({(0, 0): 10_000})
    rollout = rollouts(loop, async_ratio=0.5)
    rollout.take(1, SAMPLING)
    loop.error = OSError("no such reward file")
    with pytest.raises(OSError, match="reward file") as caught:
        list(map(partial(rollout.take, sampling=SAMPLING), range(2, 10)))
    assert "in _advance" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(OSError, match="reward file"):
        rollout.suspend()


def test_a_checkpoint_names_all_groups_in_flight_and_aborts_none(rollouts: Rollouts) -> None:
    loop = TimedLoop({(2, 0): 10_000})
    rollout = rollouts(loop, size=1)
    assert seeds(rollout.take(1, SAMPLING)[0]) == [0, 1]
    time.sleep(0.1)
    state = rollout.suspend()
    assert state == {"drawn": 4, "in_flight": [2, 3], "groups_begun": 4}
    assert [episode.seed for episode, _ in loop.running] == [2]
    resumed = TimedLoop()
    again = rollouts(resumed)
    again.load(state)
    assert seeds(again.take(2, SAMPLING)[0]) == [2, 3]


def test_validation_has_the_loop_alone_and_the_rollout_continues_after_it(rollouts: Rollouts) -> None:
    loop = TimedLoop({(2, 0): 100}, seconds=0.001)
    rollout = rollouts(loop)
    envs = PausingEnvs(loop, rollout)
    rollout.take(1, SAMPLING)
    steps = None
    for _ in envs.collect_rollouts([Episode(90 + number, number, 0) for number in range(20)], SAMPLING):
        steps = steps or loop.num_steps
        assert loop.num_steps == steps
    assert any(2 in seeds(rollout.take(step, SAMPLING)[0]) for step in range(2, 100))
    assert loop.started.count((2, 0)) == 1


def test_weights_are_loaded_into_rebuilt_engines_while_nothing_is_complete(rollouts: Rollouts) -> None:
    """All engines are dead: the episodes can only end after the call."""
    loop = TimedLoop({(0, 0): 10_000, (1, 0): 10_000})
    calls: list[str] = []

    def load() -> None:
        calls.append(threading.current_thread().name)
        loop.running = [(episode, 1) for episode, _ in loop.running]

    rollouts(loop, missing=load, async_ratio=0.01).take(1, SAMPLING)
    assert calls[0] == threading.main_thread().name


def test_closing_stops_a_thread_that_waits_for_room(rollouts: Rollouts) -> None:
    loop = TimedLoop()
    rollout = rollouts(loop, size=1, async_ratio=5)
    rollout.take(1, SAMPLING)
    wait_until_idle(loop)
    rollout.close()
    assert not rollout._thread.is_alive()
