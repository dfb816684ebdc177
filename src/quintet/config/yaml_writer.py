"""Configurations as YAML, each value with a comment that names its source."""

from collections.abc import Mapping
from typing import Any

import yaml

from quintet import __version__
from quintet.config.composed import ComposedConfig
from quintet.config.schema import NAMED, documented_key, keys
from quintet.config.yaml_reader import FLOAT


def dump_config(composed: ComposedConfig) -> str:
    """Return the full configuration as YAML, each value with its source as a comment.

    Unsupported keys at their defaults are left out.
    """
    title = f"# Resolved configuration of this run, of Quintet {__version__}."
    lines = [f"{title} `quintet train THIS_FILE` runs it again."]
    lines += [f"# Remark: {remark}" for remark in composed.remarks]
    unsupported = {key.name: key.default for key in keys() if key.requires and not key.is_section}
    tree = _without(composed.experiment.model_dump(mode="json"), unsupported, "")
    # a run uses one of the two
    del tree["env" if composed.experiment.envs else NAMED]
    lines += yaml_lines(tree, composed.provenance)
    return "\n".join(lines) + "\n"


def yaml_lines(tree: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> list[str]:
    """Return a tree as YAML lines, each value with its source as a comment if sources are given."""
    lines: list[str] = []
    _dump(tree, "", 0, sources, lines)
    return lines


def _without(tree: Mapping[str, Any], defaults: Mapping[str, object], prefix: str) -> dict[str, Any]:
    """Return the tree without the keys that have the given defaults."""
    remaining: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            if inner := _without(value, defaults, f"{key}."):
                remaining[name] = inner
        elif documented_key(key) not in defaults or defaults[documented_key(key)] != value:
            remaining[name] = value
    return remaining


def _dump(
    tree: Mapping[str, Any], prefix: str, depth: int, sources: Mapping[str, str] | None, lines: list[str]
) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            lines.append(f"{'  ' * depth}{key}:")
            _dump(value, f"{prefix}{key}.", depth + 1, sources, lines)
        else:
            comment = "" if sources is None else f"  # {sources.get(prefix + key, 'default')}"
            lines.append(f"{'  ' * depth}{key}: {_yaml(value)}{comment}")


def _yaml(value: object) -> str:
    """Format a value on one line; text that some YAML readers take for a number is quoted."""
    if isinstance(value, list | tuple):
        items = (_scalar(item, '"' if isinstance(item, str) else None) for item in value)
        return f"[{', '.join(items)}]"
    quoted = isinstance(value, str) and (not value.isprintable() or FLOAT.fullmatch(value))
    return _scalar(value, '"' if quoted else None)


def _scalar(value: object, style: str | None) -> str:
    text: str = yaml.safe_dump(value, default_style=style, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
