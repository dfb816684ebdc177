"""Routers of a mixture of experts: what decides which experts a token goes to."""

from __future__ import annotations

from torch import nn

from quintet.errors import ConfigError

__all__ = ["freeze_routers", "no_routers"]

NAMES = ("gate", "router")
"""What transformers calls a router beside its `experts`."""


def freeze_routers(model: nn.Module) -> None:
    """From now on the routers get no gradient and stay as they are.

    Raises:
        ConfigError: the model has none.
    """
    found = [
        router
        for layer in model.modules()
        if hasattr(layer, "experts")
        for name in NAMES
        if isinstance(router := getattr(layer, name, None), nn.Module)
    ]
    if not found:
        raise no_routers()
    for router in found:
        router.requires_grad_(requires_grad=False)


def no_routers() -> ConfigError:
    """That there is nothing to freeze."""
    return ConfigError(
        "policy.freeze_router: the model has no experts and so no router",
        key="policy.freeze_router",
        value=True,
        hint="leave it out",
    )
