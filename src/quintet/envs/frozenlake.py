"""FrozenLake with random maps and the dynamics of gymnasium."""

from __future__ import annotations

from collections import deque
from copy import copy
from functools import cached_property, lru_cache

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from quintet.config.native.envs import FrozenLakeConfig
from quintet.envs import grid
from quintet.envs.env import IMAGE, Env
from quintet.envs.frozenlake_solver import shortest_policy, slippery_policy
from quintet.envs.start_states import layout_split, split_of
from quintet.errors import ConfigError
from quintet.records import Observation, Step

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""In the order of gymnasium's action numbers."""

MAX_ATTEMPTS = 20_000
"""Maps generated for one seed before the options are considered impossible."""
ICE, WATER = (236, 246, 252), (37, 99, 168)


@lru_cache(maxsize=1)
def _tiles() -> dict[str, np.ndarray]:
    ice, hole = grid.plain(ICE), grid.disc(grid.plain(ICE), WATER, 0.42)
    goal = grid.square(grid.plain((220, 252, 231)), (22, 163, 74), 0.4)
    return {
        "_": ice,
        "O": hole,
        "G": goal,
        "P": grid.agent(ice),
        "X": grid.agent(hole, in_hole=True),
        "√": grid.agent(goal),
    }


@lru_cache(maxsize=4)
def _tiles_of(size: int) -> dict[str, np.ndarray]:
    return grid.resize_tiles(_tiles(), size)


class FrozenLake(Env):
    """Env with start, goal and holes random by seed; the goal is always reachable."""

    actions = tuple(MOVES)

    def __init__(self, config: FrozenLakeConfig) -> None:
        self._config = config

    def instruction(self) -> str:
        slip = " The ice is slippery." if self._config.slippery else ""
        if self._config.render == "vision":
            return (
                "Reach the green goal over the frozen lake. You are orange, blue discs are holes."
                f"{slip} Answer with Left, Down, Right or Up."
            )
        if self._config.observation == "coordinates":
            return (
                "Reach the goal over the frozen lake. States list the (row, column) of start, goal, holes and yourself,"
                f" from (0, 0) at the top left.{slip} Answer with Left, Down, Right or Up."
            )
        return (
            "Reach the goal G over the frozen lake. P is you, _ is ice, O is a hole, # is the edge,"
            f" X is you in a hole, √ is you on the goal.{slip} Answer with Left, Down, Right or Up."
        )

    def reset(self, seed: int) -> Observation:
        config = self._config
        rows, lake = _build_lake(config, seed)
        self._env = copy(lake)
        state, _ = self._env.reset(seed=seed)
        self._rows = [row.replace("S", "F") for row in rows]
        self._empty_grid = [list(row.replace("F", "_").replace("H", "O")) for row in self._rows]
        self._goal, self._holes = (grid.positions_of(self._rows, cell) for cell in "GH")
        self._start = self._position = divmod(int(state), config.size)
        self._steps = 0
        self.__dict__.pop("_policy", None)
        return self._observation()

    def step(self, action: str) -> Step:
        """See `Env.step`; only reaching the goal is rewarded."""
        state, reward, terminated, _, _ = self._env.step(self.actions.index(action))
        self._position = divmod(int(state), self._config.size)
        self._steps += 1
        truncated = not terminated and self._steps >= self._config.max_steps
        success = self._rows[self._position[0]][self._position[1]] == "G"
        reward = self._config.goal_reward * float(reward)
        return Step(self._observation(), reward, bool(terminated), truncated, {"success": success})

    def render(self) -> np.ndarray:
        """See `Env.render`; unlike gymnasium's image, it shows the agent in a hole."""
        return grid.draw_tiles(self._symbols(), _tiles())

    def _observation(self) -> Observation:
        symbols = self._symbols()
        relations = self._config.relation_scoring.grid_relations(symbols)
        if self._config.render == "text":
            return Observation(self._text(symbols), relations=relations)
        return Observation(IMAGE, (grid.draw_tiles(symbols, _tiles_of(self._config.tile_size)),), relations)

    def expert_action(self) -> str:
        """Return an optimal move: on a shortest path, or by value iteration on slippery ice."""
        return self._policy[self._position[0] * self._config.size + self._position[1]]

    def expert_thought(self) -> str:
        """Return the safe moves."""
        size, (row, column) = self._config.size, self._position
        cells = {word: (row + dy, column + dx) for word, (dy, dx) in MOVES.items()}
        inside = {word: (y, x) for word, (y, x) in cells.items() if 0 <= y < size and 0 <= x < size}
        return " ".join(["safe", *(word for word, (y, x) in inside.items() if self._rows[y][x] != "H")])

    def _symbols(self) -> list[list[str]]:
        symbols = [row.copy() for row in self._empty_grid]
        row, column = self._position
        symbols[row][column] = {"_": "P", "O": "X", "G": "√"}[symbols[row][column]]
        return symbols

    def _text(self, symbols: list[list[str]]) -> str:
        row, column = self._position
        on = {"G": "Player on goal", "H": "Player in hole"}.get(self._rows[row][column], "Player")
        positions = {"Start": [self._start], "Goal": self._goal, on: [self._position], "Holes": self._holes}
        return grid.state_text(self._config.observation, symbols, positions, self._position, MOVES)

    @cached_property
    def _policy(self) -> list[str]:
        """Optimal action word in each cell."""
        best = slippery_policy(self._env.P) if self._config.slippery else shortest_policy(self._env.P)
        return [self.actions[action] for action in best]


@lru_cache(maxsize=1024)
def _build_lake(config: FrozenLakeConfig, seed: int) -> tuple[list[str], FrozenLakeEnv]:
    """Return map and gymnasium env of a seed, built once for all samples of a group.

    Shallow copies of the env are independent: they share transitions, but not position and slips.
    """
    rows = _generate_map(config, seed)
    return rows, FrozenLakeEnv(desc=rows, is_slippery=config.slippery, success_rate=config.success_rate)


def _generate_map(config: FrozenLakeConfig, seed: int) -> list[str]:
    """Return rows over S, F, H and G whose layout belongs to the split of the seed."""
    rng = np.random.default_rng(seed)
    size, split = config.size, split_of(seed)
    for _ in range(MAX_ATTEMPTS):
        cells = np.where(rng.random(size * size) < config.floor_density, "F", "H")
        start, goal = rng.choice(size * size, 2, replace=False)
        cells[start], cells[goal] = "S", "G"
        rows = ["".join(row) for row in cells.reshape(size, size)]
        if layout_split("\n".join(rows)) is split and _is_solvable(rows):
            return rows
    raise ConfigError(
        f"none of {MAX_ATTEMPTS} random maps of {size}×{size} cells can be solved",
        key="env.floor_density",
        value=config.floor_density,
        hint="raise env.floor_density",
    )


def _is_solvable(rows: list[str]) -> bool:
    """Return whether G can be reached from S, by breadth-first search around the holes."""
    start = next((r, row.index("S")) for r, row in enumerate(rows) if "S" in row)
    queue, visited = deque([start]), {start}
    while queue:
        row, column = queue.popleft()
        if rows[row][column] == "G":
            return True
        for dy, dx in MOVES.values():
            cell = row + dy, column + dx
            inside = 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows)
            if inside and cell not in visited and rows[cell[0]][cell[1]] != "H":
                visited.add(cell)
                queue.append(cell)
    return False
