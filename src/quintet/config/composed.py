"""A validated experiment with the source of each value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quintet.config.native.experiment import Experiment


@dataclass(frozen=True, slots=True)
class ComposedConfig:
    """A validated experiment with the source of each value."""

    experiment: Experiment
    provenance: Mapping[str, str]
    """Source of each dotted key: `file.yaml:12`, `command line` or `default`."""
    remarks: tuple[str, ...] = ()
    """Messages about deprecated keys, keys without effect, and differences from the source framework."""
    translate_hint: Callable[[str], str | None] = str
    """Translates a hint from native keys to those of the framework whose format the user wrote."""
