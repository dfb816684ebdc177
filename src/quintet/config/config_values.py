"""Values of a composed configuration by dotted native key, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.problems import ConfigProblem, source_of
from quintet.config.schema import format_value


def config_value(experiment: Experiment, key: str) -> Any:
    """Return the value of a key, None if a section on the way is null."""
    node: Any = experiment
    for part in key.split("."):
        if node is not None:
            node = node[part] if isinstance(node, Mapping) else getattr(node, part)
    return node


def value_source(composed: ComposedConfig, key: str) -> str:
    """Return the source of a value; for a foreign configuration, the foreign key it was converted from."""
    return source_of(key, composed.provenance)


def describe_value(composed: ComposedConfig, key: str) -> str:
    """Return `key = value (source)` for a message."""
    return f"{key} = {format_value(config_value(composed.experiment, key))} ({value_source(composed, key)})"


def problem_with(composed: ComposedConfig, key: str, problem: str, hint: str | None = None) -> ConfigProblem:
    """Return a problem whose message names key, value and source.

    The hint has native keys. Alternatives in it are separated by ", or ", and each sets keys by `KEY=VALUE`.
    """
    message = f"{describe_value(composed, key)}: {problem}"
    value, source = config_value(composed.experiment, key), value_source(composed, key)
    return ConfigProblem(key, value, source, message, hint and composed.translate_hint(hint))


def with_value(experiment: Experiment, key: str, value: object) -> Experiment:
    """Return a copy of the experiment with another value for one key, without validation."""
    changed: Experiment = _replace(experiment, key.split("."), value)
    return changed


def _replace(section: Any, parts: list[str], value: object) -> Any:
    name, *rest = parts
    return section.model_copy(update={name: _replace(getattr(section, name), rest, value) if rest else value})
