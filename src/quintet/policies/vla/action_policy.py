"""Protocol of policies for continuous control: from observations of robots to chunks of actions."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from quintet.embodied_records import ActionSample, ActionSampling, ActionStatistics, RobotObservation


class ActionPolicy(Protocol):
    """A policy that outputs C actions of D dimensions per forward pass.

    Implementations are `transformers.PreTrainedModel`s, so that `save_pretrained` writes a directory that loads again.
    """

    action_chunk: int
    action_dim: int
    robot_action_dim: int
    """Dimensions of an action of the robot, of which it may have fewer."""
    tokens_per_chunk: int
    """Tokens of a forward pass per robot, about."""
    value_size: int
    """Values per chunk: 0 without a value head, 1 per chunk, or C per action."""

    def prepare(self, observation: RobotObservation) -> dict[str, torch.Tensor]:
        """Return the inputs of `sample` and `statistics` for B robots, CPU tensors [B, …]; images stay uint8."""

    def sample(
        self, inputs: dict[str, torch.Tensor], uniforms: torch.Tensor | None, sampling: ActionSampling
    ) -> ActionSample:
        """Sample actions by inverse transform from `uniforms`, float32 [B, C, D] in [0, 1); None is greedy. Equal
        uniforms give equal actions, whatever the batch."""

    def statistics(
        self, inputs: dict[str, torch.Tensor], actions: torch.Tensor, sampling: ActionSampling
    ) -> ActionStatistics:
        """Return log-probs, entropies and values of given actions [B, C, D], with gradients."""

    def to_robot_actions(self, actions: torch.Tensor) -> np.ndarray:
        """Return denormalized actions of the robot, float32 [B, C, `robot_action_dim`]."""

    def from_robot_actions(self, actions: np.ndarray) -> torch.Tensor:
        """Return the nearest actions of the policy, [B, C, D], for behavior cloning."""
