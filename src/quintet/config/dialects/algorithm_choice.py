"""Conversion of advantage estimators and policy losses: their names, their options and users' own functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import inverted
from quintet.config.dialects.value_types import is_function_address
from quintet.config.native.advantages import ADVANTAGE_UNION, CustomAdvantageConfig
from quintet.config.native.losses import LOSS_UNION, CustomLossConfig

ADVANTAGE, LOSS = "algorithm.advantage", "algorithm.loss"
_UNIONS = {ADVANTAGE: ADVANTAGE_UNION, LOSS: LOSS_UNION}


@cache
def option_names(section: str, name: str) -> frozenset[str]:
    """Return the options of an estimator (section `algorithm.advantage`) or of a loss (`algorithm.loss`)."""
    return frozenset(_UNIONS[section].config_class(name).model_fields) - {"name"}


def config_class(section: str, value: Any, names: Mapping[Any, str]) -> Any:
    """Return the native config class, with its requirements, of an estimator or loss by its foreign name.

    For a user's own function it is the class of such functions.
    """
    name = "custom" if is_function_address(value) else names.get(value, value)
    return _UNIONS[section].config_class(name)


def choose(native: NativeBuilder, section: str, value: str, names: Mapping[Any, str], *origins: str) -> None:
    """Set an estimator or loss to the native name of a foreign value, or to the user's own function.

    Options that are already set remain.
    """
    name = {"name": "custom", "function": value} if is_function_address(value) else {"name": names.get(value, value)}
    native.set(section, native.get(section, {}) | name, *origins)


def export_name(foreign: ForeignBuilder, section: str, key: str, names: Mapping[Any, str]) -> None:
    """Set a foreign key to the foreign name of the estimator or loss; `names` are native names by foreign names."""
    config = foreign.native_value(section)
    if isinstance(config, CustomAdvantageConfig | CustomLossConfig):
        foreign.set(key, config.function)
    else:
        foreign.set(key, inverted(names).get(config.name, config.name))


def set_options(native: NativeBuilder, section: str, options: Mapping[str, tuple[Any, tuple[str, ...]]]) -> None:
    """Set the options that the chosen estimator or loss has; values come with the foreign keys they follow from.

    A user's own function gets every option that follows from a foreign key.
    """
    name = native.get(f"{section}.name")
    for option, (value, origins) in options.items():
        if option in option_names(section, name):
            native.set(f"{section}.{option}", value, *origins)
        elif name == "custom" and origins:
            native.set(f"{section}.options.{option}", value, *origins)


def option_value(foreign: ForeignBuilder, section: str, option: str, default: Any = None) -> Any:
    """Return an option of the run's estimator or loss, also one that a user's own function gets."""
    config = foreign.native_value(section)
    return getattr(config, "options", {}).get(option, getattr(config, option, default))


@dataclass(frozen=True)
class AlgorithmOptions:
    """Options of the estimator or loss, each with the value of a foreign key; those that it lacks are left out."""

    section: str
    keys: Mapping[str, str]
    """Foreign keys by option."""
    default: Any = None
    """Value that is exported for an estimator or loss without the option; None exports nothing."""

    def to_native(self, values: ForeignValues, native: NativeBuilder) -> None:
        options = {name: (float(values[key]), (key,)) for name, key in self.keys.items() if values[key] is not None}
        set_options(native, self.section, options)

    def from_native(self, foreign: ForeignBuilder) -> None:
        for option, key in self.keys.items():
            value = option_value(foreign, self.section, option, self.default)
            if value is not None:
                foreign.set(key, value)
