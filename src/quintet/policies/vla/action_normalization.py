"""Normalization of actions and states by the statistics of a data set, and bins of normalized actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quintet.errors import ConfigError, did_you_mean

KEY, ACTION_KEY = "policy.vla.normalization_key", "policy.vla.action_dim"
NO_STATISTICS = "the directory of the policy has no statistics: copy its dataset_statistics.json there"
STEP = 1e-8
"""Added to the width of the bounds by OpenVLA."""


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Linear map between the bounds of each dimension and [-1, 1]; dimensions out of the mask are not changed."""

    low: np.ndarray
    high: np.ndarray
    mask: np.ndarray

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Any], bounds: str) -> Normalizer:
        """Return the normalizer of the quantiles or the range, if `bounds` is `range` or there are no quantiles."""
        names = ("q01", "q99") if bounds == "quantiles" and "q01" in statistics else ("min", "max")
        low, high = (np.asarray(statistics[name], np.float64) for name in names)
        return cls(low, high, np.asarray(statistics.get("mask", np.ones_like(low)), bool))

    def normalize(self, values: np.ndarray) -> np.ndarray:
        """Return values [..., D] with the bounds at -1 and 1; not clipped."""
        scaled = 2 * (values - self.low) / (self.high - self.low + STEP) - 1
        return np.where(self.mask, scaled, values)

    def denormalize(self, values: np.ndarray) -> np.ndarray:
        """Invert `normalize`."""
        scaled = 0.5 * (values + 1) * (self.high - self.low + STEP) + self.low
        return np.where(self.mask, scaled, values)


def find_statistics(statistics: Mapping[str, Any] | None, name: str | None) -> tuple[str, Mapping[str, Any]] | None:
    """Return the statistics of a data set and its name, which may lack the suffix `_no_noops`. None without statistics
    and name, for a policy whose actions are those of the robot.

    Raises:
        ConfigError: there are none of that name, or several and no name.
    """
    if not statistics and name is None:
        return None
    statistics = statistics or {}
    if name is None and len(statistics) == 1:
        name = next(iter(statistics))
    for candidate in (name, f"{name}_no_noops"):
        if candidate in statistics:
            return str(candidate), statistics[str(candidate)]
    valid = f"{did_you_mean(name or '', statistics)} valid values: {', '.join(sorted(statistics))}".lstrip()
    raise ConfigError(
        f"{KEY} = {name!r} is not among the policy's data sets" if name else f"{KEY} is null, but there are several",
        key=KEY,
        value=name,
        hint=valid if statistics else NO_STATISTICS,
    )


def check_action_statistics(statistics: Mapping[str, Any] | None, name: str | None, action_dim: int) -> None:
    """Check that there are statistics for actions of a policy.

    Raises:
        ConfigError: there are none of that name, or for another number of dimensions.
    """
    entry = find_statistics(statistics, name)
    if entry is None or "action" not in entry[1]:
        return
    dimensions = len(Normalizer.from_statistics(entry[1]["action"], "quantiles").low)
    if dimensions != action_dim:
        message = (
            f"{ACTION_KEY} = {action_dim}, but the policy's data set {entry[0]} has actions of {dimensions} dimensions"
        )
        raise ConfigError(message, key=ACTION_KEY, value=action_dim, hint=f"set {ACTION_KEY}={dimensions}")


@dataclass(frozen=True, slots=True)
class ActionBins:
    """Bins of normalized actions: token k of `count` is the bin from the highest, k = 0, to the lowest actions.

    As in OpenVLA, `count` edges from -1 to 1 bound `count` - 1 bins, and the first two tokens are the same bin.
    """

    count: int

    @property
    def edges(self) -> np.ndarray:
        """float64 [count]."""
        return np.linspace(-1.0, 1.0, self.count)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Return the centers of the bins of tokens [...]."""
        centers = (self.edges[:-1] + self.edges[1:]) / 2
        return np.asarray(centers[np.clip(self.count - 1 - tokens, 0, self.count - 2)])

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Return the tokens of normalized actions [...], which are clipped to [-1, 1]."""
        return np.asarray(self.count - np.digitize(np.clip(actions, -1.0, 1.0), self.edges), np.int64)
