"""A simulator whose results follow from tables, and which fails where a test says so."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from quintet.config.native.envs import SimulatorConfig
from quintet.embodied_records import RobotObservation, SimulatorStep

REFERENCE = f"{__file__}:ScriptedSimulator"
"""Value of `env.simulator` for this simulator."""
SIZE = 4
"""Height and width of images, pixels."""


class ScriptedSimulator:
    """Robots that count their actions.

    The task of start state s is solved after the actions in `options["success"][s]`, and can no longer be solved after
    those in `options["failed"][s]`. The state of a robot is its start state, the number of its actions and the sum of
    its actions. `options["fault"]` is done at action `options["at"]` of the robots with the start state
    `options["of"]`; action 0 is the reset. `options["once"]` names a file that marks that it was done.
    """

    action_dim = 2
    num_start_states = 12
    control_frequency = 5.0
    tasks = ("reach", "push")

    def __init__(self, config: SimulatorConfig, num_robots: int, seed: int) -> None:
        self.num_robots, self.seed = num_robots, seed
        self._options = config.options
        self._start_states = np.zeros(num_robots, np.int64)
        self.num_actions = np.zeros(num_robots, np.int64)
        self._sums = np.zeros(num_robots)
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def task(self, start_state: int) -> str:
        return self.tasks[start_state % 2]

    def reset(self, robots: np.ndarray, start_states: np.ndarray) -> None:
        self.calls.append(("reset", tuple(robots)))
        self._start_states[robots] = start_states
        self.num_actions[robots] = 0
        self._sums[robots] = 0.0
        self._fault(robots, ("raise", "exit", "hang"))

    def step(self, robots: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        self.calls.append(("step", tuple(robots)))
        time.sleep(self._options.get("seconds", 0.0))
        self.num_actions[robots] += 1
        self._sums[robots] += actions.sum(1)
        self._fault(robots, ("raise", "exit", "hang"))
        success = self._listed("success", robots)
        rewards = success.astype(np.float32)
        if self._fault(robots, ("nan_reward",)):
            rewards[self._is_faulty(robots)] = np.nan
        return SimulatorStep(rewards, success, self._listed("failed", robots))

    def observe(self, robots: np.ndarray) -> RobotObservation:
        self.calls.append(("observe", tuple(robots)))
        states = np.stack((self._start_states[robots], self.num_actions[robots], self._sums[robots]), 1)
        states = states.astype(np.float32)
        if self._fault(robots, ("nan",)):
            states[self._is_faulty(robots)] = np.nan
        images = self.render(robots)[:, None]
        if self._fault(robots, ("shape",)):
            images = images[:, :, :-1]
        instructions = tuple(f"{self.task(int(state))} {state}" for state in self._start_states[robots])
        return RobotObservation(images, states, instructions)

    def render(self, robots: np.ndarray) -> np.ndarray:
        values = (self._start_states[robots] * 20 + self.num_actions[robots]).astype(np.uint8)
        return np.broadcast_to(values[:, None, None, None], (len(robots), SIZE, SIZE, 3)).copy()

    def close(self) -> None:
        self.calls.append(("close", ()))

    def _listed(self, name: str, robots: np.ndarray) -> np.ndarray:
        table: dict[Any, Sequence[int]] = {int(key): value for key, value in self._options.get(name, {}).items()}
        states, counts = self._start_states[robots], self.num_actions[robots]
        return np.array([int(count) in table.get(int(state), ()) for state, count in zip(states, counts, strict=True)])

    def _is_faulty(self, robots: np.ndarray) -> np.ndarray:
        at, of = self._options.get("at"), self._options.get("of")
        return (self.num_actions[robots] == at) & (self._start_states[robots] == of)

    def _fault(self, robots: np.ndarray, kinds: Sequence[str]) -> bool:
        kind, marker = self._options.get("fault"), self._options.get("once")
        if kind not in kinds or not self._is_faulty(robots).any():
            return False
        if marker is not None:
            if os.path.exists(marker):
                return False
            with open(marker, "w"):
                pass
        if kind == "raise":
            raise RuntimeError("the simulator is broken")
        if kind == "exit":
            os._exit(3)
        if kind == "hang":
            time.sleep(1000.0)
        return True
