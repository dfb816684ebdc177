"""Edges of an image by the algorithm of Canny (1986), as OpenCV computes them."""

from __future__ import annotations

from typing import Final

import numpy as np

LOW, HIGH = 100, 200
"""Gradients at which an edge continues and begins."""
TAN_22_5, TAN_67_5 = 0.4142135623730951, 2.414213562373095
LUMINANCE: Final = np.array([19595, 38470, 7471])
"""ITU-R 601-2, in 1/65536, as Pillow's mode `L`."""


def canny_edges(image: np.ndarray) -> np.ndarray:
    """Return the edges of an RGB image `uint8[height, width, 3]` as `bool[height, width]`.

    Sobel gradients of size 3 with the norm |dx| + |dy|, non-maximum suppression in four directions, and hysteresis.
    """
    gray = (image.astype(np.int64) @ LUMINANCE + 0x8000) >> 16
    dx, dy = _sobel(gray)
    magnitude = np.abs(dx) + np.abs(dy)
    candidates = _is_maximum(magnitude, dx, dy) & (magnitude > LOW)
    return _connected(candidates & (magnitude > HIGH), candidates)


def _sobel(gray: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    padded = np.pad(gray, 1, mode="edge")
    rows = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    columns = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    return rows[:, 2:] - rows[:, :-2], columns[2:] - columns[:-2]


def _is_maximum(magnitude: np.ndarray, dx: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Return a mask of the pixels whose gradient is larger than both neighbours' in its direction."""
    padded = np.pad(magnitude, 1)
    height, width = magnitude.shape

    def neighbour(down: int, right: int) -> np.ndarray:
        return padded[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    horizontal, vertical = np.abs(dy) < TAN_22_5 * np.abs(dx), np.abs(dy) > TAN_67_5 * np.abs(dx)
    same_sign = (dx ^ dy) >= 0
    falling = (magnitude > neighbour(-1, -1)) & (magnitude > neighbour(1, 1))
    rising = (magnitude > neighbour(-1, 1)) & (magnitude > neighbour(1, -1))
    return np.where(
        horizontal,
        (magnitude > neighbour(0, -1)) & (magnitude >= neighbour(0, 1)),
        np.where(
            vertical,
            (magnitude > neighbour(-1, 0)) & (magnitude >= neighbour(1, 0)),
            np.where(same_sign, falling, rising),
        ),
    )


def _connected(strong: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Return the candidates that a path over neighbouring candidates connects with a strong one."""
    edges = strong
    while True:
        rows = edges.copy()
        rows[1:] |= edges[:-1]
        rows[:-1] |= edges[1:]
        dilated = rows.copy()
        dilated[:, 1:] |= rows[:, :-1]
        dilated[:, :-1] |= rows[:, 1:]
        dilated &= candidates
        if (dilated == edges).all():
            return edges
        edges = dilated
