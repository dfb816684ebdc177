"""Similarity of a rendered picture, or of its code, to the target: 1 for the target itself, 0 for nothing in common."""

from __future__ import annotations

from typing import Final

import numpy as np

SAME_LENGTH, SHORTER_BONUS = 0.8, 0.2
LAB_SCALE = 1000.0
XYZ = np.array([[0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169], [0.019334, 0.119193, 0.950227]])
"""Linear sRGB to XYZ, white point D65."""
WHITE_POINT = np.array([0.950456, 1.0, 1.088754])


def pixel_score(target: np.ndarray, image: np.ndarray) -> float:
    """Return 1 − mean squared error of the RGB values in 0…1."""
    return 1.0 - float(np.mean((target / 255.0 - image / 255.0) ** 2))


def structural_score(target_edges: np.ndarray, image: np.ndarray) -> float:
    """Return the intersection over union of the edges, as VAGEN's `calculate_structural_accuracy`; 1 if neither has
    any, where VAGEN returns 0."""
    edges = canny_edges(image)
    union = int((target_edges | edges).sum())
    return int((target_edges & edges).sum()) / union if union else 1.0


def color_score(target: np.ndarray, image: np.ndarray) -> float:
    """Return exp(−mean squared difference of the CIELAB values / 1000), of VAGEN's first version, whose differences
    overflow because they are of 8 bits."""
    return float(np.exp(-np.mean((_lab(target) - _lab(image)) ** 2) / LAB_SCALE))


def code_score(target: str, code: str) -> float:
    """Return the efficiency of code of another length, of VAGEN's first version: up to 1 for shorter code, 0.8 for code
    as long as the target's, and less in proportion for longer code."""
    if len(code) <= len(target):
        return SAME_LENGTH + SHORTER_BONUS * (1.0 - len(code) / max(len(target), 1))
    return SAME_LENGTH * len(target) / len(code)


def _lab(image: np.ndarray) -> np.ndarray:
    """Return CIELAB values of an RGB image; L is 0…100."""
    rgb = image / 255.0
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    xyz = linear @ XYZ.T / WHITE_POINT
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16.0 / 116.0)
    x, y, z = f[..., 0], f[..., 1], f[..., 2]
    return np.stack([116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)], axis=-1)


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
