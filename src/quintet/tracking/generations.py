"""Validation generations in loggers: episodes as rows of a table with observation, response, reward and images."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from quintet.records import Trajectory

TABLE = "val/generations"
"""Name of the table in loggers."""


@dataclass(frozen=True, slots=True)
class LoggedGeneration:
    """Episode as a logger shows it."""

    input: str
    """First observation, or the prompt."""
    output: str
    """Response; with several turns all of them, with the observations between them."""
    score: float
    images: tuple[np.ndarray, ...]
    """Images of all turns in order, RGB `uint8[height, width, 3]`."""


COLUMNS = ("step", "input", "output", "score")
"""Columns of verl's table in loggers whose rows are generations."""


@runtime_checkable
class GenerationLogger(Protocol):
    """A logger that shows generations."""

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> None:
        """Record the generations of the validation after `step`."""


def select_generations(trajectories: Sequence[Trajectory], count: int, seed: int) -> list[LoggedGeneration]:
    """Return `count` episodes, fewer if there are not as many, selected at random by `seed`: with the same number of
    episodes these are the same start states in every validation."""
    order = random.Random(seed).sample(range(len(trajectories)), min(count, len(trajectories)))  # noqa: S311
    return [_generation(trajectories[index]) for index in order]


def _generation(trajectory: Trajectory) -> LoggedGeneration:
    turns = trajectory.turns
    texts = [text for turn in turns for text in (turn.observation, turn.text)]
    output = texts[1] if len(turns) == 1 else "\n".join(_labelled(texts[1:]))
    images = tuple(image for turn in turns for image in turn.images)
    return LoggedGeneration(texts[0] if texts else "", output if texts else "", trajectory.reward, images)


def _labelled(texts: Sequence[str]) -> list[str]:
    """Return responses and observations in turn, each with its role."""
    return [f"{'observation' if number % 2 else 'response'}: {text}" for number, text in enumerate(texts)]


def table_columns(num_generations: int, num_images: int) -> list[str]:
    """Return the columns of verl's and VAGEN's table, which has a row per validation.

    >>> table_columns(1, 2)
    ['step', 'input_1', 'output_1', 'score_1', 'image_1_1', 'image_1_2']
    """
    columns = ["step"]
    for row in range(1, num_generations + 1):
        columns += [f"input_{row}", f"output_{row}", f"score_{row}"]
        columns += [f"image_{row}_{number}" for number in range(1, num_images + 1)]
    return columns
