"""From a YAML file and `key=value` overrides to one `Experiment`, each value with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from quintet.config.faults import describe_faults
from quintet.config.native import Experiment
from quintet.errors import ConfigError, MachineError, nearest

__all__ = ["Composed", "dump_config", "load_experiment"]

FLOAT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
"""Numbers such as 1e-4, which YAML 1.1 takes for text."""


@dataclass(frozen=True, slots=True)
class Composed:
    """An experiment and, for each dotted key, where its value came from: `file.yaml:12`,
    `command line` or `default`."""

    experiment: Experiment
    provenance: Mapping[str, str]


def load_experiment(path: str | None, overrides: Sequence[str] = ()) -> Composed:
    """Compose, check, and do the batch arithmetic.

    Raises:
        ConfigError: an unknown key, an illegal value, keys that contradict each other; every fault
            of the first kinds in one message.
        MachineError: the file is missing or can't be read.
    """
    from quintet.config.plan import plan

    sources: dict[str, str] = {}
    tree = _read_file(Path(path), sources) if path is not None else {}
    for override in overrides:
        _apply(tree, override, sources)
    _name_choices(tree)
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        raise describe_faults(error, Experiment, tree, sources) from None
    composed = Composed(experiment, {key: _source(key, sources) for key in flatten(experiment.model_dump())})
    plan(composed)
    return composed


CHOICES = (("world",), ("algorithm", "advantage"))
"""Sections of which there are several kinds, told apart by their `name`."""


def _name_choices(tree: dict[str, Any]) -> None:
    """Where a section gives options but no `name`, the default kind is meant."""
    for parents in CHOICES:
        place: Any = tree
        default: Any = Experiment()
        for parent in parents:
            place = place.get(parent) if isinstance(place, dict) else None
            default = getattr(default, parent)
        if isinstance(place, dict):
            place.setdefault("name", default.name)


def dump_config(composed: Composed) -> str:
    """The whole configuration as YAML, each value with a comment that says where it came from."""
    lines = ["# Resolved configuration of this run. `quintet train THIS_FILE` runs it again."]
    _dump(composed.experiment.model_dump(mode="json"), "", 0, composed.provenance, lines)
    return "\n".join(lines) + "\n"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _dump(tree: Mapping[str, Any], prefix: str, depth: int, sources: Mapping[str, str], lines: list[str]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict):
            lines.append(f"{'  ' * depth}{key}:")
            _dump(value, f"{prefix}{key}.", depth + 1, sources, lines)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("\n").removesuffix("\n...")
            lines.append(f"{'  ' * depth}{key}: {text}  # {sources.get(prefix + key, 'default')}")


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Where a value came from; a value inside a list or a null section came with it."""
    while key not in sources and "." in key:
        key = key.rpartition(".")[0]
    return sources.get(key, "default")


def _read_file(path: Path, sources: dict[str, str]) -> dict[str, Any]:
    text = _read_text(path)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where} is not YAML: {problem}", source=where, hint="mend the line") from None
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} holds no keys", source=str(path), hint="write `key: value` lines")
    return _mapping(node, "", path, sources)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MachineError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except IsADirectoryError:
        raise MachineError(f"{path} is a directory", "give the YAML file in it") from None
    except FileNotFoundError:
        names = [other.name for other in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        close = nearest(path.name, names)
        raise MachineError(
            f"no such file: {path}", f"did you mean {path.parent / close}?" if close else "check the path"
        ) from None
    except OSError as error:
        raise MachineError(f"can't read {path}: {error.strerror}") from None


def _mapping(node: yaml.MappingNode, prefix: str, path: Path, sources: dict[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, where = str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        dotted = f"{prefix}{key}"
        if key in tree:
            raise ConfigError(
                f"{dotted} is given twice, at {sources[dotted]} and {where}", key=dotted, source=where, hint="keep one"
            )
        sources[dotted] = where
        if isinstance(value_node, yaml.MappingNode):
            tree[key] = _mapping(value_node, f"{dotted}.", path, sources)
        else:
            tree[key] = _construct(value_node)
    return tree


def _construct(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _construct(value) for key, value in node.value}
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    if plain and node.tag == "tag:yaml.org,2002:str" and FLOAT.fullmatch(node.value):
        return float(node.value)
    return yaml.SafeLoader("").construct_object(node, deep=True)


def _apply(tree: dict[str, Any], override: str, sources: dict[str, str]) -> None:
    """Set one `a.b.c=value` in the tree."""
    dotted, sign, text = override.partition("=")
    if not sign or not re.fullmatch(r"\w+(\.\w+)*", dotted):
        raise ConfigError(
            f"{override!r} is not an override", value=override, source="command line", hint="write key=value"
        )
    *parents, last = dotted.split(".")
    place = tree
    for parent in parents:
        if not isinstance(place.get(parent), dict):
            place[parent] = {}
        place = place[parent]
    value = _value(dotted, text)
    if last == "name" and parents and place.get("name") not in (None, value):
        _choose_anew(place, ".".join(parents), sources)
    place[last] = value
    sources[dotted] = "command line"


def _choose_anew(place: dict[str, Any], dotted: str, sources: dict[str, str]) -> None:
    """Another world or algorithm takes none of the options of the one that the file chose."""
    place.clear()
    for key in [key for key in sources if key.startswith(f"{dotted}.")]:
        del sources[key]


def _value(dotted: str, text: str) -> Any:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        raise ConfigError(
            f"{dotted}={text}: the value can't be read",
            key=dotted,
            value=text,
            source="command line",
            hint="quote it as YAML would want it",
        ) from None
    return None if node is None else _construct(node)
