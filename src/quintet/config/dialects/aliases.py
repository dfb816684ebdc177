"""Aliases: names of documented keys in older and newer releases of a framework."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from quintet.config.dialects.composition.foreign_config import ForeignConfig
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dotted import is_inside, sections_around
from quintet.errors import ConfigError


def resolve_aliases(config: ForeignConfig, specs: Mapping[str, KeySpec]) -> tuple[ForeignConfig, tuple[str, ...]]:
    """Replace aliases by the documented names of their keys; return a remark for each, too.

    Raises:
        ConfigError: a key is set under two of its names.
    """
    sources = dict(config.sources)
    remarks = []
    for spec in specs.values():
        for alias in spec.aliases:
            if alias not in config.sources or alias in specs:
                continue
            source = config.sources[alias]
            if spec.key in config.sources:
                message = f"{alias} ({source}) is another name of {spec.key} ({config.sources[spec.key]})"
                raise ConfigError(message, key=alias, source=source, hint=f"leave {alias} out")
            _move(config, alias, spec.key)
            for key in [key for key in sources if is_inside(key, alias)]:
                sources[spec.key + key.removeprefix(alias)] = sources.pop(key)
            for section in sections_around(spec.key):
                sources.setdefault(section, source)
            remarks.append(f"{alias} ({source}) is read as {spec.key}")
    _delete_empty_sections(config.sources, sources)
    return ForeignConfig(config.tree, sources), tuple(remarks)


def _delete_empty_sections(before: Mapping[str, str], after: dict[str, str]) -> None:
    """Delete sections that are empty because all of their keys had aliases."""
    above = {key.rpartition(".")[0] for key in before}
    while empty := [key for key in after if key in above and not any(other.startswith(f"{key}.") for other in after)]:
        for section in empty:
            del after[section]


def _move(config: ForeignConfig, old: str, new: str) -> None:
    """Move a value to its documented name, and let `${old}` in other values refer to it."""
    section, _, last = old.rpartition(".")
    parent = OmegaConf.select(config.tree, section) if section else config.tree
    node: Any = parent._get_node(last)
    OmegaConf.update(config.tree, new, node, force_add=True)
    parent[last] = f"${{{new}}}"
