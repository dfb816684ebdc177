"""Protocol of simulators: a batch of robots that are reset, moved and observed separately.

A simulator has no episodes: `RobotVectorEnv` counts steps, and applies step limits, automatic resets, reward
coefficients and the choice of start states, the same for every simulator.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quintet.embodied_records import RobotObservation, SimulatorStep


class Simulator(Protocol):
    """A batch of simulated robots with the same action space."""

    num_robots: int
    action_dim: int
    num_start_states: int
    """Number of distinct start states; a start state follows from its number and the seed."""
    control_frequency: float
    """Actions per second of simulated time, which is also the frame rate of videos."""
    tasks: tuple[str, ...]
    """Names of the tasks."""

    def task(self, start_state: int) -> str:
        """Return the task of a start state."""

    def reset(self, robots: np.ndarray, start_states: np.ndarray) -> None:
        """Put robots, int64 [n], into start states, int64 [n]."""

    def step(self, robots: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        """Move robots, int64 [n], by one action each, float32 [n, D]."""

    def observe(self, robots: np.ndarray) -> RobotObservation:
        """Render and return the observation of robots, int64 [n]; later calls do not change its arrays."""

    def render(self, robots: np.ndarray) -> np.ndarray:
        """Return a picture of robots, int64 [n], for people, RGB uint8 [n, height, width, 3]."""

    def close(self) -> None:
        """Free the simulator."""
