"""Frames of videos: the pictures of several robots as tiles, each with a caption."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

MIN_TILE_HEIGHT = 160
"""Pixels; smaller pictures are enlarged by a whole number, so that captions can be read."""
LINE_HEIGHT = 13
FONT_SIZE = 11
BACKGROUND, FOREGROUND = (24, 24, 27), (228, 228, 231)
OUTCOME_COLORS = {"success": (74, 222, 128), "failed": (248, 113, 113), "terminated": (248, 113, 113)}


@dataclass(frozen=True, slots=True)
class RobotCaption:
    """Caption below a frame of a robot's video: instruction, rewards and outcome."""

    instruction: str
    reward: float | None = None
    """Reward of the last action; None before the first."""
    episode_return: float = 0.0
    """Sum of rewards so far."""
    outcome: str = ""
    """`success`, `terminated`, `truncated` or `failed` from the end of the episode; empty before."""


def tile_frames(frames: np.ndarray, captions: Sequence[RobotCaption] | None) -> np.ndarray:
    """Return one picture of all robots, uint8 [rows · h, columns · w, 3], with ⌊√n⌋ rows as in RLinf.

    Args:
        frames: RGB uint8 [n, height, width, 3].
        captions: One per robot, shown below its picture; None shows the pictures only.
    """
    tiles = _enlarged(frames)
    if captions is not None:
        strips = np.stack([_caption(caption, tiles.shape[2]) for caption in captions])
        tiles = np.concatenate([tiles, strips], axis=1)
    count, height, width, _ = tiles.shape
    rows = math.isqrt(count)
    columns = math.ceil(count / rows)
    grid = np.zeros((rows * columns, height, width, 3), np.uint8)
    grid[:count] = tiles
    return grid.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)


def _enlarged(frames: np.ndarray) -> np.ndarray:
    factor = math.ceil(MIN_TILE_HEIGHT / frames.shape[1])
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def _caption(caption: RobotCaption, width: int) -> np.ndarray:
    """Return the strip below a picture: reward and return, outcome, and two lines of the instruction."""
    reward = "" if caption.reward is None else f"reward {caption.reward:.2f}  "
    numbers = f"{reward}return {caption.episode_return:.2f}"
    return _strip(numbers, caption.outcome, caption.instruction, width)


@lru_cache(maxsize=256)
def _strip(numbers: str, outcome: str, instruction: str, width: int) -> np.ndarray:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, 4 * LINE_HEIGHT), BACKGROUND)
    draw, font = ImageDraw.Draw(image), _font()
    draw.text((3, 0), numbers, FOREGROUND, font)
    draw.text((3, LINE_HEIGHT), outcome, OUTCOME_COLORS.get(outcome, FOREGROUND), font)
    columns = max(8, int(width / draw.textlength("abcdefghij", font) * 10))
    for line, text in enumerate(textwrap.wrap(instruction, columns, max_lines=2, placeholder="…"), 2):
        draw.text((3, line * LINE_HEIGHT), text, FOREGROUND, font)
    return np.asarray(image)


@lru_cache(maxsize=1)
def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(FONT_SIZE)
