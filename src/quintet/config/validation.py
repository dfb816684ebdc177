"""Validation errors of pydantic as problems with the user's keys, each with a suggestion."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from quintet.config.dialects.typos import closest_keys, is_misspelt, is_typo
from quintet.config.dotted import get_value
from quintet.config.native.section import CONFLICT
from quintet.config.problems import ConfigProblem, describe_setting, setting_problem, source_of
from quintet.config.schema import OR, Key, chosen_name, documented_key, format_value, keys, keys_for, valid_keys
from quintet.config.yaml_reader import parse_override
from quintet.errors import nearest

SWITCHED_OFF = {
    "validation": "for no validation: validation.every_steps=-1 validation.before_training=false",
    "checkpoint": "for a single checkpoint, at the end: checkpoint.every_steps=0",
}
"""Hints for sections that cannot be null."""


class Synonyms(Protocol):
    """Function that returns the valid keys that other frameworks call by the last part of a name."""

    def __call__(self, name: str, legal: Collection[str], *, anywhere: bool = False) -> list[str]:
        """Return those of the same section, otherwise of a section around it, otherwise of `anywhere`."""
        ...


def describe_problems(
    error: ValidationError, tree: Mapping[str, Any], sources: Mapping[str, str], synonyms: Synonyms
) -> Iterator[ConfigProblem]:
    """Yield a problem for each error of pydantic; keys omit union members and list positions."""
    for details in error.errors():
        key = _key(details["loc"])
        if details["type"] == "extra_forbidden":
            value, source = details["input"], source_of(key, sources)
            message = f"unknown key {describe_setting(key, value, source)}"
            yield ConfigProblem(key, value, source, message, _suggestion(key, value, tree, synonyms))
        elif details["type"].startswith("union_tag"):
            yield _unknown_choice(f"{key}.name", tree, sources)
        elif details["type"] in (CONFLICT, "value_error"):
            yield _contradiction(key, details, tree, sources)
        else:
            yield _invalid_value(key, tree, sources)


def suggest_keys(name: str, valid: list[Key], synonyms: Synonyms) -> list[str]:
    """Return the valid keys that an unknown key may stand for.

    In this order: a synonym of another framework in the same section, a key of which the name is a slip of the hand, a
    similar key of the section, a key with all words of the name (`data.validation_rows` for `validation.rows`), the
    same last part in another section, a synonym in any section, a similar last part in any section. Of equal ones, keys
    of outer sections come first.
    """
    section, _, last = name.rpartition(".")
    names = dict.fromkeys(key.name for key in valid)
    if matches := synonyms(name, names) or _meant_key(name, names):
        return matches
    last_parts = [key.name.rpartition(".")[2] for key in valid]
    siblings = [part for key, part in zip(valid, last_parts, strict=True) if key.name.rpartition(".")[0] == section]
    if (close := nearest(last, siblings)) and (last not in last_parts or is_misspelt(last, close)):
        return [f"{section}.{close}" if section else close]
    if matches := _with_all_words(name, names):
        return matches
    if last not in last_parts and (matches := synonyms(name, names, anywhere=True)):
        return matches
    similar = last if last in last_parts else nearest(last, last_parts)
    candidates = {key.name for key, part in zip(valid, last_parts, strict=True) if part == similar}
    return sorted(candidates, key=lambda name: (name.count("."), name))[:3]


def _meant_key(name: str, names: Iterable[str]) -> list[str]:
    """Return the key of which a name is a slip of the hand; none if it lacks a section that several keys have."""
    slips = [other for other in closest_keys(name, names, limit=2) if is_typo(name, other, in_known_section=False)]
    is_unique = len(slips) == 1 or (bool(slips) and is_misspelt(name, slips[0]))
    return slips[:1] if is_unique else []


def _with_all_words(name: str, names: Collection[str]) -> list[str]:
    """Return the keys with all words of a dotted name and the fewest others; none for a name without a section."""
    words = _words(name)
    matches = [other for other in names if words <= _words(other)] if "." in name else []
    fewest = min((len(_words(other)) for other in matches), default=0)
    return sorted(other for other in matches if len(_words(other)) == fewest)[:3]


def _words(name: str) -> frozenset[str]:
    return frozenset(name.replace("_", ".").split("."))


def _key(location: tuple[int | str, ...]) -> str:
    choices = {key.name for key in keys() if key.is_choice}
    leaves = {key.name for key in keys() if not key.is_section} - {key.name for key in keys() if key.is_section}
    dotted, tag_follows = "", False
    for part in location:
        if not tag_follows:
            dotted = f"{dotted}.{part}" if dotted else str(part)
        if documented_key(dotted) in leaves:
            break
        tag_follows = documented_key(dotted) in choices and not tag_follows
    return dotted


def _suggestion(key: str, value: object, tree: Mapping[str, Any], synonyms: Synonyms) -> str:
    section, _, last = key.rpartition(".")
    valid = valid_keys(tree)
    if any(other.name == key for other in valid):
        return f"nest it: `{last}:` in its own line, indented below `{section}:`"
    choices = [other.choice for other in keys_for(tree) if other.name == key and other.choice is not None]
    if choices:
        choice, names = choices[0][0], " or ".join(name.replace(OR, " or ") for _, name in choices)
        return f"it belongs to {choice}={names}, and {choice} is {chosen_name(tree, choice.removesuffix('.name'))}"
    if suggestions := _meant_section(key, value, valid) or suggest_keys(key, valid, synonyms):
        return f"did you mean {' or '.join(suggestions)}?"
    siblings = [other.name.rpartition(".")[2] for other in valid if other.name.rpartition(".")[0] == section]
    return f"valid keys: {', '.join(siblings)}"


def _meant_section(key: str, value: object, valid: Sequence[Key]) -> list[str]:
    """Return the section that is meant by an unknown one, as the first key in it tells."""
    inside = ""
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        inside += f".{name}"
    meant = _meant_key(key + inside, dict.fromkeys(each.name for each in valid)) if inside else []
    return [name.removesuffix(inside) for name in meant]


def _unknown_choice(key: str, tree: Mapping[str, Any], sources: Mapping[str, str]) -> ConfigProblem:
    value = get_value(tree, key)
    names = [
        name for other in keys_for(tree) if other.name == key and other.choice for name in other.choice[1].split(" | ")
    ]
    close = nearest(value, names) if isinstance(value, str) else None
    hint = (f"did you mean {close}? " if close else "") + f"valid: {', '.join(names)}"
    return setting_problem(key, value, source_of(key, sources), "no such choice", hint)


def _contradiction(
    key: str, details: ErrorDetails, tree: Mapping[str, Any], sources: Mapping[str, str]
) -> ConfigProblem:
    """Describe keys of one section that contradict each other; those that were set are named with their sources."""
    value = get_value(tree, key)
    keys_set = [f"{key}.{name}" for name in value] if isinstance(value, Mapping) and value else [key]
    settings = [describe_setting(name, get_value(tree, name), source_of(name, sources)) for name in keys_set]
    message = f"{', '.join(settings)}: {details['msg'].removeprefix('Value error, ')}"
    first, remedies = keys_set[0], details.get("ctx", {}).get("remedies", ())
    if isinstance(value, list | tuple):
        position = next(part for part in details["loc"] if isinstance(part, int))
        hint = ", or ".join(f"{key}={_changed_entry(value, position, remedy)}" for remedy in remedies) or None
    else:
        prefix = f"{key}." if key else ""
        hint = ", or ".join(" ".join(prefix + change for change in remedy.split()) for remedy in remedies) or None
    return ConfigProblem(first, get_value(tree, first), source_of(first, sources), message, hint)


def _changed_entry(entries: Sequence[Mapping[str, Any]], position: int, remedy: str) -> str:
    """Return a list of sections with assignments to keys of one of them, as it is written in a configuration."""
    changes = dict(parse_override(change, {}) for change in remedy.split())
    return json.dumps([*entries[:position], dict(entries[position]) | changes, *entries[position + 1 :]])


def _invalid_value(key: str, tree: Mapping[str, Any], sources: Mapping[str, str]) -> ConfigProblem:
    value, source = get_value(tree, key), source_of(key, sources)
    entry = next((other for other in valid_keys(tree) if other.name == key), None)
    if entry is None:
        return setting_problem(key, value, source, "not valid here")
    if entry.is_section:
        inner = (*keys_for(tree), *keys())
        example = next(other for other in inner if other.name.startswith(f"{key}.") and not other.is_section)
        hint: str | None = f"set the keys in it, such as {example.name}={format_value(example.default)}"
        hint = SWITCHED_OFF.get(key, hint) if value is None else hint
    else:
        hint = _advice(entry, value)
    return setting_problem(key, value, source, f"must be {entry.value_type}", hint)


def _advice(key: Key, value: object) -> str | None:
    if isinstance(value, float) and value.is_integer() and "an integer" in key.value_type:
        return f"{key.name}={value:.0f}"
    if isinstance(value, bool | int | float) and key.value_type.startswith("text"):
        return f"put it in quotes, on the command line {key.name}='\"{format_value(value)}\"'"
    return f"{key.name}: {key.description}" if key.description else None
