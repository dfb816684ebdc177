"""If these fail, worlds that are mixed aren't played by their shares, or a resumed run draws other starts."""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from quintet.config import load_experiment
from quintet.config.native import Experiment
from quintet.envs.mixture import MixedStarts, MixedWorlds, Turns, open_starts, worlds_of
from quintet.envs.seeds import Split, WorldStarts, seed_of, split_of, split_seed, start_in, world_of
from quintet.envs.worlds import Answered, Broke, Moved, Opened
from quintet.errors import ConfigError

WORDS = ["worlds.lake={share: 3, world: {size: 3}}", "worlds.boxes={world: {name: sokoban}, start_states: 4}"]


def mixed(*words: str) -> Experiment:
    return load_experiment(None, [*WORDS, *words]).experiment


def starts(*words: str) -> MixedStarts:
    opened = open_starts(mixed(*words))
    assert isinstance(opened, MixedStarts)
    return opened


def counted(found: list[int]) -> dict[int, int]:
    return dict(Counter(map(world_of, found)))


def test_a_start_says_its_world_and_its_seed() -> None:
    for world, seed in [(0, 0), (0, 3 * 10**9), (2, 7), (5, 3 * 10**9 + 300)]:
        assert (world_of(start_in(world, seed)), seed_of(start_in(world, seed))) == (world, seed)
    assert start_in(0, 42) == 42, "a run of one world has its seeds as they are"


@pytest.mark.parametrize("shares", [[1, 1], [3, 1], [0.7, 0.2, 0.1], [5, 3, 1], [1, 1e-3], [1 / 3, 2 / 3]])
def test_nobody_is_ever_a_whole_turn_ahead_of_its_share(shares: list[float]) -> None:
    turns, taken = Turns(shares), [0] * len(shares)
    for number in range(1, 400):
        taken[next(turns)] += 1
        assert all(got - number * share / sum(shares) < 1 for got, share in zip(taken, shares, strict=True))
    assert turns.taken == taken


def test_where_shares_come_out_whole_they_are_met_in_every_step() -> None:
    drawn = starts()
    assert [counted(drawn.take(4)) for _ in range(5)] == [{0: 3, 1: 1}] * 5
    uneven = starts("worlds.lake.share=2")
    assert Counter(world for _ in range(3) for world in map(world_of, uneven.take(4))) == {0: 8, 1: 4}


def test_each_world_goes_through_its_own_starts() -> None:
    found = starts().take(40)
    lake, boxes = ([seed_of(start) for start in found if world_of(start) == world] for world in (0, 1))
    assert lake == [split_seed(Split.TRAIN, number) for number in range(30)]
    assert Counter(boxes) == Counter(dict.fromkeys((split_seed(Split.TRAIN, n) for n in range(4)), 2)) + Counter(
        dict.fromkeys(boxes[8:], 1)
    )


def test_held_out_starts_are_no_training_starts_and_always_the_same() -> None:
    drawn = starts("validation.games=8", "worlds.boxes.validation_games=5")
    held_out = drawn.held_out()
    assert counted(held_out) == {0: 6, 1: 5}
    assert {split_of(seed_of(start)) for start in held_out} == {Split.VALIDATION}
    drawn.take(7)
    assert drawn.held_out() == held_out


def test_trials_come_from_every_world_and_from_no_step() -> None:
    drawn = starts()
    trials = drawn.trials(8)
    assert counted(trials) == {0: 6, 1: 2}
    assert len(set(trials)) == 8
    assert not set(trials) & set(drawn.take(200))


@pytest.mark.parametrize("before", [0, 1, 5, 18])
def test_a_resumed_run_draws_what_the_unbroken_one_draws(before: int) -> None:
    whole = starts()
    whole.take(before)
    state = json.loads(json.dumps(whole.state(), sort_keys=True))
    resumed = starts()
    resumed.load(state)
    assert resumed.take(23) == whole.take(23)
    assert resumed.state() == whole.state()


def test_worlds_in_another_order_dont_go_on() -> None:
    state = starts().state()
    turned = load_experiment(None, WORDS[::-1]).experiment
    with pytest.raises(ConfigError, match="in the order lake, boxes, and now it is boxes, lake"):
        open_starts(turned).load(state)


def test_a_run_of_one_world_keeps_its_starts() -> None:
    assert isinstance(open_starts(load_experiment(None, []).experiment), WorldStarts)


def answered(worlds: MixedWorlds, count: int) -> list[Answered]:
    found: list[Answered] = []
    end = time.monotonic() + 60
    while len(found) < count and time.monotonic() < end:
        found += worlds.answers(wait=True)
    return found


@pytest.mark.parametrize("processes", ["null", "3"])
def test_every_game_is_played_in_its_own_world(processes: str) -> None:
    config = mixed(f"worlds.boxes.world.processes={processes}", "worlds.lake.world.processes=3")
    worlds = worlds_of(config)
    assert isinstance(worlds, MixedWorlds)
    try:
        for game in range(6):
            worlds.open(game, start_in(game % 2, 3 * game))
        opened = {one.game: one for one in answered(worlds, 6) if isinstance(one, Opened)}
        assert len({opened[game].instruction for game in (0, 2, 4)}) == 1
        assert ["box" in opened[game].instruction.lower() for game in range(6)] == [False, True] * 3
        worlds.drop(0)
        worlds.drop(4)
        for game in (1, 2, 3, 5):
            worlds.move(game, ["Up"])
        moved = answered(worlds, 4)
        assert {one.game for one in moved if isinstance(one, Moved)} == {1, 2, 3, 5}
        assert not worlds.asked
        assert worlds.answers(wait=True) == []
        assert worlds.seconds > 0
    finally:
        worlds.close()


def test_a_world_that_breaks_costs_no_game_of_another(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text(
        "class Torn:\n actions = ('a',)\n"
        " def instruction(self): return 'x'\n def reset(self, seed): raise OSError('torn')\n"
        " def step(self, action): pass\n def close(self): pass\n"
    )
    torn = f"worlds.torn={{world: {{name: custom, path: '{tmp_path}/torn.py:Torn', processes: 1}}}}"
    worlds = worlds_of(load_experiment(None, ["worlds.lake={}", torn]).experiment)
    try:
        worlds.open(0, start_in(0, 0))
        worlds.open(1, start_in(1, 0))
        found = {one.game: type(one) for one in answered_all(worlds, 2)}
        assert found == {0: Opened, 1: Broke}
    finally:
        worlds.close()


def answered_all(worlds: object, count: int) -> list[Answered]:
    assert isinstance(worlds, MixedWorlds)
    return answered(worlds, count)


@pytest.mark.parametrize("processes", ["null", "1"])
def test_a_users_world_that_is_not_there_is_told_by_its_own_key(processes: str) -> None:
    word = f"worlds.mine={{world: {{name: custom, path: 'nowhere.py:Mine', processes: {processes}}}}}"
    with pytest.raises(ConfigError) as error:
        worlds_of(load_experiment(None, ["worlds.lake={}", word]).experiment)
    assert error.value.key == "worlds.mine.world.path"
    assert "worlds.mine.world.path = 'nowhere.py:Mine'" in str(error.value)


def test_turns_go_on_for_ever() -> None:
    assert Counter(islice(Turns([1, 2]), 300)) == {0: 100, 1: 200}
