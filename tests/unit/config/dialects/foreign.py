"""Foreign configurations for tests, from trees written in the test itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet import hardware
from quintet.config.dialects.composition.foreign_config import MergedConfig, compose_config, config_from_tree
from quintet.config.dialects.loader import ConversionResult, convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dotted import flatten
from quintet.config.translate import Translation, translate

__all__ = ["changed", "converted", "machine", "natively", "read_merged", "translated"]


def machine(monkeypatch: pytest.MonkeyPatch, *, gpus: int, packages: Collection[str] = ()) -> None:
    """Let a test's machine have so many GPUs, and of the packages of engines these."""

    monkeypatch.setattr(hardware, "is_installed", lambda name: name in packages)
    monkeypatch.setattr(hardware, "num_gpus", lambda: gpus)


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


def converted(tmp_path: Path, dialect: str, tree: dict[str, Any], *overrides: str) -> ConversionResult:
    """What a file with that tree asks for, whether this version can do it or not."""
    if not overrides:
        return convert(config_from_tree(tree, "given.yaml:1"), DIALECTS[dialect])
    path = tmp_path / "given.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return convert(compose_config(path, overrides), DIALECTS[dialect])


def read_merged(path: Path, overrides: Sequence[str] = (), reference: Mapping[str, Any] | None = None) -> MergedConfig:
    """A file and overrides, laid over a reference."""
    return compose_config(path, overrides).merge_onto(reference or {})


def natively(found: ConversionResult, key: str) -> Any:
    """The value of a dotted native key."""
    return flatten(found.composed.experiment.model_dump())[key]


def translated(found: ConversionResult, dialect: str) -> Translation:
    """The same run in another dialect."""
    return translate(found.composed, DIALECTS[dialect])
