"""`quintet translate`: the same run in another framework's words."""

from __future__ import annotations

import sys
from pathlib import Path

from quintet.cli.configuration import ask
from quintet.cli.opening import NATIVE, check_dialect
from quintet.config import dump_config
from quintet.config.dialects.dialect import DIALECTS
from quintet.config.translate import translate
from quintet.errors import ConfigError, MachineError

__all__ = ["run"]


def run(
    config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str, *, to: str, output: str | None
) -> None:
    """Print it as YAML, or write it to a file that isn't there yet.

    Raises:
        ConfigError: something is wrong in the configuration, or the other dialect can't say such a run.
        MachineError: a file can't be read or written.
    """
    check_dialect(to)
    if output is not None and Path(output).exists():
        raise MachineError(f"{output} exists already", "give another name, or move it away")
    asked = ask(config, overrides, dialect, unknown_keys)
    for remark in asked.composed.remarks:
        print(f"warning: {remark}", file=sys.stderr)
    if to == asked.dialect and to != NATIVE:
        raise ConfigError(f"{config} is in the dialect of {to} already", key="--to", hint="name another one")
    text, lost = dump_config(asked.composed), 0
    if to != NATIVE:
        translation = translate(asked.composed, DIALECTS[to])
        text, lost = translation.text(), len(translation.lost)
    if lost:
        print(f"warning: {lost} keys have no counterpart in {to}; comments at the end name them", file=sys.stderr)
    _put(text, output)


def _put(text: str, output: str | None) -> None:
    if output is None:
        print(text, end="")
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"can't write {output}: {error.strerror}", "give a directory that is there") from None
