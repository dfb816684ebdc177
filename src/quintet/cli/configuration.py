"""The configuration that a command was given, whosever dialect it is in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from quintet.config import Composed, load_experiment
from quintet.config.dialects.dialect import DIALECTS, Dialect, detect
from quintet.config.source import read_file
from quintet.config.waiting import refuse_waiting
from quintet.errors import ConfigError, nearest

__all__ = ["NATIVE", "compose"]

NATIVE = "native"


def compose(
    config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str, *, whole: bool = False
) -> Composed:
    """Load it, and say whose it is where that was recognised and not told. `whole` keeps what this version can't
    do, to be looked at; else such a configuration is refused.

    Raises:
        ConfigError: whatever is wrong in it, or an unknown dialect.
        MachineError: the file is missing or can't be read.
    """
    _check("--dialect", dialect or NATIVE, [NATIVE, *DIALECTS])
    _check("--unknown-keys", unknown_keys, ["refuse", "warn"])
    if config is None and dialect not in (None, NATIVE):
        raise ConfigError("which file?", key="--dialect", hint=f"quintet train CONFIG --dialect {dialect}")
    found = dialect or (next(iter(detect(read_file(Path(config), {}))), NATIVE) if config else NATIVE)
    if config is None or found == NATIVE:
        native = load_experiment(config, overrides)
        if not whole:
            refuse_waiting(native)
        return native
    if dialect is None:
        print(f"{config}: a configuration of {found}", file=sys.stderr)
    unknown: Literal["refuse", "warn"] = "warn" if unknown_keys == "warn" else "refuse"
    composed = _foreign(Path(config), overrides, DIALECTS[found], unknown, whole=whole)
    for remark in composed.remarks:
        print(f"warning: {remark}", file=sys.stderr)
    return composed


def _foreign(
    path: Path, overrides: list[str], dialect: Dialect, unknown: Literal["refuse", "warn"], *, whole: bool
) -> Composed:
    from quintet.config.dialects.loading import convert, load_foreign
    from quintet.config.dialects.reading import composed

    if whole:
        return convert(composed(path, overrides), dialect, unknown=unknown).composed
    return load_foreign(path, overrides, dialect, unknown=unknown)


def _check(option: str, word: str, legal: list[str]) -> None:
    if word not in legal:
        close = nearest(word, legal)
        hint = (f"did you mean {close}? " if close else "") + f"there are {', '.join(legal)}"
        raise ConfigError(f"{option} {word}: there is no such", key=option, value=word, hint=hint)
