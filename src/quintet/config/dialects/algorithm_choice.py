"""Conversion of advantage estimators and policy losses: their names, their options and users' own functions."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.value_types import is_function_address
from quintet.config.native.advantages import ADVANTAGE_UNION, CustomAdvantageConfig
from quintet.config.native.losses import LOSS_UNION, CustomLossConfig

ADVANTAGE, LOSS = "algorithm.advantage", "algorithm.loss"
_UNIONS = {ADVANTAGE: ADVANTAGE_UNION, LOSS: LOSS_UNION}


@cache
def option_names(section: str, name: str) -> frozenset[str]:
    """Return the options of an estimator (section `algorithm.advantage`) or of a loss (`algorithm.loss`)."""
    return frozenset(_UNIONS[section].config_class(name).model_fields) - {"name"}


def config_class(section: str, name: str) -> Any:
    """Return the config class, with its requirements, of an estimator or loss by its native name.

    For the address of a user's own function it is the class of such functions.
    """
    return _UNIONS[section].config_class("custom" if is_function_address(name) else name)


def choose(native: NativeBuilder, section: str, name: str, *origins: str) -> None:
    """Set an estimator or loss to a native name, or to the user's own function at that address.

    Options that are already set remain.
    """
    choice = {"name": "custom", "function": name} if is_function_address(name) else {"name": name}
    native.set(section, native.get(section, {}) | choice, *origins)


def export_name(foreign: ForeignBuilder, section: str, key: str) -> None:
    """Set a foreign key to the foreign name of the estimator or loss."""
    config = foreign.native_value(section)
    is_custom = isinstance(config, CustomAdvantageConfig | CustomLossConfig)
    foreign.set_native(key, config.function if is_custom else config.name)


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
