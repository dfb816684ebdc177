"""`quintet explain`: documentation of a metric, or of a key of the native schema or of a source framework."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from textwrap import shorten
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quintet.cli.config_source import NATIVE, check_dialect, read_config_source, split_release
from quintet.cli.key_search import search_keys
from quintet.config.deprecation import current_key
from quintet.config.dialects.key_checks import describe_value
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.release_defaults import newest_defaults
from quintet.config.dialects.release_tables import stored_name
from quintet.config.dialects.releases import all_keys, load_releases
from quintet.config.dialects.synonyms import keys_by_synonym
from quintet.config.dialects.typos import closest_keys
from quintet.config.dotted import flatten
from quintet.config.native.experiment import Experiment
from quintet.config.schema import REPEATED, Key, format_value, key_names, keys, keys_in, keys_named
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from quintet.config.dialects.composition.foreign_config import MergedConfig
    from quintet.config.dialects.dialect import Dialect
    from quintet.config.key_states import KeyState

Entry = tuple[str, str, KeySpec]
"""Dialect, reference file, documented key."""


def run(arguments: list[str], dialect: str | None, *, every: bool, metrics: bool, as_json: bool) -> None:
    """Print the documentation of a metric, a key or all of them, or the value and source of a key in a configuration.

    Raises:
        ConfigError: the metric, key or dialect is unknown; the message names similar ones.
    """
    check_dialect(split_release(dialect)[0])
    if metrics and not arguments:
        _metrics().print_list(as_json=as_json)
    elif every:
        _print_ledger([*_entries(dialect)], [*keys()] if dialect == NATIVE else [], as_json=as_json)
    elif not arguments:
        hint = "quintet explain KEY, quintet explain CONFIG KEY, quintet explain METRIC, or quintet explain --list"
        raise ConfigError("no key given", hint=hint)
    elif len(arguments) == 1 and (metrics or "/" in arguments[0]):
        _metrics().run(arguments[0], as_json=as_json)
    elif len(arguments) == 1 and split_release(dialect)[1] is not None:
        raise ConfigError(
            "--release without a configuration", key="--release", hint="quintet explain CONFIG KEY --release …"
        )
    elif len(arguments) == 1:
        _print_key(arguments[0], dialect, as_json=as_json)
    else:
        _print_value(arguments[0], arguments[1], arguments[2:], dialect)


def _metrics() -> ModuleType:
    """Return the module that explains metrics. It reads their table, which the documentation of a key need not."""
    from quintet.cli import explain_metric

    return explain_metric


def _print_value(config: str, key: str, overrides: list[str], dialect: str | None) -> None:
    """Print the value of a key in a configuration, which may have unsupported values, and its source."""
    # with Hydra and the converters a quarter of a second, which the documentation of a key need not take
    from quintet.cli.configuration import compose_source, load_config
    from quintet.config.dialects.loader import merge_with_reference

    source = read_config_source(config, overrides, dialect, quiet=True)
    states, merged = _states(config, overrides, dialect), None
    if source.dialect != NATIVE:
        values, _ = merge_with_reference(compose_source(source), DIALECTS[source.dialect])
        merged = values.merged
        if _print_foreign(key, merged, values.dialect, states):
            return
    composed = load_config(config, overrides, dialect, "refuse", allow_unsupported=True)
    key = current_key(key)
    native = flatten(composed.experiment.model_dump(mode="json"))
    if key not in native:
        valid = [*native, *(DIALECTS[source.dialect].specs() if source.dialect != NATIVE else ())]
        similar = closest_keys(key, valid)
        listing = f"`quintet explain --list --dialect {source.dialect}` shows every key"
        hint = f"did you mean {' or '.join(similar)}?" if similar else listing
        raise ConfigError(f"{key} has no value in {config}", key=key, hint=hint)
    origin = composed.provenance[key]
    if merged is not None and not _is_copied(key, native[key], origin, merged, DIALECTS[source.dialect]):
        others = {"this dialect": f"constant for {source.dialect}", "default": "default"}
        origin = others.get(origin, f"follows from {origin}")
    print(f"{key} = {format_value(native[key])}  ({origin})")
    if source.dialect == NATIVE:
        print(f"  state    {_state_here(key, states, 'not set')}")


def _states(config: str, overrides: list[str], dialect: str | None) -> dict[str, KeyState]:
    """Return the states of the keys that a configuration sets, by key; none if it cannot be converted."""
    from quintet.cli.configuration import states_of_run

    with suppress(ConfigError):
        return {each.setting.key: each for each in states_of_run(config, overrides, dialect)}
    return {}


def _state_here(key: str, states: Mapping[str, KeyState], otherwise: str) -> str:
    """Return the state of a key in the run, with the reason, or `otherwise` for one that is not set."""
    if (each := states.get(key)) is None:
        return otherwise
    return f"{each.state}: {each.reason}" if each.reason else each.state


def _print_foreign(key: str, merged: MergedConfig, dialect: Dialect, states: Mapping[str, KeyState]) -> bool:
    """Print the value of a key of the file's own framework; return False if it has no such key."""
    specs = dialect.specs()
    name = next((spec.key for spec in specs.values() if key in spec.aliases), key)
    spec = dialect.spec(name)
    if spec is None and name not in merged.sources:
        return False
    release = dialect.release
    has_default = release is not None and stored_name(release.table, name) in release.table
    default = f"default of {release.framework} {release.name}" if release and has_default else "the reference"
    print(f"{name} = {format_value(merged.value(name))}  ({_origin(merged, name, default)})")
    if spec is None:
        print(f"  state    {_state_here(name, states, 'no reference documents the key')}")
    else:
        files = [file.name for file in dialect.references if any(other.key == spec.key for other in file.load())]
        _print_spec(dialect.name, next(iter(files), dialect.name), spec, _state_here(name, states, ""))
    return True


def _origin(merged: MergedConfig, key: str, default: str) -> str:
    """Return the source of a foreign value, or `default`; for an interpolation, also the sources of the keys in it."""
    follows = [f"{other}: {merged.sources.get(other, default)}" for other in _interpolated(merged.raw(key))]
    source = merged.sources.get(key, "" if follows else default)
    return ", ".join([*filter(None, [source]), *([f"follows from {', '.join(follows)}"] if follows else [])])


def _interpolated(raw: object) -> list[str]:
    return re.findall(r"\$\{([A-Za-z_][\w.]*)\}", raw) if isinstance(raw, str) else []


def _is_copied(key: str, value: object, origin: str, merged: MergedConfig, dialect: Dialect) -> bool:
    """Return whether a native value is the value of one foreign key, unchanged or under another name."""
    foreign = origin.partition(": ")[0]
    spec = dialect.specs().get(foreign)
    if spec is None or key not in spec.native or origin.count(": ") > 1:
        return False
    return spec.direct or format_value(merged.value(foreign)) == format_value(value)


def _entries(dialect: str | None, key: str | None = None) -> Iterator[Entry]:
    """Yield the keys of all releases of a framework, or of all frameworks; only of files that may have a key."""
    for framework in DIALECTS.values():
        if dialect in (None, framework.name):
            names = () if key is None else (key, framework.documented(key))
            yield from ((framework.name, file, spec) for file, spec in all_keys(framework, names))


def _print_ledger(entries: list[Entry], native: list[Key], *, as_json: bool) -> None:
    """Print one line per key, and their number; with JSON the number goes to stderr."""
    for key in native:
        print(json.dumps(_native_object(key)) if as_json else f"native    {key.name}")
    for entry in entries:
        dialect, reference, spec = entry
        shown = f"{spec.state:<9} {dialect:<6} {reference:<20} {spec.key}"
        print(json.dumps(_spec_object(entry)) if as_json else shown)
    honoured = sum(spec.state == "honoured" for _, _, spec in entries)
    count = f"{len(entries)} documented keys, {honoured} supported, {len(entries) - honoured} not supported yet"
    print(f"{len(native)} native keys" if native else count, file=sys.stderr if as_json else sys.stdout)


def _native_object(key: Key) -> dict[str, Any]:
    return {
        "dialect": NATIVE,
        "key": key.name,
        "takes": key.value_type,
        "default": key.default,
        "with": None if key.choice is None else "=".join(key.choice),
        "waits_for": key.requires,
        "effect": key.description,
        "feeds_from": [f"{dialect}: {spec.key}" for dialect, _, spec in _specs_for(key.name)],
    }


def _spec_object(entry: Entry) -> dict[str, Any]:
    dialect, reference, spec = entry
    return {
        "dialect": dialect,
        "file": reference,
        "key": spec.key,
        "takes": spec.value_type.description,
        "default": spec.default,
        "release_defaults": dict(newest_defaults(spec, dialect)),
        "native": list(spec.native),
        "computed_by": spec.computed_by if spec.computed else None,
        "unit": spec.unit,
        "state": spec.state,
        "releases": load_releases(dialect).of(spec.key),
        "waits_for": spec.requires,
        "effect": spec.effect,
        "aliases": list(spec.aliases),
    }


def _print_key(name: str, dialect: str | None, *, as_json: bool) -> None:
    current = current_key(name)
    native = keys_named(current) if dialect in (None, NATIVE) else []
    if native and current != name:
        print(f"{name} is now called {current}", file=sys.stderr)
    foreign = _foreign_entries(name, dialect)
    if not native and not foreign:
        _print_similar(name, dialect, as_json=as_json)
    elif as_json:
        for key in native:
            print(json.dumps(_native_object(key)))
    elif len(native) > 1:
        _print_choices(native)
    elif native:
        _print_native(native[0])
    for entry in foreign:
        if as_json:
            print(json.dumps(_spec_object(entry)))
        else:
            _print_spec(*entry)


def _print_similar(name: str, dialect: str | None, *, as_json: bool) -> None:
    """Print the metric of that name, or the keys with names like it.

    Raises:
        ConfigError: there is none; the message names similar ones.
    """
    if _metrics().is_metric(name):
        _metrics().run(name, as_json=as_json)
    elif "." not in name and (related := search_keys(name)) and not as_json:
        _print_related(name, related)
    else:
        valid = key_names() if dialect in (None, NATIVE) else []
        similar = (
            keys_by_synonym(name, valid)
            or closest_keys(name, valid)
            or closest_keys(name, {spec.key for _, _, spec in _entries(dialect)})
        )
        hint = f"did you mean {' or '.join(similar)}?" if similar else "`quintet explain env` shows a section"
        _check_known(name, dialect)
        raise ConfigError(f"unknown key {name}", key=name, hint=hint)


def _foreign_entries(name: str, dialect: str | None) -> list[Entry]:
    """Return the documentation of a foreign key; that of the key whose it shares if it is in a similar section."""
    base = DIALECTS[dialect].base if dialect is not None and dialect != NATIVE else None
    for searched in (dialect, *([] if base is None else [base.name])):
        entries = [*_entries(searched, name)]
        if exact := [entry for entry in entries if name in (entry[2].key, *entry[2].aliases)]:
            return exact
        documented = {other.name: other.documented(name) for other in DIALECTS.values()}
        if shared := [entry for entry in entries if entry[2].key == documented[entry[0]]]:
            print(f"{name} has the documentation of {shared[0][2].key}", file=sys.stderr)
            return shared
    return []


def _check_known(name: str, dialect: str | None) -> None:
    """Refuse to explain a key of a framework's releases that no key file documents.

    Raises:
        ConfigError: a framework has that key.
    """
    frameworks = [other.name for other in DIALECTS.values() if dialect in (None, other.name)]
    knowing = [other for other in frameworks if name in DIALECTS[other].known_keys()]
    if knowing:
        hint = f"give the file to see what it means there: quintet explain FILE {name}"
        raise ConfigError(f"{name} is a key of {' and '.join(knowing)} without documentation here", key=name, hint=hint)


def _print_related(name: str, related: list[Key]) -> None:
    print(f"No key is called {name!r}. Related keys:")
    width = max(len(key.name) for key in related)
    for key in related:
        print(f"  {key.name:<{width}}  {shorten(key.description, 90, placeholder=' …')}")
    if metrics := _metrics().related_metrics(name):
        print(shorten(f"Metrics: {', '.join(metric.name for metric in metrics)}", 110, placeholder=" …"))


def _print_choices(keys: list[Key]) -> None:
    """Print a key that several choices of a section share once, with the differences between them."""
    first, defaults = keys[0], flatten(Experiment().model_dump(mode="json"))
    print(first.name)
    rows = [
        [
            str(key.choice[1] if key.choice else ""),
            key.value_type,
            "required" if key.is_required else f"default {format_value(key.default)}",
            key.description,
        ]
        for key in keys
    ]
    is_name = all(row[0] == row[1] for row in rows)
    if len({key.description for key in keys}) == 1:
        print(f"  {first.description}")
    if is_name:
        print(f"  type     one of {', '.join(row[0] for row in rows)}")
    elif len({key.value_type for key in keys}) == 1:
        print(f"  type     {first.value_type}")
    if first.name in defaults:
        print(f"  default  {format_value(defaults[first.name])}")
    _print_synonyms(list(_specs_for(first.name)))
    if is_name or first.choice is None:
        return
    print(f"  only with {first.choice[0]}")
    for name, value_type, default, description in rows:
        details = [default]
        details += [value_type] if len({row[1] for row in rows}) > 1 else []
        details += [description] if len({row[3] for row in rows}) > 1 else []
        print(f"    {name}: {', '.join(details)}")


def _print_spec(dialect: str, reference: str, spec: KeySpec, state: str = "") -> None:
    """Print the documentation of a key with its state in a run, by default that in general."""
    print(f"{spec.key}  ({dialect}, {reference})")
    print(f"  {spec.effect}")
    print(f"  type     {spec.value_type.description}")
    print(f"  default  {format_value(spec.default)}")
    for place, default in () if state else newest_defaults(spec, dialect):
        if default != spec.default:
            print(f"           {format_value(default)} in {place}")
    if spec.unit:
        print(f"  unit     {spec.unit}")
    if spec.native:
        print(f"  native   {', '.join(spec.native)}")
    if spec.computed:
        print(f"  computed by {spec.computed_by}")
    if spec.aliases:
        print(f"  aliases  {', '.join(spec.aliases)}")
    if releases := load_releases(dialect).of(spec.key):
        print(f"  releases {releases}")
    print(f"  state    {state or _state_in_general(spec)}")
    _print_synonyms([entry for native in spec.native for entry in _specs_for(native)], exclude=f"{dialect}: {spec.key}")


def _state_in_general(spec: KeySpec) -> str:
    if spec.requires is None:
        return "honoured" if spec.native else "no effect"
    if not spec.noop:
        return spec.requires.refusal().removeprefix("is ")
    supported = " or ".join(map(describe_value, spec.noop))
    return f"honoured with {supported}; other values {spec.requires.refusal(plural=True)}"


def _specs_for(native: str) -> Iterator[Entry]:
    """Yield the keys of the frameworks' reference documents that set a native key."""
    for dialect in DIALECTS.values():
        for reference in dialect.references:
            specs = reference.load() if reference.mentions([native]) else ()
            yield from ((dialect.name, reference.name, spec) for spec in specs if native in spec.native)


def _print_synonyms(entries: list[Entry], *, exclude: str = "") -> None:
    """Print the corresponding keys of source frameworks."""
    others = [
        name for name in dict.fromkeys(f"{dialect}: {spec.key}" for dialect, _, spec in entries) if name != exclude
    ]
    for number, other in enumerate(others):
        print(f"  {'see also' if number == 0 else '':<8} {other}")


def _print_native(key: Key) -> None:
    print(_title(key))
    if key.description:
        print(f"  {key.description}")
    print(f"  type     {key.value_type}")
    if not key.is_section:
        print("  required" if key.is_required else f"  default  {format_value(key.default)}")
        if key.requires:
            print(f"  state    other values are not supported yet: they require {key.requires}")
        _print_synonyms(list(_specs_for(key.name)))
        return
    print("  keys")
    for title in dict.fromkeys(
        _title(other) for other in keys_in(key.name.partition(".")[0]) if _is_listed(other, key)
    ):
        print(f"    {title}")


def _is_listed(key: Key, section: Key) -> bool:
    in_list = key.name == REPEATED or not (key.is_section or key.name.startswith(f"{REPEATED}."))
    return key.name.startswith(f"{section.name}.") and (in_list or section.name.startswith(REPEATED))


def _title(key: Key) -> str:
    return (
        key.name
        if key.choice is None or key.choice[0] == key.name
        else f"{key.name}  (with {key.choice[0]}={key.choice[1]})"
    )
