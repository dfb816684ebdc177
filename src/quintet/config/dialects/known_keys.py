"""Keys that exist in a framework's releases and are missing in its reference."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from quintet.config.dialects.registry import DIALECTS


@cache
def known_keys(dialect: str) -> frozenset[str]:
    """Return the keys in `known/DIALECT.txt`, and those of the framework on which it is built.

    They are the dotted keys of the framework's own files; a section stands for all keys in it.
    """
    path = files("quintet.config.dialects") / "known" / f"{dialect}.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    base = DIALECTS[dialect].base
    return keys if base is None else (keys | known_keys(base.name)) - DIALECTS[dialect].specs().keys()
