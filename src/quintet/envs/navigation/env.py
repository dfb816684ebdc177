"""Navigation in first person to an object, with the actions, rewards and texts of VAGEN's env (Wang et al. 2025)."""

from __future__ import annotations

import numpy as np

from quintet.config.native.embodied_envs import NavigationConfig
from quintet.envs.env import IMAGE
from quintet.envs.navigation.house import ACTIONS, House
from quintet.envs.navigation.rooms import RoomsHouse
from quintet.records import Observation, Step

INSTRUCTION = (
    "You are a home robot and perform navigation tasks according to instructions. moveahead, moveback, moveright and"
    " moveleft move you by {step:g} meters, rotateright and rotateleft turn you by 90 degrees, lookup and lookdown tilt"
    " your camera by 30 degrees. {view} Answer with " + ", ".join(ACTIONS[:-1]) + f" or {ACTIONS[-1]}."
)
VIEWS = {
    "vision": "You see a picture of what is in front of you.",
    "text": "You see a list of the objects in front of you, with direction and distance in meters.",
}
DONE, NOT_DONE = "Last action is executed successfully.", "Last action is not executed successfully."
"""VAGEN's feedback."""
NUM_SPLITS = 3
"""Remainders of seeds, see `quintet.envs.start_states`."""


class Navigation:
    """Env with a house in which the agent walks to the object of an instruction."""

    actions = ACTIONS

    def __init__(self, config: NavigationConfig) -> None:
        """
        Raises:
            ConfigError: AI2-THOR or its build is missing.
        """
        self._config = config
        self._house = _build_house(config)

    @staticmethod
    def check_config(config: NavigationConfig) -> None:
        """Look for the packages and files of the house.

        Raises:
            ConfigError: AI2-THOR, its build or its tasks are missing.
        """
        if config.backend == "ai2thor":
            from quintet.envs.navigation.thor import find_build, load_tasks

            find_build(config)
            load_tasks(config)

    def instruction(self) -> str:
        return INSTRUCTION.format(step=self._config.step_length, view=VIEWS[self._config.render])

    def reset(self, seed: int) -> Observation:
        self._house.start(task_number(self._config, self._house.num_tasks, seed))
        self._num_steps = 0
        return self._observation("")

    def step(self, action: str) -> Step:
        """See `Env.step`. An action that walls or objects prevent has no effect, and the observation reports it."""
        config, before = self._config, self._house.distance
        is_executed = self._house.act(action)
        distance = self._house.distance
        self._num_steps += 1
        success = distance <= config.success_threshold
        truncated = not success and self._num_steps >= config.max_steps
        reward = config.distance_reward * (before - distance) + config.success_reward * success
        feedback = DONE if is_executed else NOT_DONE
        info = {"success": success, "distance": round(distance, 3), "env_feedback": feedback}
        return Step(self._observation(f"\nThe environment feedback is: {feedback}"), reward, success, truncated, info)

    def render(self) -> np.ndarray:
        return self._house.render()

    def close(self) -> None:
        self._house.close()

    def expert_action(self) -> str:
        """See `House.expert_action`."""
        return self._house.expert_action()

    def expert_thought(self) -> str:
        """Return the visible objects, the nearest first."""
        return self._visible_objects_text()

    def _observation(self, feedback: str) -> Observation:
        end = f"{feedback}\nHuman Instruction: {self._house.instruction}"
        if self._config.render == "text":
            return Observation(f"{self._visible_objects_text()}{end}")
        images = [self._house.render()]
        if self._config.multiview:
            images.append(self._house.render_map())
        return Observation(IMAGE * len(images) + end, tuple(images))

    def _visible_objects_text(self) -> str:
        visible = self._house.visible_objects()[: self._config.max_objects]
        lines = [f"{item.name} {item.direction} {item.distance:.2f}" for item in visible]
        return "\n".join(lines) or "nothing"


def _build_house(config: NavigationConfig) -> House:
    if config.backend == "rooms":
        return RoomsHouse(config)
    from quintet.envs.navigation.thor import ThorHouse

    return ThorHouse(config)


def task_number(config: NavigationConfig, available: int | None, seed: int) -> int:
    """Return the task of a seed. Each split has its own tasks if there are three or more."""
    stride = round(1 / config.down_sample_ratio)
    limits = [count for count in (config.num_tasks, available) if count is not None]
    if not limits:
        index, split = divmod(seed, NUM_SPLITS)
        return index * stride * NUM_SPLITS + split
    tasks = range(0, min(limits), stride)
    split_tasks = tasks[seed % NUM_SPLITS :: NUM_SPLITS] or tasks
    return split_tasks[seed // NUM_SPLITS % len(split_tasks)]
