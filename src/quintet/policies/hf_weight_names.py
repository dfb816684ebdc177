"""Weight names of Hugging Face files, where transformers uses other names in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STACKED_EXPERT_DIMS = 3
"""Dimensions of a weight that stacks all experts of a layer."""


def hf_named_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under the names of the model's files, which other engines read.

    A layer's experts are one stacked tensor in memory and separate tensors in files.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        if tensor.dim() == STACKED_EXPERT_DIMS:
            yield from revert_weight_conversion(model, {name: tensor}).items()
        else:
            yield name, tensor
