"""Keys that a framework's releases know and its reference here doesn't."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from quintet.config.dialects.dialect import DIALECTS

__all__ = ["known_elsewhere"]


@cache
def known_elsewhere(dialect: str) -> frozenset[str]:
    """Dotted keys of the framework's own files, one a line in `known/DIALECT.txt`, and of the one that it is built
    on. A section there stands for all that lies in it."""
    data = files("quintet.config.dialects") / "known" / f"{dialect}.txt"
    lines = data.read_text(encoding="utf-8").splitlines()
    own = frozenset(line for line in lines if line and not line.startswith("#"))
    over = DIALECTS[dialect].over
    return own if over is None else (own | known_elsewhere(over)) - DIALECTS[dialect].rows().keys()
