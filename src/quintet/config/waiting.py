"""What a run asks for that this version, or the engine that it runs with, can't do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from quintet.config.capability import Capability, Waits
from quintet.config.compose import Composed, flatten
from quintet.config.engines import unmet_faults
from quintet.config.faults import Fault, raise_faults, source_of
from quintet.config.keys import show
from quintet.config.native.section import Section

__all__ = ["Waiting", "refuse_waiting", "waiting", "waiting_faults"]


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


def waiting_faults(composed: Composed) -> Iterator[Fault]:
    """The same as they are told to people, with the place where each was asked for; and options of another engine."""
    for each in waiting(composed.experiment):
        source = _source(each, composed)
        value = each.value.get("name", each.value) if isinstance(each.value, dict) else each.value
        message = f"{each.key} = {show(value)} ({source}): waits for {each.capability}"
        hint = f"leave it out, or set {each.key}={_word(each.instead)}"
        yield Fault(each.key, each.value, source, message, hint)
    yield from unmet_faults(composed)


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
