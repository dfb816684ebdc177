"""Files of VAGEN's evaluations of a model behind an API, `vagen.evaluate.run_eval` since 2026, and their keys."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from quintet.config.dialects.dialect import Dialect, key_files
from quintet.config.dialects.vagen.agent_dialect import list_references
from quintet.config.dialects.vagen.key_values import LISTS, is_evaluation
from quintet.config.dotted import flatten, get_value
from quintet.config.yaml_reader import read_file, read_text
from quintet.errors import ConfigError

KEYS, DEFAULTS_FILE = "vagen_evaluation", "eval_default"
MAX_FILES = 10
MARKS = ("default_max_turns", "live_summary", "backends")
"""Words of which a file of an evaluation has one."""


def read_evaluation(path: Path) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Return the tree of an evaluation's file over those of its defaults list, and the source of each key, with the
    entries of `envs` as sections; None for any other file.

    Raises:
        ConfigError: a file is no YAML, or it names no environments.
        MachineError: a file is missing or cannot be read.
    """
    if not any(mark in read_text(path) for mark in MARKS):
        return None
    sources: dict[str, str] = {}
    tree = read_file(path, sources)
    if not is_evaluation(tree):
        return None
    beneath = [path]
    for file in beneath:
        names = read_file(file, {}).get("defaults")
        names = [name for name in names or () if isinstance(name, str) and name != "_self_"]
        others = [
            file.parent / f"{name.removesuffix('.yaml')}.yaml" for name in names if PurePath(name).stem != DEFAULTS_FILE
        ]
        beneath += [other for other in others if other not in beneath][: MAX_FILES - len(beneath)]
    flat: dict[str, Any] = {}
    for file in reversed(beneath):
        flat |= flatten(read_file(file, sources))
    listed = flat.pop("envs", None)
    if not isinstance(listed, list) or not listed:
        message = f"{path} names no environments: it is no run"
        raise ConfigError(message, key="envs", hint="write envs: [{name: FrozenLake, n_envs: 64, tag_id: lake}]")
    flat.pop("defaults", None)
    _, section = LISTS
    for number, entry in enumerate(listed, 1):
        named = {f"{section}.env{number}.{name}": value for name, value in flatten(entry).items()}
        flat |= named
        sources |= dict.fromkeys(named, sources.get("envs", str(path)))
    return flat, sources


def narrow_to_evaluation(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """Return the dialect with the keys of an evaluation."""
    turns = get_value(tree, "experiment.default_max_turns", 5)
    references, shared = list_references(tree, {"max_turns": turns})
    return replace(dialect, references=(*references, *key_files("vagen", [KEYS])), base=None, shared_sections=shared)


def is_evaluation_run(dialect: Dialect) -> bool:
    """Whether a narrowed dialect is that of an evaluation."""
    return any(reference.name == KEYS for reference in dialect.references)
