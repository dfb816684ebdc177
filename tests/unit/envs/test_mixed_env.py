"""If these fail, envs that are mixed aren't played by their shares, or a resumed run draws other starts."""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.envs.mixed_env import MixedStartStates, MixedVectorEnv, ShareSchedule, build_run_envs, build_start_states
from quintet.envs.start_states import SeedStartStates, Split, env_index, env_seed, env_start, split_of, split_seed
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeFailed, EpisodeStarted
from quintet.errors import ConfigError

OVERRIDES = ["envs.lake={share: 3, env: {size: 3}}", "envs.boxes={env: {name: sokoban}, start_states: 4}"]


def mixed(*overrides: str) -> Experiment:
    return load_experiment(None, [*OVERRIDES, *overrides]).experiment


def starts(*arguments: str) -> MixedStartStates:
    opened = build_start_states(mixed(*arguments))
    assert isinstance(opened, MixedStartStates)
    return opened


def counted(actual: list[int]) -> dict[int, int]:
    return dict(Counter(map(env_index, actual)))


def test_a_start_says_its_env_and_its_seed() -> None:
    for env, seed in [(0, 0), (0, 3 * 10**9), (2, 7), (5, 3 * 10**9 + 300)]:
        assert (env_index(env_start(env, seed)), env_seed(env_start(env, seed))) == (env, seed)
    assert env_start(0, 42) == 42, "a run of one env has its seeds as they are"


@pytest.mark.parametrize("shares", [[1, 1], [3, 1], [0.7, 0.2, 0.1], [5, 3, 1], [1, 1e-3], [1 / 3, 2 / 3]])
def test_nobody_is_ever_a_whole_turn_ahead_of_its_share(shares: list[float]) -> None:
    turns, taken = ShareSchedule(shares), [0] * len(shares)
    for number in range(1, 400):
        taken[next(turns)] += 1
        assert all(got - number * share / sum(shares) < 1 for got, share in zip(taken, shares, strict=True))
    assert turns.counts == taken


def test_where_shares_come_out_whole_they_are_met_in_every_step() -> None:
    drawn = starts()
    assert [counted(drawn.take(4)) for _ in range(5)] == [{0: 3, 1: 1}] * 5
    uneven = starts("envs.lake.share=2")
    assert Counter(env for _ in range(3) for env in map(env_index, uneven.take(4))) == {0: 8, 1: 4}


def test_each_env_goes_through_its_own_starts() -> None:
    actual = starts().take(40)
    lake, boxes = ([env_seed(start) for start in actual if env_index(start) == env] for env in (0, 1))
    assert lake == [split_seed(Split.TRAIN, number) for number in range(30)]
    assert Counter(boxes) == Counter(dict.fromkeys((split_seed(Split.TRAIN, n) for n in range(4)), 2)) + Counter(
        dict.fromkeys(boxes[8:], 1)
    )


def test_held_out_starts_are_no_training_starts_and_always_the_same() -> None:
    drawn = starts("validation.episodes=8", "envs.boxes.validation_episodes=5")
    held_out = drawn.held_out()
    assert counted(held_out) == {0: 6, 1: 5}
    assert {split_of(env_seed(start)) for start in held_out} == {Split.VALIDATION}
    drawn.take(7)
    assert drawn.held_out() == held_out


def test_trials_come_from_every_env_and_from_no_step() -> None:
    drawn = starts()
    trials = drawn.warm_start_check_starts(8)
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


def test_envs_in_another_order_dont_go_on() -> None:
    state = starts().state()
    turned = load_experiment(None, OVERRIDES[::-1]).experiment
    with pytest.raises(ConfigError, match="has the order lake, boxes, the run boxes, lake"):
        build_start_states(turned).load(state)


def test_a_run_of_one_env_keeps_its_starts() -> None:
    assert isinstance(build_start_states(load_experiment(None, []).experiment), SeedStartStates)


def answered(envs: MixedVectorEnv, count: int) -> list[EnvEvent]:
    results: list[EnvEvent] = []
    end = time.monotonic() + 60
    while len(results) < count and time.monotonic() < end:
        results += envs.poll(wait=True)
    return results


@pytest.mark.parametrize("processes", ["null", "3"])
def test_every_episode_is_played_in_its_own_env(processes: str) -> None:
    config = mixed(f"envs.boxes.env.processes={processes}", "envs.lake.env.processes=3")
    envs = build_run_envs(config)
    assert isinstance(envs, MixedVectorEnv)
    try:
        for episode in range(6):
            envs.start(episode, env_start(episode % 2, 3 * episode))
        opened = {one.episode: one for one in answered(envs, 6) if isinstance(one, EpisodeStarted)}
        assert len({opened[episode].instruction for episode in (0, 2, 4)}) == 1
        assert ["box" in opened[episode].instruction.lower() for episode in range(6)] == [False, True] * 3
        envs.drop(0)
        envs.drop(4)
        for episode in (1, 2, 3, 5):
            envs.step(episode, ["Up"])
        moved = answered(envs, 4)
        assert {one.episode for one in moved if isinstance(one, ActionsExecuted)} == {1, 2, 3, 5}
        assert not envs.pending
        assert envs.poll(wait=True) == []
        assert envs.seconds > 0
    finally:
        envs.close()


def test_a_env_that_breaks_costs_no_episode_of_another(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text(
        "class Torn:\n actions = ('a',)\n"
        " def instruction(self): return 'x'\n def reset(self, seed): raise OSError('torn')\n"
        " def step(self, action): pass\n def close(self): pass\n"
    )
    torn = f"envs.torn={{env: {{name: custom, path: '{tmp_path}/torn.py:Torn', processes: 1}}}}"
    envs = build_run_envs(load_experiment(None, ["envs.lake={}", torn]).experiment)
    try:
        envs.start(0, env_start(0, 0))
        envs.start(1, env_start(1, 0))
        actual = {one.episode: type(one) for one in answered_all(envs, 2)}
        assert actual == {0: EpisodeStarted, 1: EpisodeFailed}
    finally:
        envs.close()


def answered_all(envs: object, count: int) -> list[EnvEvent]:
    assert isinstance(envs, MixedVectorEnv)
    return answered(envs, count)


@pytest.mark.parametrize("processes", ["null", "1"])
def test_a_users_env_that_is_not_there_is_told_by_its_own_key(processes: str) -> None:
    word = f"envs.mine={{env: {{name: custom, path: 'nowhere.py:Mine', processes: {processes}}}}}"
    with pytest.raises(ConfigError) as error:
        build_run_envs(load_experiment(None, ["envs.lake={}", word]).experiment)
    assert error.value.key == "envs.mine.env.path"
    assert "envs.mine.env.path = 'nowhere.py:Mine'" in str(error.value)


def test_turns_go_on_for_ever() -> None:
    assert Counter(islice(ShareSchedule([1, 2]), 300)) == {0: 100, 1: 200}
