"""Manipulation by primitive skills, with the tasks, texts and rewards of VAGEN's environment (Wang et al. 2025)."""

from __future__ import annotations

import re

import numpy as np

from quintet.config.native.embodied_envs import PrimitiveSkillConfig
from quintet.envs.env import IMAGE, NUMBER
from quintet.envs.primitive_skill.kinematic import KinematicTable
from quintet.envs.primitive_skill.table import NUM_PARAMETERS, Table
from quintet.records import Observation, Step

INSTRUCTION = (
    "You control a robot arm by three skills. pick(x,y,z) grasps the object at a position. place(x,y,z) puts the object"
    " in the gripper at a position. push(x1,y1,z1,x2,y2,z2) pushes what is at the first position to the second."
    " Coordinates are millimeters within the workspace limits, at the center of an object; z may be higher to place it."
    " You face toward the negative x-axis; the negative y-axis is to your left and the positive z-axis is up."
)
SKILL = re.compile(r"\s*([a-z]+)\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)
NOTHING = "No other information needed"


class PrimitiveSkill:
    """Env with a table on which a robot arm moves objects."""

    actions = tuple(f"{name}({','.join([NUMBER] * count)})" for name, count in NUM_PARAMETERS.items())

    def __init__(self, config: PrimitiveSkillConfig) -> None:
        """
        Raises:
            ConfigError: ManiSkill, its tasks or its renderer are missing.
        """
        self._config = config
        self._table = _build_table(config)

    @staticmethod
    def check_config(config: PrimitiveSkillConfig) -> None:
        """Look for the packages of the table.

        Raises:
            ConfigError: ManiSkill or VAGEN's tasks are missing.
        """
        if config.backend == "maniskill":
            from quintet.envs.primitive_skill.maniskill import load_builder

            load_builder(config)

    def instruction(self) -> str:
        return INSTRUCTION

    def reset(self, seed: int) -> Observation:
        self._table.reset(seed)
        self._num_steps = 0
        return self._observation()

    def step(self, action: str) -> Step:
        """See `Env.step`. Coordinates beyond the workspace are moved to its border. The rewards of an episode add up to
        VAGEN's: the value of the last state minus the value of the first one and the penalties."""
        config, before = self._config, self._value()
        name, parameters = _parse(action)
        limits = self._table.limits * (len(parameters) // 3)
        self._table.execute(name, [min(max(p, low), high) for p, (low, high) in zip(parameters, limits, strict=True)])
        self._num_steps += 1
        success = self._table.is_solved()
        truncated = not success and self._num_steps >= config.max_steps
        reward = self._value() - before - config.step_penalty
        return Step(self._observation(), reward, success, truncated, {"success": success, "stage": self._table.stage()})

    def render(self) -> np.ndarray:
        return self._table.render()

    def close(self) -> None:
        self._table.close()

    def expert_action(self) -> str:
        """See `Table.expert_skill`."""
        return self._table.expert_skill()

    def expert_thought(self) -> str:
        """Return the names of the positions, in their order."""
        return " ".join(self._table.positions())

    def _value(self) -> float:
        config = self._config
        return config.success_reward if self._table.is_solved() else config.stage_reward * self._table.stage()

    def _observation(self) -> Observation:
        table, is_vision = self._table, self._config.render == "vision"
        limits = (f"{axis}_workspace_limit: {limit}" for axis, limit in zip("xyz", table.limits, strict=True))
        lines = [
            *([IMAGE] if is_vision else []),
            f"Human Instruction: {table.instruction}",
            *limits,
            f"Object positions:\n{list(table.positions().values())}",
            f"Other information:\n{dict(table.information(masked=self._config.mask_success)) or NOTHING}",
        ]
        return Observation("\n".join(lines), (table.render(),) if is_vision else ())


def _build_table(config: PrimitiveSkillConfig) -> Table:
    if config.backend == "kinematic":
        return KinematicTable(config)
    from quintet.envs.primitive_skill.maniskill import ManiSkillTable

    return ManiSkillTable(config)


def _parse(action: str) -> tuple[str, list[float]]:
    match = SKILL.fullmatch(action)
    if match is None:
        raise ValueError(f"{action!r:.100} is no skill with coordinates")
    name, parameters = match[1].lower(), [float(number) for number in match[2].split(",")]
    if len(parameters) != NUM_PARAMETERS.get(name):
        raise ValueError(f"{action!r:.100} has {len(parameters)} coordinates")
    return name, parameters
