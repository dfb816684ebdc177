"""Weights under the names that a model's files have, where transformers has others in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["in_files"]

STACKED = 3
"""Dimensions of a weight in which all experts of a layer are one."""


def in_files(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The stream as the model's files have it, which is what other engines read: a layer's experts, one tensor in
    memory, are several there."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        if tensor.dim() == STACKED:
            yield from revert_weight_conversion(model, {name: tensor}).items()
        else:
            yield name, tensor
