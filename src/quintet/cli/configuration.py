"""The configuration that a command was given, whosever dialect it is in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quintet.cli.opening import NATIVE, Opened, opened
from quintet.config import Composed, load_experiment
from quintet.config.dialects.dialect import DIALECTS
from quintet.config.faults import Fault
from quintet.config.spread import as_asked
from quintet.config.waiting import on_these_ranks, refuse_waiting, waiting_faults
from quintet.errors import ConfigError, nearest

__all__ = ["ALONE", "NATIVE", "Asked", "ask", "compose"]

if TYPE_CHECKING:
    from quintet.config.dialects.composition.reading import Given

LONE: Mapping[str, object] = {"backend": "fsdp2", "parallel": {}, "sharding": {}, "megatron": None, "memory": {}}
ALONE: Mapping[str, object] = {
    "placement": {},
    **{f"{name}.{key}": value for name in ("actor", "critic", "reference") for key, value in LONE.items()},
}
"""Keys over those of a run whose policy one process only plays with: who learnt it, and on how many devices, asks for
nothing there."""


@dataclass(frozen=True, slots=True)
class Asked:
    """All that a configuration asks for, whether this version can do it or not."""

    composed: Composed
    dialect: str
    waits: tuple[Fault, ...]
    """What somebody asked for and this version can't do."""
    remarks: tuple[str, ...] = ()
    """What nobody asked for and this version can't do, as it is told to people."""


def compose(
    config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str, *, whole: bool = False
) -> Composed:
    """Load it, and say whose it is where that was recognised and not told. `whole` keeps what this version can't
    do, to be looked at; else such a configuration is refused.

    Raises:
        ConfigError: whatever is wrong in it, or an unknown dialect.
        MachineError: the file is missing or can't be read.
    """
    unknown, given = _unknown(unknown_keys), opened(config, overrides, dialect)
    if whole or given.dialect == NATIVE:
        composed = _asked(given, unknown).composed
        if not whole:
            composed = on_these_ranks(composed)
            refuse_waiting(composed)
    else:
        from quintet.config.dialects.loading import load_given

        composed = load_given(_composed(given), DIALECTS[given.dialect], unknown=unknown)
    for remark in composed.remarks:
        print(f"warning: {remark}", file=sys.stderr)
    return composed


def ask(config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str) -> Asked:
    """Load all of it, with what this version can't do. Says whose it is where that wasn't told.

    Raises:
        ConfigError: whatever is wrong in it, or an unknown dialect.
        MachineError: the file is missing or can't be read.
    """
    return _asked(opened(config, overrides, dialect), _unknown(unknown_keys))


def _asked(given: Opened, unknown: Literal["refuse", "warn"]) -> Asked:
    if given.dialect == NATIVE:
        path = None if given.path is None else str(given.path)
        native = load_experiment(path, given.words, given.places)
        return Asked(native, NATIVE, tuple(waiting_faults(native, as_asked(native.experiment))))
    from quintet.config.dialects.loading import convert, what_waits

    foreign = convert(_composed(given), DIALECTS[given.dialect], unknown=unknown, to_plan=True)
    return Asked(foreign.composed, given.dialect, what_waits(foreign), foreign.remarks)


def _composed(given: Opened) -> Given:
    from quintet.config.dialects.composition.reading import composed

    return composed(given.path, given.words, given.places, given.environment)


def _unknown(word: str) -> Literal["refuse", "warn"]:
    _check("--unknown-keys", word, ["refuse", "warn"])
    return "warn" if word == "warn" else "refuse"


def _check(option: str, word: str, legal: list[str]) -> None:
    if word not in legal:
        close = nearest(word, legal)
        hint = (f"did you mean {close}? " if close else "") + f"there are {', '.join(legal)}"
        raise ConfigError(f"{option} {word}: there is no such", key=option, value=word, hint=hint)
