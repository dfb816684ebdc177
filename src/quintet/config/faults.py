"""Every fault of a configuration in one message: key, value, source, nearest legal key, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from quintet.config.keys import Key, chosen, documented, keys, keys_of, legal_keys, nearest_keys, show
from quintet.errors import ConfigError, nearest

__all__ = ["Fault", "describe_faults", "raise_faults", "source_of"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: the dotted key, its value, where it was given, what is wrong, what to do."""

    key: str
    value: object
    source: str
    message: str
    hint: str | None = None
    elsewhere: bool = False
    """Another machine could do it: one with a GPU, or with a package that isn't installed here."""

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


def raise_faults(faults: Iterable[Fault]) -> None:
    """Raise them all as one message, if there are any.

    Raises:
        ConfigError: with the key, value and source of the first.
    """
    by_text = {str(fault): fault for fault in faults}
    if by_text:
        first = next(iter(by_text.values()))
        raise ConfigError("\n".join(by_text), key=first.key, value=first.value, source=first.source)


def describe_faults(error: ValidationError, tree: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[Fault]:
    """What pydantic found, in the user's own keys: names of union members and list positions left out."""
    for details in error.errors():
        key = _key(details["loc"])
        if details["type"] == "extra_forbidden":
            yield _unknown(key, details["input"], tree, sources)
        elif details["type"].startswith("union_tag"):
            yield _no_such_choice(f"{key}.name", tree, sources)
        elif details["type"] == "value_error":
            yield _contradiction(key, details, tree, sources)
        else:
            yield _illegal(key, tree, sources)


def source_of(key: str, sources: Mapping[str, str]) -> str:
    """Where a value came from; what lies in a list or a whole section came with it, a section with its parts."""
    above = key
    while above not in sources and "." in above:
        above = above.rpartition(".")[0]
    below = (source for other, source in sources.items() if other.startswith(f"{key}."))
    return sources[above] if above in sources else next(below, "default")


def _key(location: tuple[int | str, ...]) -> str:
    choices = {key.name for key in keys() if key.is_choice}
    leaves = {key.name for key in keys() if not key.is_section}
    dotted, tag_follows = "", False
    for part in location:
        if not tag_follows:
            dotted = f"{dotted}.{part}" if dotted else str(part)
        if documented(dotted) in leaves:
            break
        tag_follows = documented(dotted) in choices and not tag_follows
    return dotted


def _value(tree: Mapping[str, Any], key: str) -> object:
    place: Any = tree
    for part in key.split("."):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def _unknown(key: str, value: object, tree: Mapping[str, Any], sources: Mapping[str, str]) -> Fault:
    source = source_of(key, sources)
    return Fault(key, value, source, f"unknown key {key} = {show(value)} ({source})", _meant(key, tree))


def _meant(key: str, tree: Mapping[str, Any]) -> str:
    section, _, last = key.rpartition(".")
    legal = legal_keys(tree)
    if any(other.name == key for other in legal):
        return f"nest it: `{last}:` in its own line, indented below `{section}:`"
    elsewhere = [other.kind for other in keys_of(tree) if other.name == key and other.kind is not None]
    if elsewhere:
        choice, kinds = elsewhere[0][0], " or ".join(kind for _, kind in elsewhere)
        return f"it belongs to {choice}={kinds}, and {choice} is {chosen(tree, choice.removesuffix('.name'))}"
    if found := nearest_keys(key, legal):
        return f"did you mean {' or '.join(found)}?"
    siblings = [other.name.rpartition(".")[2] for other in legal if other.name.rpartition(".")[0] == section]
    return f"legal here: {', '.join(siblings)}"


def _no_such_choice(key: str, tree: Mapping[str, Any], sources: Mapping[str, str]) -> Fault:
    value, source = _value(tree, key), source_of(key, sources)
    kinds = [kind for other in keys_of(tree) if other.name == key and other.kind for kind in other.kind[1].split(" | ")]
    close = nearest(value, kinds) if isinstance(value, str) else None
    hint = (f"did you mean {close}? " if close else "") + f"legal: {', '.join(kinds)}"
    return Fault(key, value, source, f"{key} = {show(value)} ({source}): no such choice", hint)


def _contradiction(key: str, details: ErrorDetails, tree: Mapping[str, Any], sources: Mapping[str, str]) -> Fault:
    """Keys of one section that don't go together; those that were given are named with their sources."""
    value = _value(tree, key)
    inside = [f"{key}.{name}" for name in value] if isinstance(value, Mapping) else [key]
    given = ", ".join(f"{name} = {show(_value(tree, name))} ({source_of(name, sources)})" for name in inside)
    reason = details["msg"].removeprefix("Value error, ")
    return Fault(inside[0], _value(tree, inside[0]), source_of(inside[0], sources), f"{given}: {reason}")


def _illegal(key: str, tree: Mapping[str, Any], sources: Mapping[str, str]) -> Fault:
    value, source = _value(tree, key), source_of(key, sources)
    at = f"{key} = {show(value)} ({source})"
    entry = next((other for other in legal_keys(tree) if other.name == key), None)
    if entry is None:
        return Fault(key, value, source, f"{at}: not legal here")
    if entry.is_section:
        below = next(other.name for other in (*keys_of(tree), *keys()) if other.name.startswith(f"{key}."))
        return Fault(key, value, source, f"{at}: must be {entry.takes}", f"set the keys in it, such as {below}")
    return Fault(key, value, source, f"{at}: must be {entry.takes}", _advice(entry, value))


def _advice(key: Key, value: object) -> str | None:
    if isinstance(value, float) and value.is_integer() and "an integer" in key.takes:
        return f"write {value:.0f}"
    if isinstance(value, bool | int | float) and key.takes.startswith("text"):
        return "put it in quotes; on the command line, '\"…\"' keeps them"
    return f"{key.name}: {key.meaning}" if key.meaning else None
