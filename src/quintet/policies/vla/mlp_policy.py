"""Policy on the state of a robot, as RLinf's `mlp_policy`: normal distributions from an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from quintet.embodied_records import ActionSample, ActionSampling, ActionStatistics, RobotObservation
from quintet.errors import ConfigError
from quintet.policies.vla.action_distributions import normal_statistics, sample_normal
from quintet.policies.vla.value_head import ValueHead

INITIAL_LOG_STD = -0.5
LAYERS = 3


class MlpConfig(PreTrainedConfig):  # type: ignore[misc]
    """Settings of an MLP policy. Names are those of RLinf."""

    model_type = "mlp_policy"

    obs_dim: int = 42
    """Values in the state of the robot."""
    action_dim: int = 8
    num_action_chunks: int = 1
    hidden_dim: int = 256
    add_value_head: bool = False
    value_type: str = "chunk_level"

    @property
    def num_values(self) -> int:
        """Values per chunk."""
        if not self.add_value_head:
            return 0
        return 1 if self.value_type == "chunk_level" else self.num_action_chunks


class MlpPolicy(PreTrainedModel):  # type: ignore[misc]
    """Normal distributions whose mean is an MLP of the state; the standard deviation is the same in all states.

    Parameter names and initialization are those of RLinf's policy. See `ActionPolicy`.
    """

    config_class = MlpConfig
    base_model_prefix = ""
    generation_config = None
    tokens_per_chunk = 1

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        self.action_dim, self.action_chunk = config.action_dim, config.num_action_chunks
        self.robot_action_dim = config.action_dim
        self.value_size = config.num_values
        layers: list[nn.Module] = []
        for number in range(LAYERS):
            layers += [nn.Linear(config.hidden_dim if number else config.obs_dim, config.hidden_dim), nn.Tanh()]
        self.backbone = nn.Sequential(*layers)
        self.actor_mean = nn.Linear(config.hidden_dim, self.action_chunk * self.action_dim)
        self.actor_logstd = nn.Parameter(torch.full((1, self.actor_mean.out_features), INITIAL_LOG_STD))
        if config.add_value_head:
            self.value_head = ValueHead(config.obs_dim, (config.hidden_dim,) * LAYERS, config.num_values, "tanh")
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ValueHead):
            module.reset_parameters()
        elif isinstance(module, nn.Linear) and module.bias is not None:
            scale = 0.01 if module is self.actor_mean else 1.0
            nn.init.orthogonal_(module.weight, scale * 2**0.5)
            nn.init.zeros_(module.bias)
        elif module is self:
            nn.init.constant_(self.actor_logstd, INITIAL_LOG_STD)

    def prepare(self, observation: RobotObservation) -> dict[str, Tensor]:
        if observation.state.shape[1] != self.config.obs_dim:
            raise ConfigError(
                f"policy.vla.state_dim = {self.config.obs_dim}, but the simulator's state has"
                f" {observation.state.shape[1]} values",
                key="policy.vla.state_dim",
                value=self.config.obs_dim,
                hint=f"set policy.vla.state_dim={observation.state.shape[1]}, or use a policy for this robot",
            )
        return {"state": torch.from_numpy(np.asarray(observation.state, np.float32))}

    def sample(self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, sampling: ActionSampling) -> ActionSample:
        mean, log_std = self._distribution(inputs)
        return ActionSample(*sample_normal(mean, log_std, uniforms, sampling), self._values(inputs))

    def statistics(self, inputs: Mapping[str, Tensor], actions: Tensor, sampling: ActionSampling) -> ActionStatistics:
        mean, log_std = self._distribution(inputs)
        return ActionStatistics(*normal_statistics(mean, log_std, actions, sampling), self._values(inputs))

    def _distribution(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return means [B, C, D] and logs of the standard deviations [1, C, D]."""
        shape = (-1, self.action_chunk, self.action_dim)
        mean = self.actor_mean(self.backbone(self._state(inputs)))
        return mean.view(shape), self.actor_logstd.view(shape)

    def _values(self, inputs: Mapping[str, Tensor]) -> Tensor | None:
        return self.value_head(self._state(inputs)) if self.value_size else None

    def _state(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return inputs["state"].to(self.actor_mean.weight.dtype)

    def to_robot_actions(self, actions: Tensor) -> np.ndarray:
        return actions.cpu().numpy()

    def from_robot_actions(self, actions: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(actions, np.float32))

    def save_files(self, directory: Path) -> None:
        """Write nothing: configuration and weights are the whole policy."""

    def get_input_embeddings(self) -> Any:
        """Return None: there are no tokens."""
        return None
