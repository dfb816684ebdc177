"""The arm: its model for MuJoCo, dimensions in meters, and kinematics in the plane of the table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

LINK: Final = 0.18
"""Length of each of the two links."""
UPPER_RADIUS, FOREARM_RADIUS, TIP_RADIUS = 0.014, 0.010, 0.013
WORKSPACE_LOW: Final = np.array([-0.16, 0.06])
WORKSPACE_HIGH: Final = np.array([0.16, 0.30])
"""Corners of the rectangle in which the tip moves; the base of the arm is at (0, 0)."""
VIEW_CENTER: Final = (0.0, 0.15)
VIEW_HEIGHT: Final = 0.40
"""The camera is above the table and shows this height without perspective."""
TIMESTEP: Final = 0.01
"""Seconds of a step of physics."""
SUBSTEPS: Final = 5
"""Steps of physics per action."""

Color = tuple[float, float, float]
TABLE: Final[Color] = (0.90, 0.90, 0.90)
UPPER: Final[Color] = (0.40, 0.40, 0.46)
FOREARM: Final[Color] = (0.55, 0.55, 0.62)
TIP: Final[Color] = (0.10, 0.10, 0.10)
RED: Final[Color] = (0.90, 0.10, 0.10)
BLUE: Final[Color] = (0.10, 0.25, 0.95)
YELLOW: Final[Color] = (0.95, 0.75, 0.05)
GREEN: Final[Color] = (0.20, 0.70, 0.25)


@dataclass(frozen=True, slots=True)
class Body:
    """Round object on the table."""

    radius: float
    """Meters."""
    color: Color
    shape: str = "sphere"
    """`sphere`, `cylinder`, or `disk`, which is flat."""
    movable: bool = False
    """Whether the tip pushes it."""


def arm_xml(bodies: tuple[Body, ...]) -> str:
    """Return the MJCF model of the arm with objects. Immovable ones are mocap bodies, which have no dynamics."""
    measures = {"link": LINK, "upper_radius": UPPER_RADIUS, "forearm_radius": FOREARM_RADIUS, "tip_radius": TIP_RADIUS}
    colors = {"table": _rgba(TABLE), "upper": _rgba(UPPER), "forearm": _rgba(FOREARM), "tip": _rgba(TIP)}
    view = {"timestep": TIMESTEP, "view_center": VIEW_CENTER, "view_height": VIEW_HEIGHT}
    objects = "".join(_body_xml(index, body) for index, body in enumerate(bodies))
    template = Path(__file__).with_name("arm.xml").read_text(encoding="utf-8")
    return template.format(**measures, **colors, **view, bodies=objects)


def _body_xml(index: int, body: Body) -> str:
    half = 0.001 if body.shape == "disk" else 0.02
    size = f"{body.radius}" if body.shape == "sphere" else f"{body.radius} {half}"
    kind = "sphere" if body.shape == "sphere" else "cylinder"
    geom = f'<geom type="{kind}" size="{size}" mass="0.1" rgba="{_rgba(body.color)}"'
    if not body.movable:
        return f'<body name="object{index}" mocap="true" pos="0 0 {half}">{geom}/></body>'
    slides = "".join(f'<joint type="slide" axis="{axis}" armature="0" damping="4"/>' for axis in ("1 0 0", "0 1 0"))
    return f'<body name="object{index}" pos="0 0 {half}">{slides}{geom} contype="1" conaffinity="1" condim="1"/></body>'


def _rgba(color: Color) -> str:
    return " ".join(map(str, (*color, 1)))


def elbow_positions(joints: np.ndarray) -> np.ndarray:
    """Return where the elbow is, meters [n, 2], from joint angles, rad [n, 2]."""
    return LINK * np.stack([np.cos(joints[:, 0]), np.sin(joints[:, 0])], axis=1)


def tip_positions(joints: np.ndarray) -> np.ndarray:
    """Return where the tip is, meters [n, 2], from joint angles, rad [n, 2]."""
    angles = joints[:, 0] + joints[:, 1]
    return elbow_positions(joints) + LINK * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def joint_angles(tips: np.ndarray) -> np.ndarray:
    """Return the joint angles, rad [n, 2], that put the tip at positions in the workspace, meters [n, 2].

    The elbow is on the right: of the two solutions the one with a positive angle of the elbow.
    """
    squares = np.square(tips).sum(axis=1)
    elbows = np.arccos(np.clip(squares / (2 * LINK**2) - 1, -1, 1))
    shoulders = np.arctan2(tips[:, 1], tips[:, 0]) - elbows / 2
    return np.stack([shoulders, elbows], axis=1)
