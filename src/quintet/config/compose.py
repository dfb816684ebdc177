"""From a YAML file and `key=value` overrides to one `Experiment`, each value with its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from quintet.config.faults import describe_faults, raise_faults, source_of
from quintet.config.idle import idle_keys
from quintet.config.keys import NAMED, chosen, documented, keys
from quintet.config.native import Experiment
from quintet.config.plan import plan
from quintet.config.source import COMMAND_LINE, FLOAT, parse_override, read_file

__all__ = ["Composed", "dump_config", "flatten", "load_experiment", "yaml_lines"]


@dataclass(frozen=True, slots=True)
class Composed:
    """An experiment and, for each dotted key, where its value came from: `file.yaml:12`,
    `command line` or `default`."""

    experiment: Experiment
    provenance: Mapping[str, str]
    remarks: tuple[str, ...] = ()
    """What the run does otherwise than its configuration would elsewhere, and what has no effect, each as it is told to
    people."""


def load_experiment(path: str | None, overrides: Sequence[str] = (), places: Sequence[str] = ()) -> Composed:
    """Compose, check, and do the batch arithmetic. `places` says where each override was written; those beyond it
    come from the command line.

    Raises:
        ConfigError: unknown keys and illegal values, all in one message; else keys that contradict
            each other, all in one message.
        MachineError: the file is missing or can't be read.
    """
    sources: dict[str, str] = {}
    tree = read_file(Path(path), sources) if path is not None else {}
    for override, place in _choices_first(overrides, places):
        _set(tree, *parse_override(override, sources, place), sources)
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        raise_faults(describe_faults(error, tree, sources))
        raise
    values = flatten(experiment.model_dump())
    provenance = {key: source_of(key, sources) for key in values}
    composed = Composed(experiment, provenance, tuple(idle_keys(values, provenance)))
    plan(composed)
    return composed


def dump_config(composed: Composed) -> str:
    """The whole configuration as YAML, each value with a comment that says where it came from. What this version
    can't do and nobody asked for is left out."""
    lines = ["# Resolved configuration of this run. `quintet train THIS_FILE` runs it again."]
    lines += [f"# Remark: {remark}" for remark in composed.remarks]
    unasked = {key.name: key.default for key in keys() if key.waits and not key.is_section}
    tree = _without(composed.experiment.model_dump(mode="json"), unasked, "")
    # one of the two is played
    del tree["world" if composed.experiment.worlds else NAMED]
    lines += yaml_lines(tree, composed.provenance)
    return "\n".join(lines) + "\n"


def yaml_lines(tree: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> list[str]:
    """A tree as YAML lines, each value with its source as a comment where sources are given."""
    lines: list[str] = []
    _dump(tree, "", 0, sources, lines)
    return lines


def _without(tree: Mapping[str, Any], unasked: Mapping[str, object], prefix: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            if inner := _without(value, unasked, f"{key}."):
                kept[name] = inner
        elif documented(key) not in unasked or unasked[documented(key)] != value:
            kept[name] = value
    return kept


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _dump(
    tree: Mapping[str, Any], prefix: str, depth: int, sources: Mapping[str, str] | None, lines: list[str]
) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            lines.append(f"{'  ' * depth}{key}:")
            _dump(value, f"{prefix}{key}.", depth + 1, sources, lines)
        else:
            place = "" if sources is None else f"  # {sources.get(prefix + key, 'default')}"
            lines.append(f"{'  ' * depth}{key}: {_yaml(value)}{place}")


def _yaml(value: object) -> str:
    """On one line, and the same value for every reader: text that some take for a number is quoted."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml_in_list, value))}]"
    quoted = isinstance(value, str) and (not value.isprintable() or FLOAT.fullmatch(value))
    return _scalar(value, '"' if quoted else None)


def _yaml_in_list(value: object) -> str:
    return _scalar(value, '"' if isinstance(value, str) else None)


def _scalar(value: object, style: str | None) -> str:
    text: str = yaml.safe_dump(value, default_style=style, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _choice_names() -> list[str]:
    return [f"{key.name}.name" for key in keys() if key.is_choice]


def _choices_first(overrides: Sequence[str], places: Sequence[str]) -> list[tuple[str, str]]:
    """`world.boxes=2 world.name=sokoban` means the same in any order. Each with its place."""
    names = _choice_names()
    pairs = zip_longest(overrides, places, fillvalue=COMMAND_LINE)
    return sorted(pairs, key=lambda pair: documented(pair[0].partition("=")[0]) not in names)


def _set(tree: dict[str, Any], dotted: str, value: object, sources: dict[str, str]) -> None:
    *parents, last = dotted.split(".")
    if documented(dotted) in _choice_names() and chosen(tree, ".".join(parents)) != value:
        _forget_options(tree, ".".join(parents), sources)
    place = tree
    for parent in parents:
        if not isinstance(place.get(parent), dict):
            place[parent] = {}
        place = place[parent]
    place[last] = value


def _forget_options(tree: dict[str, Any], choice: str, sources: dict[str, str]) -> None:
    """Another world or algorithm takes none of the options of the one that the file chose."""
    place: Any = tree
    for parent in choice.split("."):
        place = place.get(parent) if isinstance(place, dict) else None
    if isinstance(place, dict):
        place.clear()
    for key in [key for key in sources if key.startswith(f"{choice}.") and sources[key] != COMMAND_LINE]:
        del sources[key]
