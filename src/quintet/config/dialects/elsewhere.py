"""Keys that a framework's releases know and its reference here doesn't."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

__all__ = ["known_elsewhere"]


@cache
def known_elsewhere(dialect: str) -> frozenset[str]:
    """Dotted keys of the framework's own files, one a line in `known/DIALECT.txt`."""
    data = files("quintet.config.dialects") / "known" / f"{dialect}.txt"
    if not data.is_file():
        return frozenset()
    lines = data.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))
