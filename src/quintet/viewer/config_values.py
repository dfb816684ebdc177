"""Values of a run's `config.yaml` by dotted key, with their sources."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from quintet.config.yaml_reader import compose_limited
from quintet.contained_files import read_contained
from quintet.errors import UserError

ABSENT = "–"
LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""Those that YAML counts."""


class ConfigValue(NamedTuple):
    """A value as YAML writes it, and where it comes from: `default`, `command line`, a file and line."""

    text: str
    source: str


def read_config_values(path: Path) -> dict[str, ConfigValue]:
    """Return the values of a run's configuration by dotted key; empty if there is no file, or if it is damaged."""
    try:
        text = read_contained(path.parent, path.name).decode()
        root = compose_limited(text, path.name)
    except (OSError, ValueError, UserError):
        return {}
    lines = LINE_BREAK.split(text)
    return dict(_values(root, "", lines)) if root is not None else {}


def _values(node: yaml.Node, key: str, lines: Sequence[str]) -> Iterator[tuple[str, ConfigValue]]:
    if isinstance(node, yaml.MappingNode) and node.value:
        for name, value in node.value:
            yield from _values(value, f"{key}.{name.value}" if key else str(name.value), lines)
        return
    text = node.value if isinstance(node, yaml.ScalarNode) else yaml.serialize(node, width=1000).strip()
    _, _, source = lines[node.start_mark.line].rpartition("  # ")
    yield key, ConfigValue(str(text), source)


def differences(configs: Sequence[Mapping[str, ConfigValue]]) -> dict[str, list[str]]:
    """Return the keys whose values differ between runs, each with the value of every run."""
    keys = dict.fromkeys(key for config in configs for key in config)
    texts = {key: [config[key].text if key in config else ABSENT for config in configs] for key in keys}
    return {key: values for key, values in texts.items() if len(set(values)) > 1}
