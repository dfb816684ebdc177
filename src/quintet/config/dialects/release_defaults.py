"""Documented keys with the default values of a release, under the names that it has for them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.release_tables import MANDATORY, Table, load_release_tables, stored_name

REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.*)([A-Za-z_][\w.]*)(?:,\s*([^${}]*))?\}")
"""Interpolation of another key: relative to its section if it begins with dots, perhaps with a default."""
MAX_CHAIN = 8
"""References that lead to a value."""


def spec_of_release(spec: KeySpec, table: Table, documented: Mapping[str, str]) -> KeySpec:
    """Return a key with its default in a release; `documented` are the documented keys by all their names.

    A key that the release lacks, or whose default is of another type than Quintet reads, keeps its own. Of several
    names, the first with a value counts: null stands for that of another name.
    """
    defaults = [*_defaults(spec, table, documented)]
    default = next((value for value in defaults if value is not None), defaults[0] if defaults else spec.default)
    return spec if default == spec.default else spec.model_copy(update={"default": default})


def newest_defaults(spec: KeySpec, framework: str) -> Iterator[tuple[str, Any]]:
    """Yield the default of a key in the newest release of each configuration of its framework that has the key."""
    if (tables := load_release_tables(framework)) is None:
        return
    for configuration, releases in tables.recorded.items():
        for release in releases:
            if defaults := [*_defaults(spec, tables.table(configuration, release), {})]:
                yield f"{configuration} of {framework} {release}", defaults[0]
                break


def _defaults(spec: KeySpec, table: Table, documented: Mapping[str, str]) -> Iterator[Any]:
    """Yield the valid defaults of a key under its names."""
    for name in (stored_name(table, name) for name in (spec.key, *spec.aliases)):
        if table.get(name, MANDATORY) == MANDATORY:
            continue
        try:
            default = _resolve(table[name], name, table, documented, spec.key)
        except LookupError:
            continue
        if (isinstance(default, str) and "${" in default) or spec.value_type.accepts(default):
            yield default


def _resolve(
    value: Any, name: str, table: Table, documented: Mapping[str, str], key: str, depth: int = MAX_CHAIN
) -> Any:
    """Return the value of a name of a key, in which only other documented keys are referred to.

    Raises:
        LookupError: it refers to anything else.
    """
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth == 0:
        raise LookupError(name)

    def target(match: re.Match[str]) -> Any:
        dots, other, default = match.groups()
        other = ".".join([*name.split(".")[: -len(dots)], other]) if dots else other
        if documented.get(other, key) != key:
            return f"${{{documented[other]}}}"
        if table.get(other, MANDATORY) != MANDATORY:
            return _resolve(table[other], other, table, documented, key, depth - 1)
        if default is None:
            raise LookupError(other)
        return yaml.safe_load(default)

    whole = REFERENCE.fullmatch(value)
    return target(whole) if whole else REFERENCE.sub(lambda match: str(target(match)), value)
