"""Similarity of a rendered picture, or of its code, to the target: 1 for the target itself, 0 for nothing in common."""

from __future__ import annotations

import numpy as np

from quintet.envs.svg.edges import canny_edges

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
