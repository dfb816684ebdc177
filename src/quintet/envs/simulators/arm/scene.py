"""The arm: its model for MuJoCo, dimensions in meters, and kinematics in the plane of the table."""

from __future__ import annotations

from dataclasses import dataclass
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
    return f"""
<mujoco model="arm">
  <option timestep="{TIMESTEP}" integrator="implicitfast"><flag gravity="disable"/></option>
  <size memory="256K"/>
  <visual>
    <quality offsamples="0" shadowsize="0"/>
    <headlight ambient="0.55 0.55 0.55" diffuse="0.45 0.45 0.45" specular="0 0 0"/>
  </visual>
  <default><geom contype="0" conaffinity="0"/><joint armature="0.002" damping="0.01"/></default>
  <worldbody>
    <camera name="top" pos="{VIEW_CENTER[0]} {VIEW_CENTER[1]} 1" projection="orthographic" fovy="{VIEW_HEIGHT}"/>
    <geom type="plane" size="1 1 0.1" rgba="{_rgba(TABLE)}"/>
    <body name="upper_arm" pos="0 0 0.06">
      <joint name="shoulder" axis="0 0 1"/>
      <geom type="capsule" fromto="0 0 0 {LINK} 0 0" size="{UPPER_RADIUS}" mass="0.1" rgba="{_rgba(UPPER)}"/>
      <body name="forearm" pos="{LINK} 0 0">
        <joint name="elbow" axis="0 0 1"/>
        <geom type="capsule" fromto="0 0 0 {LINK} 0 0" size="{FOREARM_RADIUS}" mass="0.1" rgba="{_rgba(FOREARM)}"/>
        <geom name="tip" type="cylinder" fromto="{LINK} 0 -0.05 {LINK} 0 0.02" size="{TIP_RADIUS}" mass="0.02"
              contype="1" conaffinity="1" condim="1" rgba="{_rgba(TIP)}"/>
      </body>
    </body>
    {"".join(_body_xml(index, body) for index, body in enumerate(bodies))}
  </worldbody>
  <actuator>
    <position joint="shoulder" kp="40" dampratio="1"/>
    <position joint="elbow" kp="20" dampratio="1"/>
  </actuator>
</mujoco>"""


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
