"""Composition of what needs no Hydra, which takes 0.1 s to load: one file, and overrides of keys."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quintet.config.dialects.composition.interpolation import check_grammar
from quintet.config.dialects.composition.overrides import ParsedOverride
from quintet.config.yaml_reader import COMMAND_LINE, read_file, read_text
from quintet.errors import ConfigError

HYDRA = "hydra"
"""Section that configures Hydra itself; it is read before composition."""
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration."""

    tree: DictConfig
    sources: dict[str, str]
    """Source of each key."""
    misfits: tuple[str, ...] = ()
    """Overrides that Hydra refuses, with their sources: those of keys that no file has, and those that add one with `+`
    that a file has."""


def compose_plainly(path: Path | None, overrides: Sequence[ParsedOverride]) -> Composed | None:
    """Compose a file and overrides as Hydra does; None if Hydra is needed.

    Raises:
        ConfigError: an override sets an item of a list.
    """
    if not all(override.sets_key and not _is_group(path, override.key) for override in overrides):
        return None
    composed = Composed(OmegaConf.create(), {}) if path is None else read_single_file(path)
    misfits = None if composed is None else set_keys(composed.tree, overrides)
    if composed is None or misfits is None:
        return None
    refuse_list_items(composed.tree, overrides)
    for override in overrides:
        override.note(composed.sources)
    delete_missing(composed.tree, composed.sources)
    return replace(composed, misfits=misfits)


def _is_group(path: Path | None, key: str) -> bool:
    """Whether a key of an override is a directory beside the file, from which it chooses a file."""
    return path is not None and "." not in key and (path.parent / key).is_dir()


def set_keys(config: DictConfig, overrides: Sequence[ParsedOverride]) -> tuple[str, ...] | None:
    """Set the keys of overrides; return those that Hydra refuses without `++`, or None at one that cannot be set, which
    Hydra describes."""
    misfits: list[str] = []
    try:
        for override in overrides:
            if _is_misfit(config, override):
                misfits.append(f"{override.name} ({override.source})")
            OmegaConf.update(config, override.key, override.value, merge=True, force_add=True)
    except (OmegaConfBaseException, RecursionError, ValueError, TypeError, LookupError, AssertionError):
        return None
    return tuple(misfits)


def _is_misfit(config: DictConfig, override: ParsedOverride) -> bool:
    """Whether an override of a script sets a key that is not there, or adds one that has a value."""
    if override.source == COMMAND_LINE or re.search(r"\.ya?ml:", override.source):
        return False
    section: Any = config
    *sections, last = override.key.split(".")
    for part in sections:
        if not isinstance(section, DictConfig):
            return False  # an interpolation, or a list
        section = section._get_node(part)
    node = section._get_node(last) if isinstance(section, DictConfig) else None
    if not override.text.startswith("+"):
        return node is None and (section is None or isinstance(section, DictConfig))
    is_added = not override.text.startswith("++") and not isinstance(override.value, Mapping | list)
    return is_added and node is not None and not (node._is_none() or node._is_missing())


def read_single_file(path: Path) -> Composed | None:
    """Return the tree of a file, and the source of each key; None if Hydra is needed.

    That is for a defaults list, a `hydra` section, a package header, or an error, which Hydra's error handling shows.
    """
    sources: dict[str, str] = {}
    try:
        tree = read_file(path, sources)
        check_nesting(tree, "", sources)
        check_grammar(tree, sources)
    except ConfigError:
        return None
    if {"defaults", HYDRA} & tree.keys() or "@package" in read_text(path)[:512]:
        return None
    return Composed(OmegaConf.create(tree), sources)


def refuse_list_items(config: DictConfig, overrides: Sequence[ParsedOverride]) -> None:
    """Refuse overrides of list items such as `list.0=…`: a list has one source."""
    for override in overrides:
        node: Any = config
        for part in override.key.split(".")[:-1]:
            is_section = hasattr(node, "_get_node") and not isinstance(node, ListConfig)
            node = node._get_node(part) if is_section else None
            if isinstance(node, ListConfig):
                section = override.key.rpartition(".")[0]
                message = f"{override.text} ({override.source}): {section} is a list"
                hint = f"set the entire list: {section}=[…]"
                raise ConfigError(message, key=override.key, source=override.source, hint=hint)


def delete_missing(config: DictConfig, sources: dict[str, str]) -> None:
    """Delete keys with the value `???`, which only say that something else has to set them."""
    for key in (key for key in [*sources] if key.split(".")[0] != HYDRA):
        section, last = section_node(config, key), key.rpartition(".")[2]
        if section is not None and OmegaConf.is_missing(section, last):
            del section[last], sources[key]


def section_node(tree: DictConfig, key: str) -> Any:
    """Return the section of a key; None if there is none, as for names with dots."""
    section: Any = tree
    for part in key.split(".")[:-1]:
        section = section._get_node(part) if isinstance(section, DictConfig) else None
    return section if isinstance(section, DictConfig) else None


def check_nesting(tree: Mapping[str, Any], prefix: str, sources: Mapping[str, str]) -> None:
    """Refuse `data.train_batch_size: 8` in a file: it would be one key with a dot in its name.

    Raises:
        ConfigError: there is such a key.
    """
    for key, value in tree.items():
        if DOTTED.fullmatch(key):
            source = sources.get(f"{prefix}{key}", "")
            *sections, last = key.split(".")
            message = f"{prefix}{key} ({source}): a file has its keys in sections, not with dots"
            hint = f"write {last} in the section {' › '.join([*filter(None, prefix.split('.')), *sections])}"
            raise ConfigError(message, key=f"{prefix}{key}", value=value, source=source, hint=hint)
        if isinstance(value, Mapping):
            check_nesting(value, f"{prefix}{key}.", sources)
