"""Hints of checks of the native configuration, translated to the keys of the framework whose format the user wrote."""

import re
from typing import Any

from pydantic import ValidationError

from quintet.config.dialects.conversion import NativeBuilder, exported_values, to_foreign_value
from quintet.config.dialects.ledger import is_effective
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dotted import set_value
from quintet.config.native.experiment import Experiment
from quintet.config.schema import documented_key, format_value, keys
from quintet.config.yaml_reader import parse_override
from quintet.errors import ConfigError

CHANGE = re.compile(r"leave ([\w.]+\.\w+) out|([a-z_]\w*(?:\.\w+)*)=(\[[^]]*\]|\{[^}]*\}|[^\s,;()]+)")
PLAIN = re.compile(r"[\w./-]+")


def translate_hint(experiment: Experiment, native: NativeBuilder, hint: str) -> str | None:
    """Return a hint with changes of foreign keys in place of those of native keys.

    Alternatives without a counterpart are left out; None if none has one.
    """
    parts = (_translate(experiment, native, part) for part in hint.split(", or "))
    return ", or ".join(part for part in parts if part is not None) or None


def _translate(experiment: Experiment, native: NativeBuilder, part: str) -> str | None:
    """Return an alternative of a hint, None if it has no counterpart."""
    pieces: list[str] = []
    end, documented = 0, {key.name for key in keys()}
    for match in CHANGE.finditer(part):
        removed, key, _ = match.groups()
        if removed:
            origins = filter(native.values.is_set, native.origins_of(removed))
            changes = f"leave {' and '.join(origins)} out" if native.is_set_by_user(removed) else None
        elif documented_key(key) in documented:
            _, parsed = parse_override(match[0], {})
            changed = _with_value(experiment, key, parsed)
            changes = _direct_change(native, key, parsed)
            if changes is None and changed is not None:
                changes = _difference(experiment, changed, native, key)
            experiment = changed or experiment
        else:
            continue
        if not changes:
            return None
        pieces += [part[end : match.start()], changes]
        end = match.end()
    return "".join([*pieces, part[end:]])


def _with_value(experiment: Experiment, key: str, value: Any) -> Experiment | None:
    """Return the run with another value, None if that is not valid."""
    tree = experiment.model_dump()
    set_value(tree, key, value)
    try:
        return Experiment.model_validate(tree)
    except ValidationError:
        return None


def _direct_change(native: NativeBuilder, key: str, value: Any) -> str | None:
    """Return the assignment to the foreign key from which a native key takes its value, None if there is none."""
    specs = native.values.dialect.specs()
    for spec in specs.values():
        if spec.direct and key in spec.native and is_effective(spec, specs, native.values.__getitem__):
            foreign = to_foreign_value(spec, value)
            return f"{spec.key}={_text(foreign)}" if spec.value_type.accepts(foreign) else None
    return None


def _difference(before: Experiment, after: Experiment, native: NativeBuilder, key: str) -> str | None:
    """Return assignments to the foreign keys in which two runs differ, if possible only to those for a native key."""
    dialect = DIALECTS[native.values.dialect.name]
    try:
        old, new = exported_values(before, dialect), exported_values(after, dialect)
    except ConfigError:
        return None
    different = {name: value for name, value in new.items() if name not in old or old[name] != value}
    specs = native.values.dialect.specs()
    of_key = {name: value for name, value in different.items() if name in specs and key in specs[name].native}
    return " ".join(f"{name}={_text(value)}" for name, value in (of_key or different).items())


def _text(value: Any) -> str:
    is_plain = isinstance(value, str) and PLAIN.fullmatch(value)
    return value if is_plain else format_value(value)
