"""Content of the data sets that scripts/make_robot_datasets.py writes with the frameworks themselves."""

from __future__ import annotations

import numpy as np

LENGTHS = (5, 3, 4)
COLORS = ("red", "green", "red")


def pixels(episode: int, step: int, camera: int, size: int = 16) -> np.ndarray:
    """An image in which a white bar moves down, on a colour that shows the episode and the camera."""
    scale = size // 16
    image = np.zeros((size, size, 3), np.uint8)
    image[...] = (40 * episode + 10, 20 * step, 100 * camera)
    image[step * scale : (step + 3) * scale] = 255
    return image


def action(episode: int, step: int) -> np.ndarray:
    return (np.linspace(-1, 1, 7) * (step + 1) / 10 + episode).astype(np.float32)


def state(step: int) -> np.ndarray:
    return np.arange(8, dtype=np.float32) + step


def instruction(episode: int) -> str:
    return f"reach the {COLORS[episode]} ball"
