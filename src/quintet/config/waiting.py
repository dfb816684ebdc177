"""What a run asks for that this version, or the engine that it runs with, can't do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic.fields import FieldInfo

from quintet.config.backends import backend_faults
from quintet.config.capability import Capability, Waits
from quintet.config.compose import Composed, flatten
from quintet.config.engines import unmet_faults
from quintet.config.faults import Fault, raise_faults, source_of
from quintet.config.keys import show
from quintet.config.layouts import layout_faults
from quintet.config.native import Experiment
from quintet.config.native.section import Section
from quintet.config.plan.values import told, value, with_value
from quintet.config.spread import COUNTS, Spread, as_started, command, ready_keys, spreads
from quintet.config.started import Started, started

__all__ = ["Waiting", "on_these_ranks", "refuse_waiting", "spread_faults", "waiting", "waiting_faults"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A native key whose value asks for what isn't there."""

    key: str
    value: Any
    capability: Capability
    instead: Any
    """The value that asks for nothing."""


def waiting(section: Section, prefix: str = "") -> Iterator[Waiting]:
    """Every such key, in the order of the schema; a section that waits as a whole counts once."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        default = field.get_default(call_default_factory=True)
        mark = _mark(field)
        if isinstance(value, Section) and value.waits is not None:
            mark = value.waits
            yield Waiting(key, value.model_dump(mode="json"), mark.capability, _plain(default))
        elif mark is not None and value != default and mark.asked_by(value):
            yield Waiting(key, _plain(value), mark.capability, _plain(default))
        elif isinstance(value, Section):
            yield from waiting(value, f"{key}.")
        elif isinstance(value, dict):
            for own, part in value.items():
                yield from waiting(part, f"{key}.{own}.") if isinstance(part, Section) else ()


def waiting_faults(composed: Composed, here: Started | None = None) -> Iterator[Fault]:
    """The same as they are told to people, with the place where each was asked for; options of another engine; and
    where other than as many processes run as there are to be devices. `here` is as what this process counts."""
    config, here = composed.experiment, here or started()
    ready = ready_keys(config, here)
    for each in waiting(config):
        if each.key in ready:
            continue
        source = _source(each, composed)
        asked = each.value.get("name", each.value) if isinstance(each.value, dict) else each.value
        message = f"{each.key} = {show(asked)} ({source}): waits for {each.capability}"
        hint = f"leave it out, or set {each.key}={_word(each.instead)}"
        if each.key in COUNTS:
            hint += f"; or start it with {command(config, max(spread.devices for spread in spreads(config)))}"
        yield Fault(each.key, each.value, source, message, hint)
    yield from unmet_faults(composed)
    yield from backend_faults(composed)
    yield from layout_faults(composed)
    yield from spread_faults(composed, here)


def spread_faults(composed: Composed, here: Started) -> Iterator[Fault]:
    """Devices that aren't as many as processes; of one process only where nothing else waits because of them."""
    config = composed.experiment
    for spread in spreads(config):
        if spread.devices == here.size or (here.size == 1 and spread.keys[0] in COUNTS):
            continue
        key = next((key for key in reversed(spread.keys) if _source_of(composed, key) != "default"), spread.keys[0])
        ran = "this is one process" if here.size == 1 else f"torchrun started {here.size} processes"
        message = f"{told(composed, key)}: that spreads the learner over {spread.devices} devices, and {ran}"
        yield Fault(key, spread.devices, _source_of(composed, key), message, f"start it with {_right(config, spread)}")


def _right(config: Experiment, spread: Spread) -> str:
    if spread.devices > 1:
        return command(config, spread.devices)
    return "no torchrun, as `quintet …`"


def on_these_ranks(composed: Composed) -> Composed:
    """The configuration with as many devices as there are processes, where nobody says how many there are to be."""
    here, places = started(), dict(composed.provenance)
    config = composed.experiment
    for key, count in as_started(config, here, partial(_is_given, config)):
        config, places[key] = with_value(config, key, count), "torchrun"
    return replace(composed, experiment=config, provenance=places)


def _is_given(config: Experiment, key: str) -> bool:
    """Whether somebody said that very key, be it its default."""
    above, _, name = key.rpartition(".")
    section = value(config, above)
    return isinstance(section, Section) and name in section.model_fields_set


def _source_of(composed: Composed, key: str) -> str:
    return source_of(key, composed.provenance)


def _source(each: Waiting, composed: Composed) -> str:
    """Where it was asked for; of a section, where the first of its keys that somebody gave was."""
    names = [each.key, *(f"{each.key}.{name}" for name in flatten(each.value))] if isinstance(each.value, dict) else []
    places = (composed.provenance.get(name, "default") for name in names)
    return next((place for place in places if place != "default"), source_of(each.key, composed.provenance))


def refuse_waiting(composed: Composed) -> None:
    """Let a run begin only if this version, and its engine, can do all of it.

    Raises:
        ConfigError: it can't; one message names every such key.
    """
    raise_faults(waiting_faults(composed))


def _mark(field: FieldInfo) -> Waits | None:
    return next((mark for mark in field.metadata if isinstance(mark, Waits)), None)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, Section) else value


def _word(value: Any) -> str:
    return f"{{name: {value['name']}}}" if isinstance(value, dict) and "name" in value else show(value)
