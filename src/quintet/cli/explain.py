"""`quintet explain`: what a key means, in the native schema and in the five dialects."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from quintet.cli.configuration import compose
from quintet.cli.opening import NATIVE, check_dialect, opened
from quintet.config.compose import flatten
from quintet.config.dialects.called import by_their_names
from quintet.config.dialects.composition.reading import Written, composed
from quintet.config.dialects.dialect import DIALECTS, Dialect
from quintet.config.dialects.ledger import Row
from quintet.config.dialects.loading import written_over_reference
from quintet.config.dialects.typos import meant
from quintet.config.keys import REPEATED, Key, documented, keys, show
from quintet.errors import ConfigError

__all__ = ["run"]

Entry = tuple[str, str, Row]
"""Dialect, reference, row."""


def run(words: list[str], dialect: str | None, *, every: bool, as_json: bool) -> None:
    """Print the meaning, type, range and default of a key, the keys of a section, or the whole ledger; of a
    file and a key, the value that a run will use and where it comes from.

    Raises:
        ConfigError: no such key or dialect; the message names the nearest.
    """
    check_dialect(dialect)
    entries = [entry for entry in _ledger() if dialect in (None, entry[0])]
    if every:
        _print_ledger(entries, [*keys()] if dialect == NATIVE else [], as_json=as_json)
    elif not words:
        hint = "quintet explain KEY, quintet explain CONFIG KEY, or quintet explain --list"
        raise ConfigError("which key?", hint=hint)
    elif len(words) == 1:
        _print_found(words[0], dialect, entries, as_json=as_json)
    else:
        _print_value(words[0], words[1], words[2:], dialect)


def _print_value(config: str, key: str, overrides: list[str], dialect: str | None) -> None:
    """What a run of the file uses, and where that comes from; the file need not be one that can run."""
    given = opened(config, overrides, dialect, quiet=True)
    written = None
    if given.dialect != NATIVE:
        found = composed(given.path, given.words, given.places, given.environment)
        written, here, _ = written_over_reference(found, DIALECTS[given.dialect])
        if _print_foreign(key, written, here):
            return
    asked = compose(config, overrides, dialect, "refuse", whole=True)
    values = flatten(asked.experiment.model_dump(mode="json"))
    if key not in values:
        legal = [*values, *(DIALECTS[given.dialect].rows() if given.dialect != NATIVE else ())]
        near = meant(key, legal)
        hint = f"did you mean {' or '.join(near)}?" if near else "`quintet explain --list` shows every key"
        raise ConfigError(f"{key} has no value in {config}", key=key, hint=hint)
    origin = asked.provenance[key]
    if written is not None and not _is_taken_over(key, values[key], origin, written, DIALECTS[given.dialect]):
        other = {"this dialect": f"{given.dialect} has it so", "default": "default"}
        origin = other.get(origin, f"follows from {origin}")
    print(f"{key} = {show(values[key])}  ({origin})")


def _print_foreign(key: str, written: Written, here: Dialect) -> bool:
    """The value of a key of the file's own dialect; False where it has none of that name."""
    rows = here.rows()
    named = next((row.key for row in rows.values() if key in row.aliases), key)
    row = rows.get(named) or rows.get(here.documented(named))
    if row is None and named not in written.sources:
        return False
    print(f"{named} = {show(written.value(named))}  ({_origin(written, named)})")
    if row is not None:
        references = [one.name for one in here.references if any(other.key == row.key for other in one.load())]
        _explain_row(here.name, next(iter(references), here.name), row)
    return True


def _origin(written: Written, key: str) -> str:
    """Where a foreign value stands; of one that is said as `${another}`, what that is."""
    follows = [f"{other}: {written.sources.get(other, 'the reference')}" for other in _led_to(written.raw(key))]
    place = written.sources.get(key, "" if follows else "the reference")
    return ", ".join([*filter(None, [place]), *([f"follows from {', '.join(follows)}"] if follows else [])])


def _led_to(raw: object) -> list[str]:
    return re.findall(r"\$\{([A-Za-z_][\w.]*)\}", raw) if isinstance(raw, str) else []


def _is_taken_over(key: str, value: object, origin: str, written: Written, dialect: Dialect) -> bool:
    """Whether a native value is that of one foreign key, as it is or by another word."""
    foreign = origin.partition(": ")[0]
    row = dialect.rows().get(foreign)
    if row is None or key not in row.native or origin.count(": ") > 1:
        return False
    return row.direct or show(written.value(foreign)) == show(value)


def _ledger() -> Iterator[Entry]:
    for dialect in DIALECTS.values():
        for reference in dialect.references:
            for row in reference.load():
                yield dialect.name, reference.name, row


def _print_ledger(entries: list[Entry], native: list[Key], *, as_json: bool) -> None:
    """A line a key, and how many there are: where lines are JSON, on stderr."""
    for key in native:
        print(json.dumps(_native_object(key)) if as_json else f"native    {key.name}")
    for entry in entries:
        dialect, reference, row = entry
        shown = f"{row.state:<9} {dialect:<6} {reference:<20} {row.key}"
        print(json.dumps(_as_object(entry)) if as_json else shown)
    honoured = sum(row.state == "honoured" for _, _, row in entries)
    count = f"{len(entries)} documented keys, {honoured} honoured, {len(entries) - honoured} pending"
    print(f"{len(native)} native keys" if native else count, file=sys.stderr if as_json else sys.stdout)


def _native_object(key: Key) -> dict[str, Any]:
    return {
        "dialect": NATIVE,
        "key": key.name,
        "takes": key.takes,
        "default": key.default,
        "with": None if key.kind is None else "=".join(key.kind),
        "waits_for": key.waits,
        "effect": key.meaning,
        "feeds_from": [f"{dialect}: {row.key}" for dialect, _, row in _feeding(key.name)],
    }


def _as_object(entry: Entry) -> dict[str, Any]:
    dialect, reference, row = entry
    return {
        "dialect": dialect,
        "file": reference,
        "key": row.key,
        "takes": row.takes.words,
        "default": row.default,
        "native": list(row.native),
        "unit": row.unit,
        "state": row.state,
        "waits_for": row.pending,
        "effect": row.effect,
        "proof": row.proof,
        "aliases": list(row.aliases),
    }


def _print_found(name: str, dialect: str | None, entries: list[Entry], *, as_json: bool) -> None:
    native = [key for key in keys() if key.name == documented(name)] if dialect in (None, NATIVE) else []
    foreign = [entry for entry in entries if name in (entry[2].key, *entry[2].aliases)]
    if not native and not foreign:
        legal = [key.name for key in keys()] if dialect in (None, NATIVE) else []
        near = by_their_names(name, legal) or meant(name, legal) or meant(name, {row.key for _, _, row in entries})
        hint = f"did you mean {' or '.join(near)}?" if near else "`quintet explain world` shows a section"
        raise ConfigError(f"unknown key {name}", key=name, hint=hint)
    for key in native:
        if as_json:
            print(json.dumps(_native_object(key)))
        else:
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
    print(f"  default  {show(row.default)}")
    if row.unit:
        print(f"  counts   {row.unit}")
    if row.native:
        print(f"  native   {', '.join(row.native)}")
    if row.aliases:
        print(f"  also     {', '.join(row.aliases)}")
    print(f"  state    {row.state if row.pending is None else f'pending: waits for {row.pending}'}")
    _print_alike([entry for native in row.native for entry in _feeding(native)], but=f"{dialect}: {row.key}")


def _feeding(native: str) -> Iterator[Entry]:
    """The rows of all dialects that feed a native key."""
    yield from (entry for entry in _ledger() if native in entry[2].native)


def _print_alike(entries: list[Entry], *, but: str = "") -> None:
    """What the same is called in the dialects."""
    others = [name for name in dict.fromkeys(f"{dialect}: {row.key}" for dialect, _, row in entries) if name != but]
    for number, other in enumerate(others):
        print(f"  {'alike' if number == 0 else '':<8} {other}")


def _explain(key: Key) -> None:
    print(_title(key))
    if key.meaning:
        print(f"  {key.meaning}")
    print(f"  takes    {key.takes}")
    if not key.is_section:
        print(f"  default  {show(key.default)}")
        if key.waits:
            print(f"  state    other values wait for {key.waits}")
        _print_alike(list(_feeding(key.name)))
        return
    print("  keys")
    for other in keys():
        listed = other.name == REPEATED or not (other.is_section or other.name.startswith(f"{REPEATED}."))
        if other.name.startswith(f"{key.name}.") and (listed or key.name.startswith(REPEATED)):
            print(f"    {_title(other)}")


def _title(key: Key) -> str:
    return key.name if key.kind is None else f"{key.name}  (with {key.kind[0]}={key.kind[1]})"
