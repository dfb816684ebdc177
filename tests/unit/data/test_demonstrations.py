"""If these fail, the warm start learns from lost episodes or from maps of another split."""

from __future__ import annotations

import pytest

from quintet.config.native.envs import EnvConfig, FrozenLakeConfig, SokobanConfig
from quintet.data.demonstrations import collect_demonstrations
from quintet.envs.factory import build_env
from quintet.envs.start_states import Split, split_of
from quintet.errors import ConfigError


@pytest.mark.parametrize("config", [FrozenLakeConfig(), FrozenLakeConfig(slippery=True), SokobanConfig()])
def test_demonstrations_win_and_stay_in_their_split(config: EnvConfig) -> None:
    shown = collect_demonstrations(lambda: build_env(config), 12, max_turns=30)
    assert len(shown) == 12
    assert {split_of(episode.seed) for episode in shown} == {Split.DEMONSTRATION}
    for episode in shown:
        env = build_env(config)
        assert env.reset(episode.seed).text == episode.turns[0].observation
        steps = [env.step(action) for turn in episode.turns for action in turn.actions]
        assert steps[-1].info["success"]


def test_several_actions_go_into_one_turn() -> None:
    shown = collect_demonstrations(lambda: build_env(FrozenLakeConfig()), 20, max_turns=8, max_actions_per_turn=3)
    assert max(len(turn.actions) for episode in shown for turn in episode.turns) == 3


def test_random_demonstrations_win_are_reproducible_and_seldom_the_best() -> None:
    shown, again = (
        collect_demonstrations(lambda: build_env(FrozenLakeConfig()), 40, max_turns=8, epsilon=1.0) for _ in range(2)
    )
    assert shown == again
    env, best = build_env(FrozenLakeConfig()), []
    for episode in shown:
        env.reset(episode.seed)
        for turn in episode.turns:
            best.append(turn.actions[0] == env.expert_action())
            step = env.step(turn.actions[0])
        assert step.info["success"]
    assert 0.3 < sum(best) / len(best) < 0.8


def test_an_unsolvable_env_is_an_error() -> None:
    with pytest.raises(ConfigError, match="solved"):
        collect_demonstrations(lambda: build_env(SokobanConfig(min_solution_pushes=3)), 2, max_turns=1)
