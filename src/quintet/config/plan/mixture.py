"""Whether several worlds can be one run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quintet.config.faults import Fault
from quintet.config.keys import show
from quintet.config.native import FrozenLakeConfig
from quintet.config.native.mixture import ALL_WORLDS
from quintet.config.plan.values import source

if TYPE_CHECKING:
    from quintet.config.compose import Composed

__all__ = ["mixture_faults"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def mixture_faults(composed: Composed) -> Iterator[Fault]:
    """What `worlds` can't be, and what can't be beside it."""
    worlds = composed.experiment.worlds
    if not worlds:
        return
    yield from _beside(composed)
    for name, one in worlds.items():
        yield from _name_faults(composed, name)
        if one.world.name == "prompts":
            key = f"worlds.{name}.world.name"
            message = f"{key} = 'prompts' ({source(composed, key)}): questions from files can't be mixed with worlds"
            yield Fault(key, "prompts", source(composed, key), message, "ask them in a run of their own")


def _beside(composed: Composed) -> Iterator[Fault]:
    """`world`, where somebody gave it, too."""
    world, places, usual = composed.experiment.world, composed.provenance, FrozenLakeConfig()
    given = [key.split(".")[1] for key, place in places.items() if key.startswith("world.") and place != "default"]
    if not given:
        return
    name = next((one for one in given if getattr(world, one) != getattr(usual, one, None)), given[0])
    key, value, worlds = f"world.{name}", getattr(world, name), ", ".join(composed.experiment.worlds)
    message = f"{key} = {show(value)} ({source(composed, key)}): the run plays {worlds}, which `worlds` names"
    yield Fault(key, value, source(composed, key), message, f"put it into one of them: worlds.NAME.{key}")


def _name_faults(composed: Composed, name: str) -> Iterator[Fault]:
    key = f"worlds.{name}"
    places = (place for other, place in composed.provenance.items() if other.startswith(f"{key}."))
    place = next((place for place in places if place != "default"), "default")
    if not NAME.fullmatch(name):
        message = f"{key} ({place}): {show(name)} can't be a name in metrics and directories"
        yield Fault(key, name, place, message, "letters, digits, - and _")
    elif name == ALL_WORLDS:
        message = f"{key} ({place}): metrics of all worlds together are called so"
        yield Fault(key, name, place, message, "give it another name")
