"""Actions of a data set as actions of a simulator's robot.

OpenVLA's data sets have 7 dimensions, the last of which is the gripper: 1 open, 0 closed. Simulators differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quintet.config.native.robot_simulators import DATA_DIMENSION, METAWORLD_DIMENSIONS
from quintet.errors import ConfigError

OPEN_IS_POSITIVE, OPEN_IS_NEGATIVE = "open_is_positive", "open_is_negative"
SETUP_KEY = "policy.vla.policy_setup"


def robot_settings(simulator: str, setup: str | None, action_dim: int) -> dict[str, Any]:
    """Return the fields `gripper` and `robot_dimensions` of an OpenVLA policy that acts in a simulator.

    ManiSkill has several robots: `widowx_bridge`, and those with `panda` in their name, whose data have its actions.
    Meta-World executes position and gripper of actions with 7 dimensions, and actions with 4 as they are.

    Raises:
        ConfigError: the robot is not supported.
    """
    if simulator == "libero":
        return {"gripper": OPEN_IS_NEGATIVE}
    if simulator == "metaworld":
        return {"robot_dimensions": METAWORLD_DIMENSIONS} if action_dim == DATA_DIMENSION else {}
    if simulator != "maniskill" or setup is None or "panda" in setup:
        return {}
    if setup == "widowx_bridge":
        return {"gripper": OPEN_IS_POSITIVE}
    hint = ", or ".join(f"{SETUP_KEY}={name}" for name in ("widowx_bridge", "panda-qpos", "panda-ee-dpose"))
    raise ConfigError(f"{SETUP_KEY} = {setup!r} is not supported", key=SETUP_KEY, value=setup, hint=hint)


def to_robot(actions: np.ndarray, gripper: str | None, dimensions: list[int] | None) -> np.ndarray:
    """Return actions of the robot from those of the data set, [..., D]. A gripper opens or closes fully."""
    if gripper is not None:
        is_open = np.where(actions[..., -1:] > 0.5, 1.0, -1.0)
        actions = np.concatenate([actions[..., :-1], is_open if gripper == OPEN_IS_POSITIVE else -is_open], axis=-1)
    return actions if dimensions is None else actions[..., dimensions]


def from_robot(actions: np.ndarray, gripper: str | None, dimensions: list[int] | None, size: int) -> np.ndarray:
    """Invert `to_robot`; the other of the `size` dimensions are 0."""
    if dimensions is not None:
        full = np.zeros((*actions.shape[:-1], size), actions.dtype)
        full[..., dimensions] = actions
        actions = full
    if gripper is not None:
        is_open = (actions[..., -1:] > 0) == (gripper == OPEN_IS_POSITIVE)
        actions = np.concatenate([actions[..., :-1], is_open.astype(actions.dtype)], axis=-1)
    return actions
