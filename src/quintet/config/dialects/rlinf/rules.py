"""Conversion rules that several modules of RLinf's dialect need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quintet.config.dialects.conversion_rules import Derived


def first_of(native: str, *keys: str, export_none: bool = True) -> Derived:
    """Return a rule for a native key with the value of the first foreign key, which the others explain."""
    return Derived(native, keys, lambda *values: values[0], lambda value: (value,), export_none=export_none)


def switched(
    native: str,
    switch: str,
    key: str,
    to_value: Callable[[Any], Any] = lambda value: value,
    from_value: Callable[[Any], Any] = lambda value: value,
    *,
    on_value: bool = True,
) -> Derived:
    """Return a rule for a native key with the value of a foreign key, or null unless the switch has its on value."""
    return Derived(
        native,
        (switch, key),
        lambda state, value: to_value(value) if state == on_value else None,
        lambda value: (not on_value,) if value is None else (on_value, from_value(value)),
    )
