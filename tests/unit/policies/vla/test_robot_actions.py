"""If these fail, a robot's gripper opens when it should close, or demonstrations teach the opposite."""

from __future__ import annotations

import numpy as np
import pytest

from quintet.errors import ConfigError
from quintet.policies.vla.robot_actions import from_robot, robot_settings, to_robot

ACTIONS = np.array([[0.1, 0.2, 0.3, 0.0, 0.0, 0.0, 0.9], [0.1, 0.2, 0.3, 0.0, 0.0, 0.0, 0.2]])


@pytest.mark.parametrize(
    ("simulator", "setup", "gripper"),
    [
        ("libero", "widowx_bridge", [-1.0, 1.0]),
        ("maniskill", "widowx_bridge", [1.0, -1.0]),
        ("maniskill", "panda-qpos", [0.9, 0.2]),
        ("maniskill", None, [0.9, 0.2]),
        ("metaworld", None, [0.9, 0.2]),
    ],
)
def test_the_gripper_has_the_values_of_the_simulator(simulator: str, setup: str | None, gripper: list[float]) -> None:
    settings = {"gripper": None, "robot_dimensions": None} | robot_settings(simulator, setup, 7)
    actions = to_robot(ACTIONS, *settings.values())
    assert actions.shape[-1] == (4 if simulator == "metaworld" else 7)
    assert np.allclose(actions[:, :3], ACTIONS[:, :3])
    assert actions[:, -1].tolist() == gripper
    again = from_robot(actions, *settings.values(), 7)
    assert np.allclose(to_robot(again, *settings.values()), actions)
    assert ((again[:, -1] > 0.5) == (ACTIONS[:, -1] > 0.5)).all()


def test_a_robot_that_is_not_supported_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy.vla.policy_setup = 'google_robot'"):
        robot_settings("maniskill", "google_robot", 7)


def test_a_policy_with_metaworlds_own_actions_keeps_all_of_them() -> None:
    assert robot_settings("metaworld", None, 4) == {}
