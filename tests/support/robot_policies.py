"""Robots, observations and small policies for tests of action policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.experiment import Experiment
from quintet.embodied_records import RobotObservation, SimulatorStep

INSTRUCTIONS = ("Touch the red ball", "touch the blue ball and push it")
STATE_DIM, ACTION_DIM, CAMERAS = 4, 2, 2


class StillRobots:
    """Simulator whose robots do not move; the observation follows from the start state."""

    action_dim, num_start_states, control_frequency = ACTION_DIM, 10, 10.0
    tasks = INSTRUCTIONS

    def __init__(self, config: SimulatorConfig, num_robots: int, seed: int) -> None:
        self.num_robots = num_robots
        self._starts = np.zeros(num_robots, np.int64)

    def task(self, start_state: int) -> str:
        return self.tasks[start_state % 2]

    def reset(self, robots: np.ndarray, start_states: np.ndarray) -> None:
        self._starts[robots] = start_states

    def step(self, robots: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        return SimulatorStep(np.zeros(len(robots), np.float32), np.zeros(len(robots), bool))

    def observe(self, robots: np.ndarray) -> RobotObservation:
        return observe(len(robots), [self.task(start) for start in self._starts[robots]])

    def render(self, robots: np.ndarray) -> np.ndarray:
        return np.zeros((len(robots), 8, 8, 3), np.uint8)

    def close(self) -> None:
        pass


def observe(robots: int, instructions: list[str] | None = None, *, size: int = 32, seed: int = 0) -> RobotObservation:
    """Return random images and states of robots."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (robots, CAMERAS, size, size, 3), dtype=np.uint8)
    state = rng.normal(size=(robots, STATE_DIM)).astype(np.float32)
    instructions = instructions or [INSTRUCTIONS[robot % 2] for robot in range(robots)]
    return RobotObservation(images, state, tuple(instructions))


def build_action_policy(config: Experiment) -> Any:
    """Return the policy at `policy.path`, or the preset with random weights."""
    # not for processes that only simulate robots
    from quintet.policies.vla.build import _build_preset, load_action_policy, prepare_for_training
    from quintet.seeds import derive_seed

    if config.policy.path is not None:
        return load_action_policy(Path(config.policy.path), config)
    return prepare_for_training(_build_preset(config, derive_seed(config.seed, "policy")), config)


def robot_experiment(policy: dict[str, Any], *, has_critic: bool = True, **sections: Any) -> Experiment:
    """Return the configuration of a run with `StillRobots`."""
    return Experiment.model_validate(
        {
            "env": {"name": "simulator", "simulator": f"{__name__}:StillRobots"},
            "policy": policy,
            "algorithm": {"advantage": {"name": "gae" if has_critic else "grpo"}},
            "critic": {"shares_policy": has_critic},
            **sections,
        }
    )
