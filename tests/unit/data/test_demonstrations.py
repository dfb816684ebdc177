"""If these fail, the warm start learns from lost games or from maps of another split."""

from __future__ import annotations

import pytest

from quintet.config.native import FrozenLakeConfig, SokobanConfig, WorldConfig
from quintet.data.demonstrations import demonstrate
from quintet.envs.catalogue import make_world
from quintet.envs.seeds import Split, split_of
from quintet.errors import ConfigError


@pytest.mark.parametrize("config", [FrozenLakeConfig(), FrozenLakeConfig(slippery=True), SokobanConfig()])
def test_demonstrations_win_and_stay_in_their_split(config: WorldConfig) -> None:
    shown = demonstrate(lambda: make_world(config), 12, max_turns=30)
    assert len(shown) == 12
    assert {split_of(game.seed) for game in shown} == {Split.DEMONSTRATION}
    for game in shown:
        world = make_world(config)
        assert world.reset(game.seed).text == game.turns[0].observation
        steps = [world.step(action) for turn in game.turns for action in turn.actions]
        assert steps[-1].info["success"]


def test_several_actions_go_into_one_turn() -> None:
    shown = demonstrate(lambda: make_world(FrozenLakeConfig()), 20, max_turns=8, max_actions_per_turn=3)
    assert max(len(turn.actions) for game in shown for turn in game.turns) == 3


def test_a_game_nobody_wins_in_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="won"):
        demonstrate(lambda: make_world(SokobanConfig(min_solution_pushes=3)), 2, max_turns=1)
