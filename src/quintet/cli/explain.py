"""`quintet explain KEY`."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticUndefined

from quintet.config.faults import legal_keys
from quintet.config.native import Experiment
from quintet.errors import ConfigError, nearest

__all__ = ["run"]


def run(key: str) -> None:
    """Print the meaning, type, default and bounds of a key.

    Raises:
        ConfigError: no such key; the message names the nearest.
    """
    found = [(name, info) for name, info in legal_keys(Experiment) if name == key]
    if not found:
        names = dict(legal_keys(Experiment))
        close = nearest(key, names) or next((name for name in names if name.endswith(f".{key}")), None)
        raise ConfigError(f"unknown key {key}", key=key, hint=f"did you mean {close}?" if close else None)
    for name, info in found:
        default: Any = info.default
        print(name)
        print(f"  {' '.join((info.description or 'no further meaning').split())}")
        bounds = ", ".join(str(bound) for bound in info.metadata)
        print(f"  type {_type(info.annotation)}{f' ({bounds})' if bounds else ''}")
        if default is not PydanticUndefined:
            print(f"  default {default if not hasattr(default, 'model_dump') else 'a section'}")


def _type(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
