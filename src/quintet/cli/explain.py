"""`quintet explain`: what a key means, in the native schema and in the five dialects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quintet.cli.configuration import NATIVE, compose
from quintet.config.compose import flatten
from quintet.config.dialects.dialect import DIALECTS, detect
from quintet.config.dialects.ledger import Row
from quintet.config.dialects.loading import written_over_reference
from quintet.config.dialects.reading import composed
from quintet.config.dialects.typos import meant
from quintet.config.keys import Key, keys, show
from quintet.config.source import read_file
from quintet.errors import ConfigError, nearest

__all__ = ["run"]

Entry = tuple[str, str, Row]
"""Dialect, reference, row."""


def run(words: list[str], dialect: str | None, *, every: bool, as_json: bool) -> None:
    """Print the meaning, type, range and default of a key, the keys of a section, or the whole ledger; of a
    file and a key, the value that a run will use and where it comes from.

    Raises:
        ConfigError: no such key or dialect; the message names the nearest.
    """
    if dialect is not None and dialect not in (NATIVE, *DIALECTS):
        close = nearest(dialect, [NATIVE, *DIALECTS])
        hint = (f"did you mean {close}? " if close else "") + f"there are {', '.join([NATIVE, *DIALECTS])}"
        raise ConfigError(f"unknown dialect {dialect}", key="--dialect", value=dialect, hint=hint)
    entries = [entry for entry in _ledger() if dialect in (None, entry[0])]
    if every:
        _print_ledger(entries, as_json=as_json)
    elif not words:
        hint = "quintet explain KEY, quintet explain CONFIG KEY, or quintet explain --list"
        raise ConfigError("which key?", hint=hint)
    elif len(words) == 1:
        _print_found(words[0], dialect, entries, as_json=as_json)
    else:
        _print_value(Path(words[0]), words[1], words[2:], dialect)


def _print_value(path: Path, key: str, overrides: list[str], dialect: str | None) -> None:
    """What a run of the file uses; the file need not be one that can run."""
    found = dialect or next(iter(detect(read_file(path, {}))), NATIVE)
    if found != NATIVE:
        written, here, _ = written_over_reference(composed(path, overrides), DIALECTS[found])
        row = here.rows().get(key)
        if row is not None:
            print(f"{key} = {show(written.value(key))}  ({written.sources.get(key, 'the reference')})")
            names = {reference.name for reference in here.references}
            for entry in _ledger():
                if entry[0] == found and entry[1] in names and key.endswith(entry[2].key):
                    _explain_row(*entry)
            return
    asked = compose(str(path), overrides, dialect, "refuse", whole=True)
    values = flatten(asked.experiment.model_dump(mode="json"))
    if key not in values:
        legal = [*values, *(DIALECTS[found].rows() if found != NATIVE else ())]
        near = meant(key, legal)
        hint = f"did you mean {' or '.join(near)}?" if near else "`quintet explain --list` shows every key"
        raise ConfigError(f"{key} has no value in {path}", key=key, hint=hint)
    print(f"{key} = {show(values[key])}  ({asked.provenance[key]})")


def _ledger() -> Iterator[Entry]:
    for dialect in DIALECTS.values():
        for reference in dialect.references:
            for row in reference.load():
                yield dialect.name, reference.name, row


def _print_ledger(entries: list[Entry], *, as_json: bool) -> None:
    if as_json:
        for entry in entries:
            print(json.dumps(_as_object(entry)))
        return
    for dialect, reference, row in entries:
        print(f"{row.state:<9} {dialect:<6} {reference:<20} {row.key}")
    honoured = sum(row.state == "honoured" for _, _, row in entries)
    print(f"{len(entries)} documented keys, {honoured} honoured, {len(entries) - honoured} pending")


def _as_object(entry: Entry) -> dict[str, Any]:
    dialect, reference, row = entry
    return {
        "dialect": dialect,
        "file": reference,
        "key": row.key,
        "takes": row.takes.words,
        "default": row.default,
        "native": list(row.native),
        "state": row.state,
        "waits_for": row.pending,
        "effect": row.effect,
        "proof": row.proof,
        "aliases": list(row.aliases),
    }


def _print_found(name: str, dialect: str | None, entries: list[Entry], *, as_json: bool) -> None:
    native = [key for key in keys() if key.name == name] if dialect in (None, NATIVE) else []
    foreign = [entry for entry in entries if name in (entry[2].key, *entry[2].aliases)]
    if not native and not foreign:
        legal = [key.name for key in keys()] if dialect in (None, NATIVE) else []
        near = meant(name, legal) or meant(name, {row.key for _, _, row in entries})
        hint = f"did you mean {' or '.join(near)}?" if near else "`quintet explain world` shows a section"
        raise ConfigError(f"unknown key {name}", key=name, hint=hint)
    for key in native:
        _explain(key)
    for entry in foreign:
        if as_json:
            print(json.dumps(_as_object(entry)))
        else:
            _explain_row(*entry)


def _explain_row(dialect: str, reference: str, row: Row) -> None:
    print(f"{row.key}  ({dialect}, {reference})")
    print(f"  {row.effect}")
    print(f"  takes    {row.takes.words}")
    print(f"  shown    {show(row.default)}")
    if row.native:
        print(f"  native   {', '.join(row.native)}")
    if row.aliases:
        print(f"  also     {', '.join(row.aliases)}")
    print(f"  state    {row.state if row.pending is None else f'pending: waits for {row.pending}'}")
    alike = [f"{d}: {other.key}" for d, _, other in _ledger() if row.native and other.native[:1] == row.native[:1]]
    others = [word for word in alike if word != f"{dialect}: {row.key}"]
    if others:
        print(f"  alike    {', '.join(others)}")


def _explain(key: Key) -> None:
    print(_title(key))
    if key.meaning:
        print(f"  {key.meaning}")
    print(f"  takes    {key.takes}")
    if not key.is_section:
        print(f"  default  {show(key.default)}")
        return
    print("  keys")
    for other in keys():
        if other.name.startswith(f"{key.name}.") and not other.is_section:
            print(f"    {_title(other)}")


def _title(key: Key) -> str:
    return key.name if key.kind is None else f"{key.name}  (with {key.kind[0]}={key.kind[1]})"
