"""Foreign configurations for tests, from trees written in the test itself."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.config import engines
from quintet.config.compose import flatten
from quintet.config.dialects import engine_choice
from quintet.config.dialects.composition.reading import composed, given_tree
from quintet.config.dialects.dialect import DIALECTS
from quintet.config.dialects.loading import Converted, convert
from quintet.config.translate import Translation, translate

__all__ = ["changed", "converted", "machine", "natively", "translated"]


def machine(monkeypatch: pytest.MonkeyPatch, *, gpus: int, packages: Collection[str] = ()) -> None:
    """Let a test's machine have so many GPUs, and of the packages of engines these."""

    def find(name: str) -> object | None:
        return name if name in packages else None

    for module in (engines, engine_choice):
        monkeypatch.setattr(module, "find_spec", find)
        monkeypatch.setattr(module, "accelerators", lambda: gpus)


def changed(plain: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of a tree with other values for some dotted keys."""
    tree: dict[str, Any] = yaml.safe_load(yaml.safe_dump(plain))
    for dotted, value in changes.items():
        *sections, last = dotted.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree


def converted(tmp_path: Path, dialect: str, tree: dict[str, Any], *overrides: str) -> Converted:
    """What a file with that tree asks for, whether this version can do it or not."""
    if not overrides:
        return convert(given_tree(tree, "given.yaml:1"), DIALECTS[dialect])
    path = tmp_path / "given.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return convert(composed(path, overrides), DIALECTS[dialect])


def natively(found: Converted, key: str) -> Any:
    """The value of a dotted native key."""
    return flatten(found.composed.experiment.model_dump())[key]


def translated(found: Converted, dialect: str) -> Translation:
    """The same run in another dialect."""
    return translate(found.composed, DIALECTS[dialect])
