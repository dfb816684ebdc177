"""Kinds of decoder layers of a model: layers of one kind compute the same with other weights."""

from __future__ import annotations

from torch import nn

LAYER_NUMBERS = ("idx", "index", "number", "id")
"""Endings of the names of a module's attributes that number the layers."""


def num_distinct_layers(layers: nn.ModuleList) -> int:
    """Return the number of first layers among which each kind of layer is at least once, at least two."""
    first: dict[object, int] = {}
    for index, layer in enumerate(layers):
        first.setdefault(_kind_of_layer(layer), index)
    return min(len(layers), max(2, max(first.values()) + 1))


def _kind_of_layer(layer: nn.Module) -> tuple[object, ...]:
    """Return what layers of the same kind share: classes, settings and shapes of their modules."""
    return tuple(
        (name, type(module).__name__, _settings(module), tuple(p.shape for p in module.parameters(recurse=False)))
        for name, module in layer.named_modules()
    )


def _settings(module: nn.Module) -> tuple[object, ...]:
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str) and not name.endswith(LAYER_NUMBERS)
    )
