"""Vision transformers under the parameter names of timm, in which OpenVLA checkpoints store them.

Equal to transformers' `Dinov2WithRegistersModel` and `SiglipVisionModel`; only names, the joint projection `qkv` and
the exact GELU of SigLIP differ. With timm's names, checkpoints and published adapters need no conversion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Sizes of a vision transformer."""

    hidden: int
    depth: int
    heads: int
    mlp: int
    patch: int
    """Pixels per side."""
    image: int
    """Height and width of the input image, pixels."""
    registers: int = 0
    """Register tokens."""
    has_class_token: bool = False
    has_layer_scale: bool = False
    has_attention_pool: bool = False
    """Whether the checkpoint has the weights of an attention pool, which features of patches do not use."""
    is_penultimate: bool = True
    """Take the features of the last but one block without a final norm; otherwise the normalized last ones."""
    merge: int = 1
    """Concatenate the features of `merge` × `merge` patches."""

    @property
    def num_tokens(self) -> int:
        """Feature vectors per image."""
        return (self.image // self.patch // self.merge) ** 2

    @property
    def output_size(self) -> int:
        """Size of a feature vector."""
        return self.hidden * self.merge**2


DINOV2_LARGE = TowerShape(1024, 24, 16, 4096, 14, 224, registers=4, has_class_token=True, has_layer_scale=True)
SIGLIP_SO400M = TowerShape(1152, 27, 16, 4304, 14, 224, has_attention_pool=True)
TIMM_SHAPES = {
    "vit_large_patch14_reg4_dinov2.lvd142m": DINOV2_LARGE,
    "vit_so400m_patch14_siglip_224": SIGLIP_SO400M,
}
"""Shapes by timm's name of the model."""


class VisionTower(nn.Module):
    """Vision transformer from images to features of patches."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = _PatchEmbedding(shape)
        if shape.has_class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.hidden))
        if shape.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, shape.hidden))
        self.pos_embed = nn.Parameter(torch.zeros(1, (shape.image // shape.patch) ** 2, shape.hidden))
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.hidden, eps=1e-6)
        if shape.has_attention_pool:
            self.attn_pool = _AttentionPool(shape)

    def forward(self, images: Tensor) -> Tensor:
        """Return features [B, tokens, output size] of normalized images [B, 3, height, width]."""
        hidden = self.patch_embed(images) + self.pos_embed
        prefix = [getattr(self, name) for name in ("cls_token", "reg_token") if hasattr(self, name)]
        prefix = [token.expand(len(hidden), -1, -1) for token in prefix]
        hidden = torch.cat([*prefix, hidden], dim=1)
        for block in self.blocks[: self.shape.depth - self.shape.is_penultimate]:
            hidden = block(hidden)
        hidden = hidden[:, sum(token.shape[1] for token in prefix) :]
        return self._merge(hidden if self.shape.is_penultimate else self.norm(hidden))

    def _merge(self, hidden: Tensor) -> Tensor:
        merge, side = self.shape.merge, self.shape.image // self.shape.patch // self.shape.merge
        if merge == 1:
            return hidden
        grid = hidden.view(len(hidden), side, merge, side, merge, self.shape.hidden)
        return grid.transpose(2, 3).reshape(len(hidden), side * side, self.shape.output_size)

    def unused_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that do not affect the features."""
        if self.shape.is_penultimate:
            yield from self.blocks[-1].parameters()
            yield from self.norm.parameters()
        if self.shape.has_attention_pool:
            yield from self.attn_pool.parameters()


class _PatchEmbedding(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.hidden, shape.patch, stride=shape.patch)

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.proj(images)
        return patches.flatten(2).transpose(1, 2)


class LayerScale(nn.Module):
    """Factor on the output of a layer. OpenVLA renames timm's `gamma` to `scale_factor`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((size,), 1e-5))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale_factor


class _Attention(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, size = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.proj(attended.transpose(1, 2).reshape(batch, length, size))
        return output


class _Mlp(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.hidden, shape.mlp)
        self.fc2 = nn.Linear(shape.mlp, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.fc2(F.gelu(self.fc1(hidden)))
        return output


class _Block(GradientCheckpointingLayer):  # type: ignore[misc]
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden, eps=1e-6)
        self.attn = _Attention(shape)
        self.ls1 = LayerScale(shape.hidden) if shape.has_layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.hidden, eps=1e-6)
        self.mlp = _Mlp(shape)
        self.ls2 = LayerScale(shape.hidden) if shape.has_layer_scale else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.ls1(self.attn(self.norm1(hidden)))
        output: Tensor = hidden + self.ls2(self.mlp(self.norm2(hidden)))
        return output


class _AttentionPool(nn.Module):
    """Weights of SigLIP's pool, which checkpoints and adapters contain; features of patches do not need it."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, shape.hidden))
        self.q = nn.Linear(shape.hidden, shape.hidden)
        self.kv = nn.Linear(shape.hidden, 2 * shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden, eps=1e-6)
        self.mlp = _Mlp(shape)
