"""Module around an action policy whose forward pass samples or scores actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from quintet.embodied_records import ActionSample, ActionSampling, ActionStatistics
from quintet.policies.vla.action_policy import ActionPolicy


class ActionModule(nn.Module):
    """An action policy behind one forward pass, around which FSDP gathers weights."""

    def __init__(self, policy: ActionPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.activation_context: Callable[[], AbstractContextManager[object]] = nullcontext
        """Context of the forward pass, for example to offload the activations saved for the backward pass."""

    def forward(
        self,
        inputs: Mapping[str, torch.Tensor],
        sampling: ActionSampling,
        actions: torch.Tensor | None = None,
        uniforms: torch.Tensor | None = None,
    ) -> ActionSample | ActionStatistics:
        """Return the statistics of `actions`, [B, C, D], or without them sample actions from `uniforms`, see
        `ActionPolicy`."""
        if actions is None:
            return self.policy.sample(dict(inputs), uniforms, sampling)
        with self.activation_context():
            return self.policy.statistics(dict(inputs), actions, sampling)
