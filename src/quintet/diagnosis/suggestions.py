"""Remedies as changes of a run's configuration, in the format of the framework that it was written in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from quintet.config.checks.unread_keys import is_default, unread_reasons
from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.conversion import to_foreign_value
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.loader import convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dotted import flatten, set_value
from quintet.config.native.experiment import Experiment
from quintet.config.schema import format_value
from quintet.config.translate import translate
from quintet.config.yaml_reader import parse_override
from quintet.contained_files import read_contained
from quintet.errors import UserError
from quintet.tracking.remedies import Remedy, Value, changed_value, remedies

SOURCE = re.compile(r"(?:#|,) ([A-Za-z_][\w.]*): ")
"""Foreign key in a comment of a stored configuration."""


def suggest(names: Iterable[str], composed: ComposedConfig | None, count: int) -> tuple[str, ...]:
    """Return the first `count` remedies that apply to a configuration; None is any configuration."""
    texts = (_in_config(remedies()[name], composed) if composed else str(remedies()[name]) for name in names)
    return tuple(text for text in texts if text is not None)[:count]


def _in_config(remedy: Remedy, composed: ComposedConfig) -> str | None:
    """Return a remedy with the keys to set, None if it changes nothing or the configuration would be invalid."""
    if not remedy.changes:
        return remedy.text
    present = flatten(composed.experiment.model_dump())
    changed: dict[str, Value] = {}
    for key, change in remedy.changes.items():
        value = changed_value(change, present.get(key))
        if value != present.get(key):
            changed[key] = value
    if not changed or not _is_valid(composed.experiment, changed):
        return None
    hint = " ".join(f"{key}={format_value(value)}" for key, value in changed.items())
    now = ", ".join(format_value(present.get(key)) for key in changed)
    return f"{remedy.text}: {composed.hint_for_user(hint)} (now {now})"


def _is_valid(experiment: Experiment, changes: Mapping[str, Value]) -> bool:
    """Return whether a configuration is valid with changes, and every changed key has an effect."""
    tree = deepcopy(experiment.model_dump())
    for key, value in changes.items():
        set_value(tree, key, value)
    try:
        reason_of = unread_reasons(Experiment.model_validate(tree))
    except ValidationError:
        return False
    return not any(reason_of(key) and not is_default(key, value) for key, value in changes.items())


def read_config(path: Path) -> ComposedConfig | None:
    """Return the configuration that a run stored, in the format that it was written in; None if it cannot be read."""
    with suppress(UserError, OSError):
        text = read_contained(path.parent, path.name).decode(errors="replace")
        composed = load_experiment(str(path))
        for dialect in _dialects(text):
            with suppress(UserError):
                return _in_dialect(composed, dialect, text.splitlines())
        return composed
    return None


def _in_dialect(composed: ComposedConfig, dialect: Dialect, lines: Sequence[str]) -> ComposedConfig:
    """Return a configuration as one that was written for a framework: its hints name that framework's keys.

    `lines` are those of the stored configuration, whose comments name the keys that the values come from.

    Raises:
        ConfigError: the framework has no such runs.
    """
    tree = dict(translate(composed, dialect).tree)
    foreign = convert(config_from_tree(tree), dialect, to_plan=True).composed
    hint = partial(_translate, dict(_origins(composed, dialect, lines)), foreign.translate_hint)
    return replace(composed, translate_hint=hint)


def _origins(composed: ComposedConfig, dialect: Dialect, lines: Sequence[str]) -> Iterator[tuple[str, KeySpec]]:
    """Yield the native keys whose values are those of one foreign key, with that key."""
    for key, source in composed.provenance.items():
        number = source.rpartition(":")[2]
        origin = SOURCE.search(lines[int(number) - 1]) if number.isdigit() else None
        spec = dialect.specs().get(origin[1]) if origin else None
        if spec is not None and spec.direct and key in spec.native:
            yield key, spec


def _translate(origins: Mapping[str, KeySpec], otherwise: Callable[[str], str | None], hint: str) -> str | None:
    """Translate `KEY=VALUE …` by the keys that the values of a run come from, or else by the framework's rules."""
    changes = []
    for word in hint.split(" "):
        key, value = parse_override(word, {})
        spec = origins.get(key)
        foreign = None if spec is None else to_foreign_value(spec, value)
        if spec is None or not spec.value_type.accepts(foreign):
            return otherwise(hint)
        changes.append(f"{spec.key}={format_value(foreign)}")
    return " ".join(changes)


def _dialects(text: str) -> Iterator[Dialect]:
    """Yield the frameworks whose keys the comments of a stored configuration name, those with most of them first."""
    keys = Counter(SOURCE.findall(text))
    num_keys = {name: sum(key in dialect.specs() for key in keys) for name, dialect in DIALECTS.items()} if keys else {}
    yield from (DIALECTS[name] for name in sorted(num_keys, key=lambda name: -num_keys[name]) if num_keys[name])
