"""If these fail, games that outlast their step are lost, mixed up, or learnt from when they are too old."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

import pytest

from quintet.config.native import Experiment
from quintet.records import Outcome, StopReason, Trajectory, Turn
from quintet.rollout.agent_loop import Game, Sampling
from quintet.rollout.streaming import GameStream

SAMPLING = Sampling(1.0, 0, 1.0, 0)


class Slow:
    """Games that last as many rounds as `lasts` says, by start and sample."""

    def __init__(self, lasts: dict[tuple[int, int], int]) -> None:
        self.lasts = lasts
        self.running: list[tuple[Game, int]] = []
        self.begun: list[tuple[int, int]] = []
        self.seeds: list[int] = []
        self.version = 0
        self.untaken: list[Trajectory] = []

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def begin(self, games: Sequence[Game], sampling: Sampling) -> None:
        self.running += [(game, self.lasts.get((game.seed, game.sample), 1)) for game in games]
        self.begun += [(game.seed, game.sample) for game in games]
        self.seeds += [game.draws(sampling, 0) for game in games]

    def advance(self) -> list[Trajectory]:
        self.running = [(game, left - 1) for game, left in self.running]
        ended = [game for game, left in self.running if left <= 0]
        self.running = [(game, left) for game, left in self.running if left > 0]
        untaken, self.untaken = self.untaken, []
        return untaken + [played(game, Outcome.SUCCESS, self.version) for game in ended]

    def abort(self, groups: Collection[int]) -> list[Trajectory]:
        through = [game for game in self.untaken if game.group in groups]
        self.untaken = [game for game in self.untaken if game.group not in groups]
        return through + self._give_up(groups)

    def validate(self) -> None:
        """Another round is played beside these games; those that end meanwhile aren't taken yet."""
        self.untaken += self.advance()

    def _give_up(self, groups: Collection[int]) -> list[Trajectory]:
        gone = [game for game, _ in self.running if game.group in groups]
        self.running = [(game, left) for game, left in self.running if game.group not in groups]
        return [played(game, Outcome.ABORTED, self.version) for game in gone]


def played(game: Game, outcome: Outcome, version: int) -> Trajectory:
    turn = Turn("", (1,), False, (2, 3), (0.0, 0.0), version, "", (), True, float(game.sample), StopReason.STOP)
    return Trajectory("slow", game.seed, game.group, game.sample, (turn,), outcome)


class Counting:
    """Start states 0, 1, 2, …"""

    def __init__(self) -> None:
        self._next = count()

    def take(self, number: int) -> list[int]:
        return [next(self._next) for _ in range(number)]


def stream(games: Slow, **rollout: Any) -> GameStream:
    config = Experiment.model_validate(
        {"training": {"groups_per_step": 2, "samples_per_group": 2}, "rollout": {"async_ratio": 1.0, **rollout}}
    )
    return GameStream(games, Counting(), config)  # type: ignore[arg-type]


def starts(games: Sequence[Trajectory]) -> list[tuple[int, int, int]]:
    return sorted((game.group, game.seed, game.sample) for game in games)


def test_a_step_takes_what_is_through_and_the_rest_goes_on() -> None:
    """Start 0 has a game of nine rounds: the first step is made of starts 1 and 2."""
    games = Slow({(0, 1): 9, (3, 0): 2})
    known = stream(games, partial=True)
    first, metrics = known.take(1, SAMPLING)
    assert starts(first) == [(0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1)]
    assert metrics["rollout/groups_in_flight"] == 2
    second, metrics = known.take(2, SAMPLING)
    assert [game.seed for game in second if game.sample == 0] == [3, 4]
    assert metrics["rollout/staleness/max"] == 1
    assert (0, 1) not in games.begun[8:]
    for step in range(3, 14):
        taken, metrics = known.take(step, SAMPLING)
        if 0 in {game.seed for game in taken}:
            break
    assert metrics["rollout/staleness/max"] == step - 1


def test_without_partial_what_was_in_the_middle_is_played_anew() -> None:
    games = Slow({(0, 1): 9})
    known = stream(games)
    known.take(1, SAMPLING)
    games.lasts = {}
    taken, metrics = known.take(2, SAMPLING)
    assert games.begun.count((0, 1)) == 2
    assert games.begun.count((0, 0)) == 1
    assert metrics["rollout/games_played_anew"] == 1
    assert {game.seed for game in taken} == {0, 3}


def test_what_ended_beside_a_validation_counts_once() -> None:
    """Without partial replies it needn't be played anew, and it isn't there twice."""
    games = Slow({(0, 1): 2})
    known = stream(games)
    known.take(1, SAMPLING)
    games.validate()
    taken, metrics = known.take(2, SAMPLING)
    assert metrics["rollout/games_played_anew"] == 0
    assert sorted((game.seed, game.sample) for game in taken) == [(0, 0), (0, 1), (3, 0), (3, 1)]
    games.lasts = {(4, 0): 2}
    known.take(3, SAMPLING)
    games.validate()
    known.suspend()
    known.take(4, SAMPLING)


def test_what_is_too_old_is_not_learnt_from() -> None:
    games = Slow({(0, 1): 4})
    known = stream(games, partial=True, max_staleness=1)
    for step in (1, 2, 3):
        taken, metrics = known.take(step, SAMPLING)
        assert metrics["rollout/staleness/max"] <= 1
        assert 0 not in {game.seed for game in taken}
    assert games.begun.count((0, 1)) == games.begun.count((0, 0)) == 2


def test_tokens_of_older_weights_are_counted() -> None:
    games = Slow({})
    known = stream(games, partial=True)
    assert known.take(1, SAMPLING)[1]["rollout/tokens_of_older_weights"] == 0
    games.version = 1
    assert known.take(2, SAMPLING)[1]["rollout/tokens_of_older_weights"] == 1.0


def test_groups_that_tell_nothing_are_replaced() -> None:
    class Flat(Slow):
        """Starts 0 and 1 give the same reward whatever is done."""

        def advance(self) -> list[Trajectory]:
            ended = super().advance()
            return [
                played(Game(game.seed, game.group, 0 if game.seed < 2 else game.sample), Outcome.SUCCESS, 0)
                for game in ended
            ]

    config = Experiment.model_validate(
        {
            "training": {"groups_per_step": 2, "samples_per_group": 2},
            "rollout": {"async_ratio": 1.0, "partial": True},
            "algorithm": {"filter": {"refill_rounds": 2}},
        }
    )
    known = GameStream(Flat({}), Counting(), config)  # type: ignore[arg-type]
    taken, metrics = known.take(1, SAMPLING)
    assert {game.seed for game in taken} == {2, 3}
    assert metrics["rollout/groups_dropped"] == 2


def test_a_resumed_run_begins_what_the_unbroken_one_begins() -> None:
    unbroken, resumed = Slow({(0, 1): 9}), Slow({(0, 1): 9})
    known = stream(unbroken, partial=True)
    known.take(1, SAMPLING)
    state = known.suspend()
    assert not unbroken.busy
    assert state == {"in_flight": [0, 3], "groups_begun": 4}
    again = stream(resumed, partial=True)
    again._starts.take(4)
    again.load(state)
    unbroken.begun.clear()
    unbroken.seeds.clear()
    one, two = known.take(2, SAMPLING)[0], again.take(2, SAMPLING)[0]
    assert starts(one) == starts(two)
    assert unbroken.begun == resumed.begun
    assert unbroken.seeds == resumed.seeds


@pytest.mark.parametrize("ratio", [0.1, 0.5, 2.0])
def test_as_many_groups_are_in_flight_as_asked(ratio: float) -> None:
    games = Slow({})
    known = stream(games, async_ratio=ratio, partial=True)
    known.take(1, SAMPLING)
    assert len({start for start, _ in games.begun}) == -(-int(20 * (1 + ratio)) // 10)
