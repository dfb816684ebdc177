"""Parts of OpenVLA policies between the vision towers and the language model, and the regression head.

Parameter names and sizes are those of published checkpoints.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintet.policies.vla.openvla_config import OpenVlaConfig
from quintet.policies.vla.vision_tower import VisionTower


class VisionBackbone(nn.Module):
    """Vision towers, one or two, whose features of a patch are concatenated."""

    def __init__(self, config: OpenVlaConfig) -> None:
        super().__init__()
        towers = [VisionTower(shape) for shape in config.towers]
        self.featurizer = towers[0]
        if len(towers) > 1:
            self.fused_featurizer = towers[1]
        self._means, self._stds = config.image_means, config.image_stds

    @property
    def towers(self) -> list[VisionTower]:
        """The towers in the order of their features."""
        return [module for module in self.children() if isinstance(module, VisionTower)]

    def forward(self, images: Tensor) -> Tensor:
        """Return features [B, cameras × patches, size] of images, uint8 [B, cameras, 3, height, width]."""
        pixels, dtype = images.flatten(0, 1).float() / 255, self.featurizer.pos_embed.dtype
        colors = pixels.new_tensor([self._means, self._stds]).unsqueeze(-1).unsqueeze(-1)
        features = [
            tower(((pixels - mean) / std).to(dtype)) for tower, mean, std in zip(self.towers, *colors, strict=True)
        ]
        joined = torch.cat(features, dim=-1)
        return joined.reshape(len(images), -1, joined.shape[-1])


class ImageProjector(nn.Module):
    """MLP from features of patches to embeddings; a third layer if two towers are concatenated."""

    def __init__(self, config: OpenVlaConfig) -> None:
        super().__init__()
        sizes = [sum(tower.output_size for tower in config.towers)]
        sizes += [4 * sizes[0]] if len(config.towers) > 1 else []
        sizes += [config.language_size] * 2
        self.fc1 = nn.Linear(sizes[0], sizes[1])
        self.fc2 = nn.Linear(sizes[1], sizes[2])
        if len(sizes) > 3:
            self.fc3 = nn.Linear(sizes[2], sizes[3])

    def forward(self, features: Tensor) -> Tensor:
        """Return embeddings [B, N, hidden size] of features [B, N, size]."""
        hidden: Tensor = self.fc2(F.gelu(self.fc1(features)))
        return self.fc3(F.gelu(hidden)) if hasattr(self, "fc3") else hidden


class InstructionFilm(nn.Module):
    """FiLM (arXiv:1709.07871): image features are scaled and shifted depending on the mean embedding of the prompt.

    OpenVLA-OFT+ has it in each block of its towers. Here it is on their output, and the mean is normalized, so that
    instructions differ from the start.
    """

    def __init__(self, config: OpenVlaConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.language_size, 2 * sum(tower.output_size for tower in config.towers))

    def forward(self, features: Tensor, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Return features [B, N, size], given embeddings [B, S, hidden size] and mask, bool [B, S], of the prompt."""
        mean = (embeddings * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        scale, shift = self.linear(F.rms_norm(mean, mean.shape[-1:])).unsqueeze(1).chunk(2, dim=-1)
        modulated: Tensor = features * (1 + scale) + shift
        return modulated


class ProprioProjector(nn.Module):
    """MLP from the state of the robot to one embedding."""

    def __init__(self, config: OpenVlaConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.proprio_dim, config.language_size)
        self.fc2 = nn.Linear(config.language_size, config.language_size)

    def forward(self, state: Tensor) -> Tensor:
        """Return embeddings [B, 1, hidden size] of normalized states [B, S]."""
        embedding: Tensor = self.fc2(F.gelu(self.fc1(state.to(self.fc1.weight.dtype))))
        return embedding.unsqueeze(1)


class RegressionHead(nn.Module):
    """Head of OpenVLA-OFT that was trained with an L1 loss: the mean action from the hidden states of its slots.

    The published head is deterministic. Here its output is the mean of a normal distribution whose standard deviation
    is learned, so that it can be trained with reinforcement learning; greedy actions are unchanged.
    """

    def __init__(self, config: OpenVlaConfig) -> None:
        super().__init__()
        self.model = _ResidualMlp(config.action_dim * config.language_size, config.language_size, config.action_dim)
        self.log_std = nn.Parameter(torch.full((config.action_dim,), INITIAL_LOG_STD))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return means [B, C, D] of the hidden states [B, C · D, hidden size] of the slots."""
        mean: Tensor = self.model(hidden.reshape(len(hidden), -1, self.model.fc1.in_features))
        return mean


INITIAL_LOG_STD = -2.0
"""Of normalized actions, whose range is 2."""


class _ResidualMlp(nn.Module):
    def __init__(self, input_size: int, hidden: int, output_size: int, blocks: int = 2) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(input_size)
        self.fc1 = nn.Linear(input_size, hidden)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(hidden) for _ in range(blocks))
        self.layer_norm2 = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, output_size)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.fc1(self.layer_norm1(inputs)))
        for block in self.mlp_resnet_blocks:
            hidden = block(hidden)
        output: Tensor = self.fc2(self.layer_norm2(hidden))
        return output


class _ResidualBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.ReLU())

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + self.ffn(hidden)
        return output
