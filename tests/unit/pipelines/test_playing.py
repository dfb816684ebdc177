"""If these fail, steps learn from groups that teach nothing though others were asked for, or games repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.config import load_experiment
from quintet.envs.mixture import open_starts
from quintet.envs.seeds import WorldStarts, seed_of, world_of
from quintet.errors import MachineError
from quintet.pipelines.estimating import gather
from quintet.pipelines.playing import Played, play_training_games
from quintet.records import Failure, Outcome, StopReason, Trajectory, Turn
from quintet.rollout.agent_loop import Game, Sampling

WORDS = ["training.groups_per_step=4", "training.samples_per_group=2", "training.mini_batches=2"]


class Table:
    """Games whose reward is the sample's number where the start's number is divisible by `telling`, else 1."""

    def __init__(self, telling: int) -> None:
        self.telling = telling
        self.rounds: list[list[Game]] = []

    def measures(self) -> dict[str, float]:
        return {}

    def play(self, games: Sequence[Game], sampling: Sampling) -> Iterator[Trajectory]:
        self.rounds.append(list(games))
        for game in reversed(games):
            differs = (game.seed // 3) % self.telling == 0
            reward = float(game.sample) if differs and sampling.temperature else 0.25
            turn = Turn("start", (1, 2), False, (3, 4), (-0.1, -0.2), 0, "", (), True, reward, StopReason.STOP)
            yield Trajectory("table", game.seed, game.group, game.sample, (turn,), Outcome.TERMINATED)


def components(telling: int, *words: str) -> Any:
    experiment = load_experiment(None, [*WORDS, *words]).experiment
    engine = SimpleNamespace(measures=dict)
    return SimpleNamespace(
        experiment=experiment, games=Table(telling), starts=WorldStarts(None, 0, 8), stream=None, engine=engine
    )


def test_without_refilling_a_step_plays_its_groups_once() -> None:
    table = components(2)
    played = play_training_games(table, 1)
    assert [(t.seed, t.group, t.sample) for t in played.trajectories] == [
        (3 * group, group, sample) for group in range(4) for sample in range(2)
    ]
    assert played.metrics == {}
    assert next(t.seed for t in play_training_games(table, 2).trajectories) == 12, "the next step draws new starts"


def test_a_start_that_comes_twice_in_a_step_is_played_otherwise() -> None:
    table = components(2)
    table.starts = WorldStarts(2, 0, 8)
    play_training_games(table, 1)
    sampling = Sampling(1.0, 0, 1.0, 7)
    games = table.games.rounds[0]
    assert len({game.seed for game in games}) == 2
    assert len({game.draws(sampling, 0) for game in games}) == len(games) == 8


def test_a_step_in_which_nothing_could_be_played_says_why() -> None:
    table = components(2)
    failure = Failure("reset", "OSError", "no map")
    failed = Trajectory("table", 0, 0, 0, (), Outcome.FAILED, failure)
    with pytest.raises(MachineError, match=r"every game of the step failed \(first, in reset: OSError: no map\)"):
        gather(Played([failed], {}), table.experiment)
    long = Trajectory("table", 0, 0, 0, (), Outcome.CONTEXT)
    with pytest.raises(MachineError, match="every first prompt is longer than 512 tokens"):
        gather(Played([long], {}), table.experiment)


def test_groups_without_signal_are_replaced() -> None:
    """Of the starts 0, 1, 2, … every second tells something: 0 and 2 in the first round, then 4, then 6."""
    table = components(2, "algorithm.filter.refill_rounds=5")
    played = play_training_games(table, 1)
    assert sorted({t.seed // 3 for t in played.trajectories}) == [0, 2, 4, 6]
    assert [len(games) // 2 for games in table.games.rounds] == [4, 2, 1]
    assert played.metrics == {"training/groups_drawn": 7, "training/refill_rounds": 2}
    assert table.starts.state() == {"drawn": 7}


def test_where_rounds_run_out_the_step_is_filled_up() -> None:
    table = components(8, "algorithm.filter.refill_rounds=1")
    played = play_training_games(table, 1)
    assert sorted({t.seed // 3 for t in played.trajectories}) == [0, 1, 2, 3]
    assert played.metrics == {"training/groups_drawn": 7, "training/refill_rounds": 1}


def test_remax_plays_one_greedy_game_from_each_start() -> None:
    table = components(2, "algorithm.advantage={name: remax}")
    played = play_training_games(table, 1)
    assert len(table.games.rounds[1]) == 4
    batch = gather(played, table.experiment)
    assert batch.baseline is not None
    assert batch.baseline.tolist() == [0.25] * 8


def test_of_several_worlds_greedy_games_begin_where_the_others_of_their_group_do() -> None:
    table = components(2, "algorithm.advantage={name: remax}", "worlds.a={}", "worlds.b={}")
    table.starts = open_starts(table.experiment)
    table.games = Mixed(2)
    play_training_games(table, 1)
    drawn, greedy = table.games.rounds
    assert {(game.group, game.seed) for game in greedy} == {(game.group, game.seed) for game in drawn}
    assert {world_of(game.seed) for game in greedy} == {0, 1}


class Mixed(Table):
    """The same games, told as those of two worlds."""

    def play(self, games: Sequence[Game], sampling: Sampling) -> Iterator[Trajectory]:
        starts = {game.group: game.seed for game in games}
        for game in super().play(games, sampling):
            start = starts[game.group]
            yield replace(game, world="ab"[world_of(start)], seed=seed_of(start))


def test_groups_that_take_the_place_of_others_are_drawn_by_share_too() -> None:
    words = ("algorithm.filter.refill_rounds=3", "worlds.a={share: 2}", "worlds.b={}")
    table = components(2, *words)
    table.starts, table.games = open_starts(table.experiment), Mixed(2)
    for step in (1, 2, 3):
        play_training_games(table, step)
    drawn = {(number, game.group): game.seed for number, games in enumerate(table.games.rounds) for game in games}
    of_b = sum(world_of(start) == 1 for start in drawn.values())
    assert abs(len(drawn) - 3 * of_b) < 3
