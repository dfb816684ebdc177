"""The configuration that a command was given, whosever dialect it is in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from quintet.config import Composed, load_experiment
from quintet.config.dialects.dialect import DIALECTS, detect
from quintet.config.source import read_file
from quintet.errors import ConfigError, nearest

__all__ = ["NATIVE", "compose"]

NATIVE = "native"


def compose(config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str) -> Composed:
    """Load it, and say whose it is where that was recognised and not told.

    Raises:
        ConfigError: whatever is wrong in it, or an unknown dialect.
        MachineError: the file is missing or can't be read.
    """
    _check("--dialect", dialect or NATIVE, [NATIVE, *DIALECTS])
    _check("--unknown-keys", unknown_keys, ["refuse", "warn"])
    if config is None:
        if dialect not in (None, NATIVE):
            raise ConfigError("which file?", key="--dialect", hint=f"quintet train CONFIG --dialect {dialect}")
        return load_experiment(None, overrides)
    found = dialect or next(iter(detect(read_file(Path(config), {}))), NATIVE)
    if found == NATIVE:
        return load_experiment(config, overrides)
    from quintet.config.dialects.loading import load_foreign

    if dialect is None:
        print(f"{config}: a configuration of {found}", file=sys.stderr)
    unknown: Literal["refuse", "warn"] = "warn" if unknown_keys == "warn" else "refuse"
    composed = load_foreign(Path(config), overrides, DIALECTS[found], unknown=unknown)
    for remark in composed.remarks:
        print(f"warning: {remark}", file=sys.stderr)
    return composed


def _check(option: str, word: str, legal: list[str]) -> None:
    if word not in legal:
        close = nearest(word, legal)
        hint = (f"did you mean {close}? " if close else "") + f"there are {', '.join(legal)}"
        raise ConfigError(f"{option} {word}: there is no such", key=option, value=word, hint=hint)
