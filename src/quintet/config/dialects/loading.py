"""A foreign configuration, from its files to the one native `Experiment`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, cast

from pydantic import ValidationError

from quintet.config.compose import Composed, flatten
from quintet.config.dialects.checking import illegal_values, pending_defaults, pending_keys, unknown_keys
from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.reading import Written, read, reference_values
from quintet.config.faults import Fault, describe_faults, raise_faults, source_of
from quintet.config.native import Experiment
from quintet.config.plan import plan
from quintet.errors import ConfigError

__all__ = ["CONVERTED", "load_foreign"]

CONVERTED = frozenset({"ragen"})
"""Dialects whose runs can be converted; of the others all keys are known, and some pending for any run."""


class _Conversion(Protocol):
    """What a dialect's module gives."""

    disagreements: Callable[[Values], Iterator[Fault]]
    convert: Callable[[Values, Native], None]


def load_foreign(
    path: Path, overrides: Sequence[str], dialect: Dialect, *, unknown: Literal["refuse", "warn"] = "refuse"
) -> Composed:
    """Compose, check every key, convert, check natively and do the batch arithmetic. What was left out, and where
    the reference's own values wait, stands in the remarks.

    Raises:
        ConfigError: everything that is wrong or waits, in one message, in the dialect's own words.
        MachineError: a file is missing or can't be read.
    """
    written = read(path, overrides, reference_values(dialect))
    strangers = unknown_keys(written, dialect, frozenset())
    refused = strangers if unknown == "refuse" else []
    faults = [
        *(Fault(key.key, None, key.source, f"unknown key {key}") for key in refused),
        *illegal_values(written, dialect),
        *pending_keys(written, dialect),
    ]
    raise_faults(faults)
    if dialect.name not in CONVERTED:
        raise ConfigError(
            f"{path} is a configuration of {dialect.name}, which can be read but not run yet",
            source=str(path),
            hint="`quintet explain KEY` tells what each of its keys waits for",
        )
    waiting = tuple(pending_defaults(written, dialect))
    left_out = tuple(f"unknown key left out: {key}" for key in strangers)
    differing = tuple(f"nobody set it, and the reference's {told}" for told in waiting)
    return replace(_converted(written, dialect), remarks=(*left_out, *differing))


def _converted(written: Written, dialect: Dialect) -> Composed:
    conversion = cast("_Conversion", import_module(f"quintet.config.dialects.{dialect.name}"))
    values = Values(written)
    raise_faults(conversion.disagreements(values))
    native = Native(values)
    conversion.convert(values, native)
    sources = dict(native.provenance())
    try:
        experiment = Experiment.model_validate(native.tree)
    except ValidationError as error:
        raise_faults(describe_faults(error, native.tree, sources))
        raise
    provenance = {key: source_of(key, sources) for key in flatten(experiment.model_dump())}
    composed = Composed(experiment, provenance)
    plan(composed)
    return composed
