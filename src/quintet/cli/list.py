"""`quintet list`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quintet.registry import Entry

__all__ = ["run"]


def run() -> None:
    """Print every registry."""
    from quintet.algorithms.advantages import ADVANTAGES
    from quintet.algorithms.losses import LOSSES
    from quintet.envs import catalogue  # noqa: F401 - registers the worlds
    from quintet.envs.world import WORLDS
    from quintet.policies.tiny import PRESETS
    from quintet.rewards.verifiers.catalogue import VERIFIERS
    from quintet.rollout.engine import ENGINES
    from quintet.tracking.loggers import LOGGERS

    _show("worlds", WORLDS)
    print(f"  {'prompts':<28} questions from data files, answers that are judged")
    _show("advantages", ADVANTAGES)
    _show("losses", LOSSES)
    _show("rules that judge answers", VERIFIERS)
    _show("engines", ENGINES)
    _show("loggers", LOGGERS)
    print("presets")
    for name, shape in PRESETS.items():
        print(f"  {name:<28} {shape.layers} layers, hidden {shape.hidden}, context {shape.context}")


def _show(title: str, entries: Iterable[Entry[Any]]) -> None:
    print(title)
    for entry in entries:
        missing = f" (needs {', '.join(entry.missing())})" if entry.missing() else ""
        print(f"  {entry.name:<28} {entry.help}{missing}")
