"""`quintet list`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quintet.registry import Entry


def run() -> None:
    """Print the entries of all registries."""
    from quintet.config.model_locations.published_models import published_models
    from quintet.config.native.advantages import ADVANTAGES, NoAdvantageConfig
    from quintet.config.native.envs import ENVS
    from quintet.config.native.losses import LOSSES
    from quintet.envs.simulators.registry import SIMULATORS
    from quintet.policies.tiny_models import PRESETS
    from quintet.policies.vla.action_presets import ACTION_PRESETS
    from quintet.rewards.verifiers.registry import VERIFIERS
    from quintet.rollout.engines.engine import ENGINES
    from quintet.runtime.learners.learner_backends import LEARNER_BACKENDS
    from quintet.tools.registry import TOOLS
    from quintet.tracking.logger import LOGGERS

    _print_entries("environments", ENVS)
    print(f"  {'prompts':<28} prompts from data files with verifiable answers")
    _print_entries("simulators", SIMULATORS)
    _print_entries("advantage estimators", ADVANTAGES)
    print(f"  {'none':<28} no advantages (not supported yet: requires {NoAdvantageConfig.requires.capability})")
    _print_entries("policy losses", LOSSES)
    _print_entries("verifiers", VERIFIERS)
    _print_entries("tools", TOOLS)
    _print_entries("engines", ENGINES)
    _print_entries("learner backends", LEARNER_BACKENDS)
    _print_entries("loggers", LOGGERS)
    print("published models")
    for name, model in published_models().items():
        print(f"  {name:<28} {model.help}")
    print("model presets")
    for name, shape in PRESETS.items():
        print(f"  {name:<28} {shape.layers} layers, hidden {shape.hidden}, context {shape.context}")
    for name, preset in ACTION_PRESETS.items():
        print(f"  {name:<28} for robots, {preset.help}")


def _print_entries(title: str, entries: Iterable[Entry[Any]]) -> None:
    print(title)
    for entry in entries:
        missing = f" (needs {', '.join(entry.missing())})" if entry.missing() else ""
        print(f"  {entry.name:<28} {entry.help}{missing}")
