"""What each key means, takes and defaults to: read from the schema, told to people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from quintet.config.native import Experiment
from quintet.errors import nearest

__all__ = [
    "NAMED",
    "REPEATED",
    "Key",
    "chosen",
    "documented",
    "keys",
    "keys_of",
    "legal_keys",
    "nearest_keys",
    "show",
]

JsonSchema = Mapping[str, Any]
WORDS = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "a mapping",
}


NAMED = "worlds"
"""The section whose parts have names of people's own: `worlds.lake.share` is documented as `worlds.*.share`."""

REPEATED = f"{NAMED}.*.world"
"""A section whose keys are those of another, and are listed there."""


@dataclass(frozen=True, slots=True)
class Key:
    """One dotted key. `training.steps` takes `an integer ≥ 0`."""

    name: str
    takes: str
    """Type and range in words."""
    default: object
    """A JSON value; a mapping for a section."""
    meaning: str
    kind: tuple[str, str] | None = None
    """`("world.name", "sokoban")` where the key exists only for that choice, or for those with ` | ` between them."""
    is_section: bool = False
    is_choice: bool = False
    """A section of which there are several kinds, told apart by its `name`."""
    waits: str | None = None
    """What this version lacks for other values than the default, in words."""
    lacks: tuple[str, ...] = ()
    """Those values, where they aren't all."""


OR = " | "


def _is_one_of(kind: str, kinds: str) -> bool:
    return kind in kinds.split(OR)


@cache
def keys() -> tuple[Key, ...]:
    """Every key of the schema in its order, of all kinds of world and algorithm."""
    schema = Experiment.model_json_schema()
    return tuple(_walk(schema, schema["$defs"], "", {}, None, None))


def documented(name: str) -> str:
    """The key under which another is documented: the same, with `*` for a name of people's own.

    >>> documented("worlds.lake.share"), documented("world.size")
    ('worlds.*.share', 'world.size')
    """
    section, dot, rest = name.partition(".")
    own, below, key = rest.partition(".")
    return f"{NAMED}.*{below}{key}" if dot and own and section == NAMED else name


def keys_of(tree: Mapping[str, Any]) -> list[Key]:
    """Every key, those below names of people's own once for each name that the tree gives."""
    section = tree.get(NAMED)
    names = [str(name) for name in section] if isinstance(section, Mapping) else []
    return [own for key in keys() for own in ([key] if "*" not in key.name else _named(key, names))]


def _named(key: Key, names: list[str]) -> Iterator[Key]:
    for name in names:
        kind = key.kind and (key.kind[0].replace("*", name, 1), key.kind[1])
        yield replace(key, name=key.name.replace("*", name, 1), kind=kind)


def chosen(tree: Mapping[str, Any], choice: str) -> str:
    """The kind of a choice in a configuration that is perhaps wrong elsewhere: `sokoban` for `world`."""
    place: Any = tree
    for part in (*choice.split("."), "name"):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place if isinstance(place, str) else str(_by_name()[documented(f"{choice}.name")][0].default)


def legal_keys(tree: Mapping[str, Any]) -> list[Key]:
    """The keys that are legal beside what the tree chooses."""
    legal = keys_of(tree)
    kinds = {key.name: chosen(tree, key.name) for key in legal if key.is_choice}
    return [
        key for key in legal if key.kind is None or _is_one_of(kinds[key.kind[0].removesuffix(".name")], key.kind[1])
    ]


def nearest_keys(name: str, legal: list[Key]) -> list[str]:
    """What somebody who wrote `name` may have meant: what another framework calls so there, else a sibling, else the
    same word elsewhere, else what another framework calls so anywhere, else a close one."""
    from quintet.config.dialects.called import by_their_names

    section, _, last = name.rpartition(".")
    names = {key.name for key in legal}
    if called := by_their_names(name, names):
        return called
    siblings = [key.name.rpartition(".")[2] for key in legal if key.name.rpartition(".")[0] == section]
    if close := nearest(last, siblings):
        return [f"{section}.{close}" if section else close]
    words = [key.name.rpartition(".")[2] for key in legal]
    if last not in words and (called := by_their_names(name, names, anywhere=True)):
        return called
    meant = last if last in words else nearest(last, words)
    return sorted({key.name for key, word in zip(legal, words, strict=True) if word == meant})[:3]


def show(value: object) -> str:
    """A value as it would be written in YAML, cut to one short line."""
    plain = value is None or isinstance(value, bool | int | float | list | tuple | Mapping)
    text = json.dumps(value, ensure_ascii=False, default=str) if plain else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


@cache
def _by_name() -> Mapping[str, tuple[Key, ...]]:
    names: dict[str, tuple[Key, ...]] = {}
    for key in keys():
        names[key.name] = (*names.get(key.name, ()), key)
    return names


def _walk(
    section: JsonSchema,
    sections: JsonSchema,
    prefix: str,
    defaults: Mapping[str, Any],
    kind: tuple[str, str] | None,
    of_section: str | None,
) -> Iterator[Key]:
    for name, field in section["properties"].items():
        dotted, default = f"{prefix}{name}", defaults.get(name, field.get("default"))
        named = field.get("additionalProperties", {})
        if isinstance(named, Mapping) and "$ref" in named:
            yield Key(dotted, _takes(field, []), default, _description(field), is_section=True)
            yield from _walk({"properties": {"*": named}}, sections, f"{dotted}.", {}, None, None)
            continue
        inner = [sections[ref.rpartition("/")[2]] for ref in _references(field)]
        takes = _takes(field, inner)
        meaning = _description(field)
        waits = field.get("waits") or of_section
        is_section = bool(inner)
        lacks = tuple(field.get("lacks", ()))
        yield Key(dotted, takes, default, meaning, kind, is_section, "oneOf" in field, waits, lacks)
        for part in inner:
            own = _names(part) if "oneOf" in field else None
            same = own is None or _is_one_of(str((default or {}).get("name")), own)
            below = (f"{dotted}.name", own) if own else kind
            waiting = waits or part.get("waits")
            yield from _walk(part, sections, f"{dotted}.", (default or {}) if same else {}, below, waiting)


def _description(field: JsonSchema) -> str:
    return " ".join(field.get("description", "").split())


def _names(part: JsonSchema) -> str:
    """Of one kind of a choice: the names under which it is chosen."""
    name = part["properties"]["name"]
    return OR.join(name.get("enum", [name.get("const")]))


def _references(field: JsonSchema) -> list[str]:
    options = [field, *field.get("anyOf", ()), *field.get("oneOf", ())]
    return [option["$ref"] for option in options if "$ref" in option]


def _takes(field: JsonSchema, inner: list[JsonSchema]) -> str:
    nullable = " or null" if {"type": "null"} in field.get("anyOf", ()) else ""
    if inner:
        return f"a section{nullable}"
    options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    return " or ".join(_type(option) for option in options) + nullable


def _type(field: JsonSchema) -> str:
    if "$ref" in field:
        return "a section"
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return "one of " + ", ".join(map(str, field["enum"]))
    if "prefixItems" in field:
        return "a list: " + ", ".join(_type(item) for item in field["prefixItems"])
    if "items" in field:
        return f"a list, each {_type(field['items'])}"
    word = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "string": "text",
        "object": "a mapping",
    }[field["type"]]
    if "pattern" in field:
        return f"{word} that matches {field['pattern']}"
    if field.get("minLength"):
        return f"{word} that isn't empty"
    return " ".join([word, *_range(field)])


def _range(field: JsonSchema) -> list[str]:
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field and abs(field[name]) < 1e6]
    bounds += [f"{sign} {field[name]}" for name, sign in signs.items() if name in field and abs(field[name]) >= 1e6]
    return [" and ".join(bounds)] if bounds else []
