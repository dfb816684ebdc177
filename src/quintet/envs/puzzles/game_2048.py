"""The game 2048 with the rewards of RAGEN's environment."""

from __future__ import annotations

import math
import random

import numpy as np

from quintet.config.native.puzzle_envs import Game2048Config
from quintet.envs.bandit import text_image
from quintet.envs.env import Env
from quintet.records import Observation, Step

GOAL = 2048
NO_MOVE_REWARD = -0.1
"""Reward of a move that changes nothing, without `log_reward`."""
LOG_SCALE = 0.1
Grid = list[list[int]]


class Game2048(Env):
    """Grid with two tiles by the seed. The game ends when no tile can move, and succeeds if a tile is then at least
    2048."""

    actions = ("Up", "Right", "Down", "Left")

    def __init__(self, config: Game2048Config) -> None:
        self._config = config

    def instruction(self) -> str:
        size = self._config.size
        return (
            f"Play 2048 on a grid of {size} × {size} cells. A move slides all tiles in one direction, and two equal"
            " tiles that meet become one of their sum. Then a tile of 2 or 4 appears in an empty cell. Reach 2048."
            f" Answer with {', '.join(self.actions[:-1])} or {self.actions[-1]}."
        )

    def reset(self, seed: int) -> Observation:
        # text as seed: close numbers give unrelated draws
        self._rng = random.Random(f"2048/{seed}")  # noqa: S311 - a game, no secret
        self._grid = [[0] * self._config.size for _ in range(self._config.size)]
        self._score = 0
        self._add_tile()
        self._add_tile()
        return Observation(self._text())

    def step(self, action: str) -> Step:
        """See `Env.step`. The reward is the sum of the tiles that result from merges, by `log_reward` its logarithm."""
        grid, merged = slide(self._grid, action)
        moved = grid != self._grid
        if moved:
            self._grid = grid
            self._score += merged
            self._add_tile()
        over = moved and not self._moves()
        success = over and max(map(max, self._grid)) >= GOAL
        return Step(Observation(self._text()), self._reward(merged, moved=moved), over, False, {"success": success})

    def _reward(self, merged: int, *, moved: bool) -> float:
        if self._config.log_reward:
            return LOG_SCALE * math.log2(merged + 1)
        return float(merged) if moved else NO_MOVE_REWARD

    def _add_tile(self) -> None:
        """Put a tile of 2 or 4 into an empty cell."""
        row, column = self._rng.choice(
            [(r, c) for r, line in enumerate(self._grid) for c, n in enumerate(line) if not n]
        )
        self._grid[row][column] = 2 if self._rng.random() < self._config.two_probability else 4

    def _moves(self) -> list[str]:
        """Return the moves that change the grid."""
        return [action for action in self.actions if slide(self._grid, action)[0] != self._grid]

    def render(self) -> np.ndarray:
        return text_image(self._text())

    def _text(self) -> str:
        lines = [f"Row {number}: {line}" for number, line in enumerate(self._grid, 1)]
        possible = ", ".join(self._moves()) or "none"
        return "\n".join([*lines, f"Possible moves: {possible}", f"Score: {self._score}"])


def slide(grid: Grid, action: str) -> tuple[Grid, int]:
    """Return the grid after a move, and the sum of the tiles that result from merges; each tile merges once."""
    lines = [list(line) for line in (zip(*grid, strict=True) if action in ("Up", "Down") else grid)]
    backwards = action in ("Right", "Down")
    merged = [_merge(line[::-1] if backwards else line) for line in lines]
    slid = [line[::-1] if backwards else line for line, _ in merged]
    if action in ("Up", "Down"):
        slid = [list(line) for line in zip(*slid, strict=True)]
    return slid, sum(total for _, total in merged)


def _merge(line: list[int]) -> tuple[list[int], int]:
    """Return a line whose tiles slid to its start, and the sum of the merged ones."""
    tiles = [number for number in line if number]
    result: list[int] = []
    total, index = 0, 0
    while index < len(tiles):
        pair = tiles[index : index + 2]
        if len(pair) == 2 and pair[0] == pair[1]:
            result.append(2 * pair[0])
            total += 2 * pair[0]
            index += 2
        else:
            result.append(pair[0])
            index += 1
    return result + [0] * (len(line) - len(result)), total
