"""If these fail, partial rollouts are lost, mixed up, or trained on although they are stale."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

import pytest

from quintet.config.native.experiment import Experiment
from quintet.records import FinishReason, Outcome, Trajectory, Turn
from quintet.rollout.async_rollout import AsyncRollout
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import SamplingParams

SAMPLING = SamplingParams(1.0, 0, 1.0, 0)


class Slow:
    """Episodes that take `lasts` steps, by start state and sample."""

    def __init__(self, lasts: dict[tuple[int, int], int]) -> None:
        self.lasts = lasts
        self.running: list[tuple[Episode, int]] = []
        self.started: list[tuple[int, int]] = []
        self.seeds: list[int] = []
        self.version = 0
        self.untaken: list[Trajectory] = []

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def start(self, episodes: Sequence[Episode], sampling: SamplingParams) -> None:
        self.running += [(episode, self.lasts.get((episode.seed, episode.sample), 1)) for episode in episodes]
        self.started += [(episode.seed, episode.sample) for episode in episodes]
        self.seeds += [episode.sampling_seed(sampling, 0) for episode in episodes]

    def step(self) -> list[Trajectory]:
        self.running = [(episode, left - 1) for episode, left in self.running]
        ended = [episode for episode, left in self.running if left <= 0]
        self.running = [(episode, left) for episode, left in self.running if left > 0]
        untaken, self.untaken = self.untaken, []
        return untaken + [played(episode, Outcome.SUCCESS, self.version) for episode in ended]

    def abort(self, groups: Collection[int]) -> list[Trajectory]:
        through = [episode for episode in self.untaken if episode.group in groups]
        self.untaken = [episode for episode in self.untaken if episode.group not in groups]
        return through + self._give_up(groups)

    def validate(self) -> None:
        """Run validation episodes beside these; episodes that end meanwhile are not returned yet."""
        self.untaken += self.step()

    def _give_up(self, groups: Collection[int]) -> list[Trajectory]:
        gone = [episode for episode, _ in self.running if episode.group in groups]
        self.running = [(episode, left) for episode, left in self.running if episode.group not in groups]
        return [played(episode, Outcome.ABORTED, self.version) for episode in gone]


def played(episode: Episode, outcome: Outcome, version: int) -> Trajectory:
    turn = Turn("", (1,), False, (2, 3), (0.0, 0.0), version, "", (), True, float(episode.sample), FinishReason.STOP)
    return Trajectory("slow", episode.seed, episode.group, episode.sample, (turn,), outcome)


class Counting:
    """Start states 0, 1, 2, …"""

    def __init__(self) -> None:
        self._next = count()

    def take(self, number: int) -> list[int]:
        return [next(self._next) for _ in range(number)]

    def state(self) -> dict[str, Any]:
        return {}


def stream(episodes: Slow, **rollout: Any) -> AsyncRollout:
    config = Experiment.model_validate(
        {"training": {"groups_per_step": 2, "samples_per_group": 2}, "rollout": {"async_ratio": 1.0, **rollout}}
    )
    return AsyncRollout(episodes, Counting(), config)  # type: ignore[arg-type]


def starts(episodes: Sequence[Trajectory]) -> list[tuple[int, int, int]]:
    return sorted((episode.group, episode.seed, episode.sample) for episode in episodes)


def test_a_step_takes_complete_groups_and_others_continue() -> None:
    """Start state 0 has an episode of nine steps: the first training step uses start states 1 and 2."""
    episodes = Slow({(0, 1): 9, (3, 0): 2})
    known = stream(episodes, partial=True)
    first, metrics = known.take(1, SAMPLING)
    assert starts(first) == [(0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1)]
    assert metrics["rollout/groups_in_flight"] == 2
    second, metrics = known.take(2, SAMPLING)
    assert [episode.seed for episode in second if episode.sample == 0] == [3, 4]
    assert metrics["rollout/staleness/max"] == 1
    assert (0, 1) not in episodes.started[8:]
    for step in range(3, 14):
        taken, metrics = known.take(step, SAMPLING)
        if 0 in {episode.seed for episode in taken}:
            break
    assert metrics["rollout/staleness/max"] == step - 1


def test_without_partial_rollouts_running_episodes_are_restarted() -> None:
    episodes = Slow({(0, 1): 9})
    known = stream(episodes)
    known.take(1, SAMPLING)
    episodes.lasts = {}
    taken, metrics = known.take(2, SAMPLING)
    assert episodes.started.count((0, 1)) == 2
    assert episodes.started.count((0, 0)) == 1
    assert metrics["rollout/episodes_restarted"] == 1
    assert {episode.seed for episode in taken} == {0, 3}


def test_episodes_that_end_during_validation_are_recorded_once() -> None:
    """Without partial rollouts it is neither restarted nor recorded twice."""
    episodes = Slow({(0, 1): 2})
    known = stream(episodes)
    known.take(1, SAMPLING)
    episodes.validate()
    taken, metrics = known.take(2, SAMPLING)
    assert metrics["rollout/episodes_restarted"] == 0
    assert sorted((episode.seed, episode.sample) for episode in taken) == [(0, 0), (0, 1), (3, 0), (3, 1)]
    episodes.lasts = {(4, 0): 2}
    known.take(3, SAMPLING)
    episodes.validate()
    known.suspend()
    known.take(4, SAMPLING)


def test_stale_groups_are_restarted() -> None:
    episodes = Slow({(0, 1): 4})
    known = stream(episodes, partial=True, max_staleness=1)
    for step in (1, 2, 3):
        taken, metrics = known.take(step, SAMPLING)
        assert metrics["rollout/staleness/max"] <= 1
        assert 0 not in {episode.seed for episode in taken}
    assert episodes.started.count((0, 1)) == episodes.started.count((0, 0)) == 2


def test_tokens_of_older_weights_are_counted() -> None:
    episodes = Slow({})
    known = stream(episodes, partial=True)
    assert known.take(1, SAMPLING)[1]["rollout/tokens_of_older_weights"] == 0
    episodes.version = 1
    assert known.take(2, SAMPLING)[1]["rollout/tokens_of_older_weights"] == 1.0


def test_groups_without_signal_are_replaced() -> None:
    class Flat(Slow):
        """Start states 0 and 1 have the same reward for every sample."""

        def step(self) -> list[Trajectory]:
            ended = super().step()
            return [
                played(
                    Episode(episode.seed, episode.group, 0 if episode.seed < 2 else episode.sample), Outcome.SUCCESS, 0
                )
                for episode in ended
            ]

    config = Experiment.model_validate(
        {
            "training": {"groups_per_step": 2, "samples_per_group": 2},
            "rollout": {"async_ratio": 1.0, "partial": True},
            "algorithm": {"filter": {"refill_rounds": 2}},
        }
    )
    known = AsyncRollout(Flat({}), Counting(), config)  # type: ignore[arg-type]
    taken, metrics = known.take(1, SAMPLING)
    assert {episode.seed for episode in taken} == {2, 3}
    assert metrics["rollout/groups_dropped"] == 2


def test_a_resumed_run_starts_the_same_episodes() -> None:
    unbroken, resumed = Slow({(0, 1): 9}), Slow({(0, 1): 9})
    known = stream(unbroken, partial=True)
    known.take(1, SAMPLING)
    state = known.suspend()
    assert not unbroken.busy
    assert state == {"in_flight": [0, 3], "groups_begun": 4}
    again = stream(resumed, partial=True)
    again._start_states.take(4)
    again.load(state)
    unbroken.started.clear()
    unbroken.seeds.clear()
    one, two = known.take(2, SAMPLING)[0], again.take(2, SAMPLING)[0]
    assert starts(one) == starts(two)
    assert unbroken.started == resumed.started
    assert unbroken.seeds == resumed.seeds


@pytest.mark.parametrize("ratio", [0.1, 0.5, 2.0])
def test_async_ratio_sets_the_groups_in_flight(ratio: float) -> None:
    episodes = Slow({})
    known = stream(episodes, async_ratio=ratio, partial=True)
    known.take(1, SAMPLING)
    assert len({start for start, _ in episodes.started}) == -(-int(20 * (1 + ratio)) // 10)
