"""Freezing of the routers of mixture-of-experts models."""

from __future__ import annotations

from torch import nn

from quintet.errors import ConfigError

ROUTER_NAMES = ("gate", "router")
"""Attribute names of routers in transformers, next to `experts`."""


def freeze_routers(model: nn.Module) -> None:
    """Exclude all routers of the model from training.

    Raises:
        ConfigError: the model has no routers.
    """
    routers = [
        router
        for layer in model.modules()
        if hasattr(layer, "experts")
        for name in ROUTER_NAMES
        if isinstance(router := getattr(layer, name, None), nn.Module)
    ]
    if not routers:
        raise no_routers_error()
    for router in routers:
        router.requires_grad_(requires_grad=False)


def no_routers_error() -> ConfigError:
    """Return the error for `policy.freeze_router` on a model without experts."""
    return ConfigError(
        "policy.freeze_router = true: the model has no experts and therefore no router",
        key="policy.freeze_router",
        value=True,
        hint="set policy.freeze_router=false",
    )
