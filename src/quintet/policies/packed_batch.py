"""Packed token sequences: the input of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quintet.policies.attention import MovableAttentionLayout
from quintet.policies.vision.image_encoder import PackedImages


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Packed sequences, shared beginnings first (see `PackedLayout`).

    `tokens` and `position_ids` int64 [P]; `prediction_indices` int64 [M], the tokens after which a prediction is made;
    `targets` int64 [M], the tokens predicted there.
    """

    tokens: Tensor
    position_ids: Tensor
    layout: MovableAttentionLayout
    prediction_indices: Tensor
    targets: Tensor
    images: PackedImages | None = None
    """Images of a vision-language policy; `position_ids` are int64 [P, 3] then."""

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on `device`."""
        if self.tokens.device == device:
            return self
        return replace(
            self,
            tokens=self.tokens.to(device),
            position_ids=self.position_ids.to(device),
            layout=self.layout.to(device),
            prediction_indices=self.prediction_indices.to(device),
            targets=self.targets.to(device),
            images=self.images and self.images.to(device),
        )
