"""Liger's fused kernels in a model."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from quintet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["use_liger"]

LIGER = "liger_kernel"


def use_liger(model: PreTrainedModel, key: str) -> None:
    """Put Liger's fused norms, rotations and feed-forward parts into the model; the loss stays ours. `key` is what
    asks for it.

    Raises:
        ConfigError: the package isn't installed, or the model isn't on a GPU, for which its kernels are written.
    """
    if importlib.util.find_spec(LIGER) is None:
        hint = f"pip install liger-kernel, or {key}=false"
        raise ConfigError(f"{key} = true needs liger-kernel, not installed here", key=key, value=True, hint=hint)
    if not next(model.parameters()).is_cuda:
        told = f"{key} = true: Liger's kernels run on a GPU, and this model is on the CPU"
        raise ConfigError(told, key=key, value=True, hint="set it to false")
    kernels: Any = importlib.import_module(f"{LIGER}.transformers")
    kernels._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
