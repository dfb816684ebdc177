"""If these fail, demonstrations teach detours, and walk into holes where the ice slips."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from sokoban_levels import parse_level

from quintet.config.native.envs import FrozenLakeConfig, SokobanConfig
from quintet.data.demonstrations import collect_demonstrations
from quintet.envs.env import UnsolvableError
from quintet.envs.factory import build_env
from quintet.envs.frozenlake_solver import shortest_policy, slippery_policy
from quintet.envs.sokoban import Sokoban, solve
from quintet.errors import ConfigError


def _steps_to_goal(env: FrozenLakeEnv, policy: list[int]) -> int:
    state, steps = 0, 0
    while steps < 100:
        ((_, state, reward, done),) = env.P[state][policy[state]]
        steps += 1
        if done:
            return steps if reward else -1
    return -1


def _shortest(rows: list[str]) -> int:
    size, seen, queue = len(rows), {(0, 0)}, deque([((0, 0), 0)])
    while queue:
        (row, column), steps = queue.popleft()
        if rows[row][column] == "G":
            return steps
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if min(cell) >= 0 and max(cell) < size and rows[cell[0]][cell[1]] != "H" and cell not in seen:
                seen.add(cell)
                queue.append((cell, steps + 1))
    return -1


@pytest.mark.parametrize("seed", range(10))
def test_the_way_over_firm_ice_is_a_shortest_one(seed: int) -> None:
    rows = generate_random_map(size=7, p=0.7, seed=seed)
    env = FrozenLakeEnv(desc=rows, is_slippery=False)
    assert _steps_to_goal(env, shortest_policy(env.P)) == _shortest(rows)


def test_value_iteration_hurries_where_nothing_slips() -> None:
    rows = generate_random_map(size=6, p=0.8, seed=3)
    env = FrozenLakeEnv(desc=rows, is_slippery=False)
    assert _steps_to_goal(env, slippery_policy(env.P)) == _shortest(rows)


def test_on_slippery_ice_it_turns_its_back_to_the_hole() -> None:
    """Between two holes the only move that can't fall sideways is none; beside one, it's away from it.

    Hand-computed on `SFG/HHF/FFF`: at the start, Up slips only to Left and Right, never to Down.
    """
    env = FrozenLakeEnv(desc=["SFG", "HHF", "FFF"], is_slippery=True, success_rate=1 / 3)
    policy = slippery_policy(env.P)
    assert policy[0] == 3
    assert policy[1] == 3


def test_values_agree_with_the_linear_system() -> None:
    """No other policy on a 3×3 lake is worth more at the start than the one found."""
    env = FrozenLakeEnv(desc=["SFF", "FHF", "FFG"], is_slippery=True, success_rate=0.8)
    actual = _worth(env, slippery_policy(env.P))
    rng = np.random.default_rng(0)
    assert all(_worth(env, rng.integers(0, 4, 9).tolist()) <= actual + 1e-9 for _ in range(300))


def _worth(env: FrozenLakeEnv, policy: list[int], gamma: float = 0.99) -> float:
    onward, reward = np.zeros((9, 9)), np.zeros(9)
    for state in range(9):
        for probability, new, gain, done in env.P[state][policy[state]]:
            reward[state] += probability * gain
            onward[state, new] += probability * (not done)
    return float(np.linalg.solve(np.eye(9) - gamma * onward, reward)[0])


def test_a_box_in_a_corner_is_known_to_be_lost() -> None:
    level = parse_level(" # # # # #\n # X _ _ #\n # _ P O #\n # _ _ _ #\n # # # # #")
    assert solve(level) is None


def test_a_lost_episode_is_skipped_not_a_crash() -> None:
    env = Sokoban(SokobanConfig())
    env.reset(1)
    env._level = parse_level(" # # # # #\n # X _ _ #\n # _ P O #\n # _ _ _ #\n # # # # #")
    env._plan = []
    with pytest.raises(UnsolvableError):
        env.expert_action()


def test_a_env_that_nobody_wins_is_given_up_soon() -> None:
    with pytest.raises(ConfigError, match=r"solved \d episodes in \d\d\d tries"):
        collect_demonstrations(lambda: build_env(FrozenLakeConfig(size=16, floor_density=1.0)), 400, max_turns=1)
