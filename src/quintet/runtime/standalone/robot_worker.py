"""Robots, and a copy of their policy, on a standalone worker, called by the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSampling
from quintet.envs.simulators.robot_envs import build_stages
from quintet.envs.simulators.robot_messages import ResetResult, chunk_message, reset_message
from quintet.envs.simulators.robot_stage import RobotStage
from quintet.rollout.engines.shared_weights import SharedWeightsReader, StagedTensors
from quintet.runtime.device import compute_device
from quintet.runtime.embodied.simulator_config import simulator_of
from quintet.runtime.process_settings import configure_process
from quintet.training.parallel.strategy import load_full_weights

if TYPE_CHECKING:
    from torch import Tensor

    from quintet.policies.vla.action_policy import ActionPolicy


class LocalStandaloneRobots:
    """See `StandaloneRobotWorker`."""

    def __init__(self) -> None:
        self._stages: dict[bool, list[RobotStage]] = {}
        """Stages of training and of validations."""

    def build(self, config: Experiment, num_robots: int, *, is_validation: bool) -> Mapping[str, Any]:
        configure_process(config)
        for stage in self._stages.pop(is_validation, ()):
            stage.close()
        stages = build_stages(simulator_of(config, is_validation=is_validation), num_robots)
        self._stages[is_validation] = stages
        descriptions = [stage.describe() for stage in stages]
        return asdict(descriptions[0])

    def reset(self, stage: int, start_states: np.ndarray, *, is_validation: bool) -> Mapping[str, Any]:
        robots = self._stages[is_validation][stage]
        return reset_message(ResetResult(robots.reset(start_states), robots.task_indices))

    def step_chunk(
        self, stage: int, actions: np.ndarray, *, record_frames: bool, is_validation: bool
    ) -> Mapping[str, Any]:
        robots = self._stages[is_validation][stage]
        robots.start_chunk(actions, record_frames=record_frames)
        return chunk_message(robots.finish_chunk())

    def offload(self) -> None:
        for stage in (stage for stages in self._stages.values() for stage in stages):
            stage.offload()

    def close(self) -> None:
        """End the simulators."""
        for stage in (stage for stages in self._stages.values() for stage in stages):
            stage.close()
        self._stages = {}


class LocalStandalonePolicy:
    """See `StandalonePolicyWorker`."""

    def __init__(self) -> None:
        self._policy: ActionPolicy | None = None
        self._shared_weights = SharedWeightsReader()

    def build(self, config: Experiment, policy: Path) -> None:
        from quintet.policies.vla.build import load_action_policy

        configure_process(config)
        self._policy = load_action_policy(policy, config).to(compute_device())

    def load_weights(self, weights: StagedTensors) -> None:
        load_full_weights(self._module, self._shared_weights.read(weights))

    @torch.no_grad()
    def sample(
        self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, temperature: float, top_k: int
    ) -> Mapping[str, Any]:
        device = compute_device()
        on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
        sampling = ActionSampling(temperature, top_k)
        sample = self._module.sample(on_device, None if uniforms is None else uniforms.to(device), sampling)
        values = None if sample.values is None else sample.values.float()
        return {"actions": sample.actions, "logprobs": sample.logprobs.float(), "values": values}

    @property
    def _module(self) -> Any:
        """
        Raises:
            ValueError: `build` has not been called.
        """
        if self._policy is None:
            raise ValueError("the policy was called before it was built")
        return self._policy

    def close(self) -> None:
        """Free the policy."""
        self._policy = None
