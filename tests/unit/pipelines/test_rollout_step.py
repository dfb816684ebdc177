"""If these fail, steps learn from groups that teach nothing though others were asked for, or episodes repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.config.compose import load_experiment
from quintet.envs.mixed_env import build_start_states
from quintet.envs.start_states import SeedStartStates, env_index, env_seed
from quintet.errors import MachineError
from quintet.pipelines.experience import collate_rollout
from quintet.pipelines.rollout_step import Rollout, collect_rollouts, iter_rollouts, validate
from quintet.pipelines.timings import Timings
from quintet.records import Failure, FinishReason, Outcome, Trajectory, Turn
from quintet.rollout.background_rollout import BackgroundRollout
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import SamplingParams
from quintet.tracking.progress import NullProgress

OVERRIDES = ["training.groups_per_step=4", "training.samples_per_group=2", "training.mini_batches=2"]


class Table:
    """Episodes whose reward is the sample's number where the start's number is divisible by `telling`, else 1."""

    def __init__(self, telling: int) -> None:
        self.telling = telling
        self.rounds: list[list[Episode]] = []

    def pop_metrics(self) -> dict[str, float]:
        return {}

    def collect_rollouts(self, episodes: Sequence[Episode], sampling: SamplingParams) -> Iterator[Trajectory]:
        self.rounds.append(list(episodes))
        for episode in reversed(episodes):
            differs = (episode.seed // 3) % self.telling == 0
            reward = float(episode.sample) if differs and sampling.temperature else 0.25
            turn = Turn("start", (1, 2), False, (3, 4), (-0.1, -0.2), 0, "", (), True, reward, FinishReason.STOP)
            yield Trajectory("table", episode.seed, episode.group, episode.sample, (turn,), Outcome.TERMINATED)


def components(telling: int, *overrides: str) -> Any:
    experiment = load_experiment(None, [*OVERRIDES, *overrides]).experiment
    engine = SimpleNamespace(pop_metrics=dict)
    return SimpleNamespace(
        group_channel=None,
        config=experiment,
        envs=Table(telling),
        start_states=SeedStartStates(None, 0, 8),
        async_rollout=None,
        engines=engine,
    )


def test_without_refilling_a_step_plays_its_groups_once() -> None:
    table = components(2)
    played = collect_rollouts(table, 1)
    assert [(t.seed, t.group, t.sample) for t in played.trajectories] == [
        (3 * group, group, sample) for group in range(4) for sample in range(2)
    ]
    assert played.metrics == {}
    assert next(t.seed for t in collect_rollouts(table, 2).trajectories) == 12, "the next step draws new starts"


def test_a_start_that_comes_twice_in_a_step_is_played_otherwise() -> None:
    table = components(2)
    table.start_states = SeedStartStates(2, 0, 8)
    collect_rollouts(table, 1)
    sampling = SamplingParams(1.0, 0, 1.0, 7)
    episodes = table.envs.rounds[0]
    assert len({episode.seed for episode in episodes}) == 2
    assert len({episode.sampling_seed(sampling, 0) for episode in episodes}) == len(episodes) == 8


def test_a_step_without_any_episode_is_an_error_with_its_cause() -> None:
    table = components(2)
    failure = Failure("reset", "OSError", "no map")
    failed = Trajectory("table", 0, 0, 0, (), Outcome.FAILED, failure)
    with pytest.raises(MachineError, match=r"every episode of the step failed \(first, in reset: OSError: no map\)"):
        collate_rollout(Rollout([failed], {}), table.config)
    long = Trajectory("table", 0, 0, 0, (), Outcome.CONTEXT)
    with pytest.raises(MachineError, match="every first prompt is longer than 512 tokens"):
        collate_rollout(Rollout([long], {}), table.config)


def test_groups_without_signal_are_replaced() -> None:
    """Of the starts 0, 1, 2, … every second tells something: 0 and 2 in the first round, then 4, then 6."""
    table = components(2, "algorithm.filter.refill_rounds=5")
    played = collect_rollouts(table, 1)
    assert sorted({t.seed // 3 for t in played.trajectories}) == [0, 2, 4, 6]
    assert [len(episodes) // 2 for episodes in table.envs.rounds] == [4, 2, 1]
    assert played.metrics == {"training/groups_drawn": 7, "training/refill_rounds": 2}
    assert table.start_states.state() == {"drawn": 7}


def test_where_rounds_run_out_the_step_is_filled_up() -> None:
    table = components(8, "algorithm.filter.refill_rounds=1")
    played = collect_rollouts(table, 1)
    assert sorted({t.seed // 3 for t in played.trajectories}) == [0, 1, 2, 3]
    assert played.metrics == {"training/groups_drawn": 7, "training/refill_rounds": 1}


def test_a_round_may_have_more_groups_than_the_step_takes() -> None:
    """Of 10 groups every third has a signal: 0, 3, 6, 9; 0 alone is too few in a round of 3."""
    options = ("algorithm.filter.refill_rounds=5", "algorithm.filter.groups_per_round=")
    for size, rounds in ((10, [10]), (3, [3, 3, 3, 3])):
        table = components(3, options[0], f"{options[1]}{size}")
        rollout = collect_rollouts(table, 1)
        assert sorted({t.seed // 3 for t in rollout.trajectories}) == [0, 3, 6, 9]
        assert [len(episodes) // 2 for episodes in table.envs.rounds] == rounds
        assert rollout.metrics == {"training/groups_drawn": sum(rounds), "training/refill_rounds": len(rounds) - 1}


def test_remax_runs_one_greedy_episode_per_start_state() -> None:
    table = components(2, "algorithm.advantage={name: remax}")
    played = collect_rollouts(table, 1)
    assert len(table.envs.rounds[1]) == 4
    batch = collate_rollout(played, table.config)
    assert batch.baseline is not None
    assert batch.baseline.tolist() == [0.25] * 8


def test_greedy_episodes_have_their_groups_start_state_with_several_envs() -> None:
    table = components(2, "algorithm.advantage={name: remax}", "envs.a={}", "envs.b={}")
    table.start_states = build_start_states(table.config)
    table.envs = Mixed(2)
    collect_rollouts(table, 1)
    drawn, greedy = table.envs.rounds
    assert {(episode.group, episode.seed) for episode in greedy} == {(episode.group, episode.seed) for episode in drawn}
    assert {env_index(episode.seed) for episode in greedy} == {0, 1}


class Mixed(Table):
    """The same episodes, told as those of two envs."""

    def collect_rollouts(self, episodes: Sequence[Episode], sampling: SamplingParams) -> Iterator[Trajectory]:
        starts = {episode.group: episode.seed for episode in episodes}
        for episode in super().collect_rollouts(episodes, sampling):
            start = starts[episode.group]
            yield replace(episode, env="ab"[env_index(start)], seed=env_seed(start))


def test_replacement_groups_are_drawn_by_share() -> None:
    overrides = ("algorithm.filter.refill_rounds=3", "envs.a={share: 2}", "envs.b={}")
    table = components(2, *overrides)
    table.start_states, table.envs = build_start_states(table.config), Mixed(2)
    for step in (1, 2, 3):
        collect_rollouts(table, step)
    drawn = {
        (number, episode.group): episode.seed
        for number, episodes in enumerate(table.envs.rounds)
        for episode in episodes
    }
    of_b = sum(env_index(start) == 1 for start in drawn.values())
    assert abs(len(drawn) - 3 * of_b) < 3


def test_start_states_repeat_after_the_configured_number() -> None:
    starts = build_start_states(components(2, "training.start_states=2").config).take(6)
    assert len(set(starts)) == len(set(starts[:2])) == 2


class Parts(BackgroundRollout):
    """A rollout whose parts are empty, and that notes their numbers of groups."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def iter_parts(
        self, step: int, sampling: SamplingParams, groups: int
    ) -> Iterator[tuple[list[Trajectory], dict[str, float]]]:
        while True:
            self.groups.append(groups)
            yield [], {}


def test_a_pipelined_step_has_one_rollout_per_mini_batch() -> None:
    table = components(2, "training.pipelined=true")
    table.async_rollout = Parts()
    assert len(list(iter_rollouts(table, 1, Timings()))) == 2
    assert table.async_rollout.groups == [2, 2]


def test_a_validation_plays_each_held_out_start_as_often_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.pipelines.rollout_step.store_validation_episodes", lambda *_: None)
    table = components(2, "validation.sampling.samples=3")
    run: Any = SimpleNamespace(config=table.config, progress=NullProgress())
    table.tokenizer = None
    validate(run, table, 1)
    held_out = table.start_states.held_out()
    (episodes,) = table.envs.rounds
    assert [(episode.seed, episode.sample) for episode in episodes] == [
        (start, sample) for start in held_out for sample in range(3)
    ]
