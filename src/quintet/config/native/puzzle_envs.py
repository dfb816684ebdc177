"""Configuration of the puzzles of RAGEN: Sudoku, 2048 and the pocket cube."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from quintet.config.native.env_section import InteractiveEnvSection, register_env
from quintet.config.native.section import Share


@register_env("puzzles.sudoku:Sudoku", "fill a Sudoku grid number by number")
class SudokuConfig(InteractiveEnvSection, name="sudoku"):
    """Fill a grid so that each row, column and box has every number once."""

    has_expert: ClassVar[bool] = True

    size: Literal[4, 9, 16] = 9
    """Rows, columns and numbers."""
    difficulty: Literal["easy", "medium", "hard"] = "easy"
    """Share of empty cells at the start: 0.4, 0.5 or 0.6."""
    observation: Literal["plain", "marked", "hints"] = "hints"
    """`plain` shows the numbers; `marked` has brackets around the given ones, and the result of the last action;
    `hints` adds the progress and, with at most ten empty cells, the numbers that fit in each."""
    list_candidates: bool = True
    """`hints` lists these numbers."""
    max_steps: PositiveInt = 81
    """Actions after which the env truncates the episode."""
    correct_reward: float = 1.0
    """Reward of a number that the solution has in this cell; half of it for another number that fits."""
    invalid_reward: float = -0.1
    """Reward of an action that is not understood, or whose number does not fit; it changes nothing."""
    solved_reward: float = 10.0
    """Added to the reward of the action that solves the puzzle."""


@register_env("puzzles.game_2048:Game2048", "merge tiles up to 2048")
class Game2048Config(InteractiveEnvSection, name="game_2048"):
    """Slide the tiles of a grid, of which equal neighbors merge; the game ends when no tile can move."""

    size: Annotated[int, Field(ge=2, le=8)] = 4
    """Cells per side."""
    two_probability: Share = 0.9
    """Probability that a new tile is a 2 rather than a 4."""
    log_reward: bool = True
    """Reward 0.1 × log2(1 + sum of the merged tiles), and 0 for a move that changes nothing; otherwise that sum, and
    -0.1 for such a move."""


@register_env("puzzles.pocket_cube:PocketCube", "solve a 2×2×2 cube")
class PocketCubeConfig(InteractiveEnvSection, name="rubikscube"):
    """Turn the faces of a 2×2×2 cube until each has one color."""

    has_expert: ClassVar[bool] = True

    scramble_depth: PositiveInt = 5
    """Random turns of the solved cube from which an episode starts."""
    max_steps: PositiveInt = 20
    """Turns after which the env truncates the episode."""
