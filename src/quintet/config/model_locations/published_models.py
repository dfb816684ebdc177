"""Pretrained models that `quintet model get` downloads, from `published_models.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quintet.package_files import read_yaml


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A pretrained model in a package of PyPI."""

    help: str
    hub_name: str
    """Name of the original model on the hub, the base model of what is trained from it."""
    license: str
    package: str
    """Requirement of pip, with the exact version."""
    wheel: str
    bytes: int
    """Size of the wheel."""
    sha256: str
    """Of the wheel."""
    file: str
    """GGUF file in the wheel."""
    config: Mapping[str, Any]
    """Sizes of the model, as in its `config.json`."""


@lru_cache(maxsize=1)
def published_models() -> Mapping[str, PublishedModel]:
    """Return the models by name."""
    return {name: PublishedModel(**entry) for name, entry in read_yaml(__file__).items()}
