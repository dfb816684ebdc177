"""What a command was given: a YAML file, a run script or a list of overrides, and words of the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.config.dialects.dialect import DIALECTS, detect
from quintet.config.dialects.scripts.script import Scripted, read_words, spoken_of
from quintet.config.source import read_file
from quintet.errors import ConfigError, nearest

__all__ = ["NATIVE", "Opened", "check_dialect", "opened"]

NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Opened:
    """A configuration before it is composed."""

    path: Path | None
    words: tuple[str, ...]
    """Those of a script or list, then those of the command line."""
    places: tuple[str, ...]
    """Where each word of the script or list stands."""
    dialect: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script sets for the program that it runs."""


def opened(config: str | None, overrides: Sequence[str], dialect: str | None, *, quiet: bool = False) -> Opened:
    """Read what is given and recognise whose it is; that, and what is read otherwise than a shell would, is said
    on stderr unless `quiet`.

    Raises:
        ConfigError: an unknown dialect, or a script that can't be understood.
        MachineError: a file is missing or can't be read.
    """
    check_dialect(dialect)
    if config is None and dialect not in (None, NATIVE):
        raise ConfigError("which file?", key="--dialect", hint=f"quintet train CONFIG --dialect {dialect}")
    scripted = Scripted(None) if config is None else read_words(Path(config))
    for remark in () if quiet else scripted.remarks:
        print(f"warning: {remark}", file=sys.stderr)
    words = scripted.over(overrides)
    found = dialect or scripted.dialect or _recognised(scripted)
    if dialect is None and found != NATIVE and not quiet:
        print(f"{config}: a configuration of {found}", file=sys.stderr)
    return Opened(scripted.config, tuple(words), scripted.places, found, scripted.environment)


def _recognised(scripted: Scripted) -> str:
    tree: dict[str, Any] = spoken_of(scripted.words)
    if scripted.config is not None:
        tree |= read_file(scripted.config, {})
    return next(iter(detect(tree)), NATIVE)


def check_dialect(dialect: str | None) -> None:
    """Refuse a dialect that nobody speaks.

    Raises:
        ConfigError: there is no such; the message names the nearest.
    """
    legal = [NATIVE, *DIALECTS]
    if dialect is not None and dialect not in legal:
        close = nearest(dialect, legal)
        hint = (f"did you mean {close}? " if close else "") + f"there are {', '.join(legal)}"
        raise ConfigError(f"unknown dialect {dialect}", key="--dialect", value=dialect, hint=hint)
