"""Liger's fused kernels."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from quintet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIGER = "liger_kernel"


def apply_liger_kernels(model: PreTrainedModel, key: str) -> None:
    """Replace the model's norms, rotary embeddings and MLPs by Liger's fused kernels; the loss is not replaced.

    `key` is the configuration key that enables them.

    Raises:
        ConfigError: the package is not installed, or the model is not on a GPU.
    """
    if importlib.util.find_spec(LIGER) is None:
        hint = f"pip install liger-kernel, or set {key}=false"
        raise ConfigError(f"{key} = true requires liger-kernel, which is not installed", key=key, value=True, hint=hint)
    if not next(model.parameters()).is_cuda:
        message = f"{key} = true: Liger's kernels require a GPU, but this model is on the CPU"
        raise ConfigError(message, key=key, value=True, hint=f"set {key}=false")
    kernels: Any = importlib.import_module(f"{LIGER}.transformers")
    kernels._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
