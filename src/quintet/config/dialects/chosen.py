"""Estimators and losses as a dialect's key names them: the options that each has, and functions of the user's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

from quintet.config.dialects.conversion import Native
from quintet.config.dialects.takes import Takes, choice, either
from quintet.config.native.advantages import AdvantageConfig, OutsideAdvantageConfig
from quintet.config.native.losses import LossConfig, OutsideLossConfig
from quintet.config.native.section import Section

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["OUTSIDE", "choose", "choosing", "express_choice", "give_options", "is_outside", "option_of", "options_of"]

_ADDRESS = re.compile(r"[^:\n]+:[A-Za-z_]\w*")
ADVANTAGE, LOSS = "algorithm.advantage", "algorithm.loss"
_KINDS = {ADVANTAGE: AdvantageConfig, LOSS: LossConfig}


def is_outside(value: object) -> bool:
    """Whether it is the address of a function of the user's own: `rules.py:mine`, `package.module:mine`."""
    return isinstance(value, str) and _ADDRESS.fullmatch(value) is not None


OUTSIDE = Takes("a function of your own as file.py:function", is_outside)


def choosing(*names: str) -> Takes:
    """One of these, or a function of the user's own."""
    return either(choice(*names), OUTSIDE)


@cache
def options_of(section: str, name: str) -> frozenset[str]:
    """The options, besides its name, of an estimator (`algorithm.advantage`) or of a loss (`algorithm.loss`)."""
    kinds: tuple[type[Section], ...] = get_args(get_args(_KINDS[section])[0])
    kind = next(one for one in kinds if name in get_args(one.model_fields["name"].annotation))
    return frozenset(kind.model_fields) - {"name"}


def choose(native: Native, section: str, value: str, words: Mapping[Any, str], *origins: str) -> None:
    """Set an estimator or a loss to what a foreign key names it, or to the user's own function."""
    chosen = {"name": words.get(value, value)}
    if is_outside(value):
        chosen = {"name": "outside", "function": value}
    native.put(section, chosen, *origins)


def give_options(native: Native, section: str, options: Mapping[str, tuple[Any, tuple[str, ...]]]) -> None:
    """Set those options that the chosen one has, each to a value with the foreign keys that it follows from; the
    user's own function is handed all that come from keys."""
    name = native.tree["algorithm"][section.rpartition(".")[2]]["name"]
    for option, (value, origins) in options.items():
        if option in options_of(section, name):
            native.put(f"{section}.{option}", value, *origins)
        elif name == "outside" and origins:
            native.put(f"{section}.options.{option}", value, *origins)


def option_of(one: Any, option: str, default: Any) -> Any:
    """An option of an estimator or a loss, or one that the user's own function is handed."""
    inside = getattr(one, "options", {})
    return inside.get(option, getattr(one, option, default))


def express_choice(foreign: Foreign, section: str, key: str, words: Mapping[Any, str]) -> None:
    """Say an estimator or a loss in a dialect's word."""
    algorithm = foreign.experiment.algorithm
    one: Any = algorithm.advantage if section == ADVANTAGE else algorithm.loss
    if isinstance(one, OutsideAdvantageConfig | OutsideLossConfig):
        foreign.put(key, one.function)
        return
    theirs = {ours: word for word, ours in reversed([*words.items()])}
    foreign.put(key, theirs.get(one.name, one.name))
