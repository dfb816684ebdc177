"""Sudoku with the actions and rewards of RAGEN's environment."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from quintet.config.native.puzzle_envs import SudokuConfig
from quintet.envs.bandit import text_image
from quintet.envs.env import TEXT, Env, UnsolvableError
from quintet.envs.start_states import layout_split, split_of
from quintet.records import Observation, Step

EMPTY_SHARES = {"easy": 0.4, "medium": 0.5, "hard": 0.6}
MAX_LISTED = 10
"""Empty cells up to which their candidates are listed."""
_NUMBER = r"(\d+)"
PLACE_ACTION = re.compile(
    rf"(?:place\s+)?{_NUMBER}\s+at\s+(?:row\s+{_NUMBER}\s+col\s+{_NUMBER}|\(?{_NUMBER},\s*{_NUMBER}\)?)", re.IGNORECASE
)
ACTION_TRIPLE = re.compile(rf"{_NUMBER},\s*{_NUMBER},\s*{_NUMBER}")


class Sudoku(Env):
    """Grid with given numbers by the seed. A number that conflicts with another is refused, so that a full grid is a
    solution."""

    actions = (TEXT,)

    def __init__(self, config: SudokuConfig) -> None:
        self._config = config
        self._box = math.isqrt(config.size)

    def instruction(self) -> str:
        size, example = self._config.size, "place 3 at row 1 col 2"
        return (
            f"Fill the grid so that each row, column and box of {self._box} × {self._box} cells has every number from 1"
            f" to {size} once. A dot is an empty cell, and given numbers are fixed. Answer with a number and its cell,"
            f" such as {example}, or with row, column and number: 1,2,3."
        )

    def reset(self, seed: int) -> Observation:
        self._clues, self._solution = draw_puzzle(self._config.size, self._config.difficulty, seed)
        self._grid = [list(row) for row in self._clues]
        self._steps, self._feedback = 0, ""
        return self._observation()

    def step(self, action: str) -> Step:
        """See `Env.step`. Rewards: `correct_reward` or half of it for a number that fits, `solved_reward` for the last
        one, `invalid_reward` otherwise. Numbers of earlier actions may be replaced."""
        self._steps += 1
        reward, self._feedback = self._place(action)
        solved = all(map(all, self._grid))
        if solved:
            self._feedback += " The puzzle is solved."
            reward += self._config.solved_reward
        truncated = not solved and self._steps >= self._config.max_steps
        return Step(self._observation(), reward, solved, truncated, {"success": solved})

    def _place(self, action: str) -> tuple[float, str]:
        """Execute an action; return its reward and a description of its effect."""
        refused = self._config.invalid_reward
        placed = parse_placement(action)
        if placed is None:
            return refused, "The answer is not a number and a cell."
        row, column, number = placed
        size = self._config.size
        if not (1 <= row <= size and 1 <= column <= size and 1 <= number <= size):
            return refused, f"Row, column and number are from 1 to {size}."
        if self._clues[row - 1][column - 1]:
            return refused, f"The number at ({row},{column}) is given."
        if number not in self._candidates(row - 1, column - 1):
            return refused, f"{number} does not fit at ({row},{column})."
        self._grid[row - 1][column - 1] = number
        if self._solution[row - 1][column - 1] == number:
            return self._config.correct_reward, f"{number} at ({row},{column}) is right."
        return self._config.correct_reward / 2, f"{number} fits at ({row},{column}), but another number is right."

    def _candidates(self, row: int, column: int) -> list[int]:
        """Return the numbers that neither row, column nor box has."""
        top, left = row - row % self._box, column - column % self._box
        used = {*self._grid[row], *(line[column] for line in self._grid)}
        used |= {number for line in self._grid[top : top + self._box] for number in line[left : left + self._box]}
        return [number for number in range(1, self._config.size + 1) if number not in used]

    def render(self) -> np.ndarray:
        return text_image(self._text())

    def expert_action(self) -> str:
        """Return a right number that fits.

        Raises:
            UnsolvableError: numbers that differ from the solution are in the way of all right numbers.
        """
        for row, column in self._cells():
            number = self._solution[row][column]
            if self._grid[row][column] != number and number in self._candidates(row, column):
                return f"place {number} at row {row + 1} col {column + 1}"
        raise UnsolvableError("no number of the solution fits")

    def expert_thought(self) -> str:
        """Return the number of empty cells."""
        return f"{sum(row.count(0) for row in self._grid)} empty"

    def _cells(self) -> Iterator[tuple[int, int]]:
        return ((row, column) for row in range(self._config.size) for column in range(self._config.size))

    def _observation(self) -> Observation:
        return Observation(self._text())

    def _text(self) -> str:
        if self._config.observation == "plain":
            return "\n".join(self._lines(marked=False))
        lines = [*self._lines(marked=True), *([self._feedback] if self._feedback else [])]
        return "\n".join([*lines, *self._hints()] if self._config.observation == "hints" else lines)

    def _lines(self, *, marked: bool) -> Iterator[str]:
        """Yield the rows of the grid, boxes apart from each other."""
        for row in range(self._config.size):
            cells = [self._cell(row, column, marked=marked) for column in range(self._config.size)]
            boxes = [" ".join(cells[start : start + self._box]) for start in range(0, len(cells), self._box)]
            line = " | ".join(boxes)
            if row and row % self._box == 0:
                yield "-" * len(line)
            yield line

    def _cell(self, row: int, column: int, *, marked: bool) -> str:
        number = self._grid[row][column]
        width = len(str(self._config.size))
        text = str(number).rjust(width) if number else ".".rjust(width)
        if not marked:
            return text
        return f"[{text}]" if self._clues[row][column] else f" {text} "

    def _hints(self) -> Iterator[str]:
        """Yield the candidates of the last empty cells, and the progress."""
        empty = [(row, column) for row, column in self._cells() if not self._grid[row][column]]
        if self._config.list_candidates and len(empty) <= MAX_LISTED:
            for row, column in empty:
                fitting = ", ".join(map(str, self._candidates(row, column))) or "none"
                yield f"Fitting at ({row + 1},{column + 1}): {fitting}"
        total = self._config.size**2
        yield f"{total - len(empty)} of {total} cells filled, step {self._steps} of {self._config.max_steps}"


def parse_placement(action: str) -> tuple[int, int, int] | None:
    """Return row, column and number of an action, from 1; None if it has none.

    RAGEN's forms, anywhere in the text: `place 5 at row 2 col 3`, `place 5 at (2,3)`, `5 at 2,3`, `(2,3,5)`, `2,3,5`.
    """
    if match := PLACE_ACTION.search(action):
        number, row, column = (int(group) for group in match.groups() if group is not None)
        return row, column, number
    match = ACTION_TRIPLE.search(action)
    if match is None:
        return None
    row, column, number = map(int, match.groups())
    return row, column, number


@lru_cache(maxsize=1024)
def draw_puzzle(size: int, difficulty: str, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return a puzzle, 0 for empty cells, and its solution. The puzzle belongs to the split of the seed, so that no two
    splits have one in common. Other solutions may exist."""
    rng, split = random.Random(f"sudoku/{size}/{seed}"), split_of(seed)  # noqa: S311 - a game, no secret
    cells = [(row, column) for row in range(size) for column in range(size)]
    while True:
        solution = _draw_solution(size, rng)
        puzzle = [list(row) for row in solution]
        for row, column in rng.sample(cells, int(len(cells) * EMPTY_SHARES[difficulty])):
            puzzle[row][column] = 0
        if layout_split(str(puzzle)) is split:
            return puzzle, solution


def _draw_solution(size: int, rng: random.Random) -> list[list[int]]:
    """Return a full grid: one pattern with its rows, columns and numbers exchanged at random where the rules allow."""
    box = math.isqrt(size)

    def shuffled_lines() -> list[int]:
        bands = [[band * box + line for line in rng.sample(range(box), box)] for band in rng.sample(range(box), box)]
        return [line for band in bands for line in band]

    rows = shuffled_lines()
    columns = shuffled_lines()
    numbers = rng.sample(range(1, size + 1), size)
    return [[numbers[(box * (row % box) + row // box + column) % size] for column in columns] for row in rows]
