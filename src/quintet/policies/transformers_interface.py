"""Names in the interface of transformers' models that the supported releases spell differently."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def cache_argument(body: nn.Module) -> str:
    """Return the argument of a forward pass that takes the KV cache: `cache` since transformers 5.24, before
    `past_key_values`."""
    return "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"


def checkpointing_attribute(model: nn.Module, name: str) -> Any:
    """Return an attribute of a model such as `activation_checkpointing_enable`, whose name before transformers 5.23 is
    `gradient_checkpointing_enable`."""
    return getattr(model, name if hasattr(model, name) else name.replace("activation_", "gradient_"))
