"""FrozenLake: random maps of our own, gymnasium's dynamics."""

from __future__ import annotations

from collections import deque
from copy import copy
from functools import cached_property, lru_cache

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from quintet.config.native import FrozenLakeConfig
from quintet.envs import grid
from quintet.envs.seeds import layout_split, split_of
from quintet.envs.solvers import shortest_policy, slippery_policy
from quintet.errors import ConfigError
from quintet.records import Observation, Step

__all__ = ["FrozenLake"]

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""In gymnasium's order: the position is its action number."""

DRAWS = 20_000
"""Maps tried for one seed before the options are held to be impossible."""
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
        "X": grid.agent(hole, sunk=True),
        "√": grid.agent(goal),
    }


class FrozenLake:
    """Start, goal and holes are random by seed; the goal can always be reached."""

    actions = tuple(MOVES)

    def __init__(self, config: FrozenLakeConfig) -> None:
        self._config = config

    def instruction(self) -> str:
        """See `World.instruction`."""
        slip = " The ice is slippery." if self._config.slippery else ""
        return (
            "Reach the goal G over the frozen lake. P is you, _ is ice, O is a hole, # is the edge,"
            f" X is you in a hole, √ is you on the goal.{slip} Answer with Left, Down, Right or Up."
        )

    def reset(self, seed: int) -> Observation:
        """See `World.reset`."""
        config = self._config
        rows, lake = _lake(config, seed)
        self._env = copy(lake)
        state, _ = self._env.reset(seed=seed)
        self._rows = [row.replace("S", "F") for row in rows]
        self._place = divmod(int(state), config.size)
        self._steps = 0
        self.__dict__.pop("_plan", None)
        return Observation(self._text())

    def step(self, action: str) -> Step:
        """See `World.step`; 1 for reaching the goal, gymnasium's own reward."""
        state, reward, terminated, _, _ = self._env.step(self.actions.index(action))
        self._place = divmod(int(state), self._config.size)
        self._steps += 1
        truncated = not terminated and self._steps >= self._config.max_steps
        won = self._rows[self._place[0]][self._place[1]] == "G"
        return Step(Observation(self._text()), float(reward), bool(terminated), truncated, {"success": won})

    def render(self) -> np.ndarray:
        """See `World.render`; shows the agent in the hole, which gymnasium's own frame doesn't."""
        return grid.paint(self._symbols(), _tiles())

    def close(self) -> None:
        """See `World.close`."""

    def expert_action(self) -> str:
        """A best move from here: on the shortest way, or by value iteration on slippery ice."""
        return self._plan[self._place[0] * self._config.size + self._place[1]]

    def expert_thought(self) -> str:
        """Where one may step."""
        size, (row, column) = self._config.size, self._place
        places = {word: (row + dy, column + dx) for word, (dy, dx) in MOVES.items()}
        inside = {word: (y, x) for word, (y, x) in places.items() if 0 <= y < size and 0 <= x < size}
        return " ".join(["safe", *(word for word, (y, x) in inside.items() if self._rows[y][x] != "H")])

    def _symbols(self) -> list[list[str]]:
        symbols = [["_" if cell == "F" else "O" if cell == "H" else cell for cell in row] for row in self._rows]
        row, column = self._place
        symbols[row][column] = {"_": "P", "O": "X", "G": "√"}[symbols[row][column]]
        return symbols

    def _text(self) -> str:
        symbols = self._symbols()
        text = grid.grid_text(symbols)
        if self._config.observation == "grid":
            return text
        return f"{text}\n{grid.neighbors_text(symbols, *self._place, MOVES)}"

    @cached_property
    def _plan(self) -> list[str]:
        """The best action word in each cell."""
        best = slippery_policy(self._env.P) if self._config.slippery else shortest_policy(self._env.P)
        return [self.actions[action] for action in best]


@lru_cache(maxsize=1024)
def _lake(config: FrozenLakeConfig, seed: int) -> tuple[list[str], FrozenLakeEnv]:
    """Map and gymnasium world of a seed, made once for all samples of its group.

    A shallow copy of the world plays on its own: transitions are shared, position and slips are not.
    """
    rows = _draw_map(config, seed)
    return rows, FrozenLakeEnv(desc=rows, is_slippery=config.slippery, success_rate=config.success_rate)


def _draw_map(config: FrozenLakeConfig, seed: int) -> list[str]:
    """Rows over S, F, H and G, of the split that the seed belongs to."""
    rng = np.random.default_rng(seed)
    size, wanted = config.size, split_of(seed)
    for _ in range(DRAWS):
        cells = np.where(rng.random(size * size) < config.floor_density, "F", "H")
        start, goal = rng.choice(size * size, 2, replace=False)
        cells[start], cells[goal] = "S", "G"
        rows = ["".join(row) for row in cells.reshape(size, size)]
        if layout_split("\n".join(rows)) is wanted and _reachable(rows):
            return rows
    raise ConfigError(
        f"no lake of {size}×{size} cells that can be crossed among {DRAWS} drawn",
        key="world.floor_density",
        value=config.floor_density,
        hint="raise world.floor_density",
    )


def _reachable(rows: list[str]) -> bool:
    """Breadth-first search from S to G around the holes."""
    start = next((r, row.index("S")) for r, row in enumerate(rows) if "S" in row)
    queue, seen = deque([start]), {start}
    while queue:
        row, column = queue.popleft()
        if rows[row][column] == "G":
            return True
        for dy, dx in MOVES.values():
            place = row + dy, column + dx
            inside = 0 <= place[0] < len(rows) and 0 <= place[1] < len(rows)
            if inside and place not in seen and rows[place[0]][place[1]] != "H":
                seen.add(place)
                queue.append(place)
    return False
