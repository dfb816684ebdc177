"""A foreign configuration, composed by Hydra as in its own framework, with the source of every value.

Hydra applies defaults lists, packages, search paths and overrides; OmegaConf interpolates. The defaults are those of
the dialect's references.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quintet.config.dialects.composition.interpolation import (
    MAX_CHAIN,
    check_growth,
    first_line,
    hint_for,
    register_resolvers,
)
from quintet.config.dialects.composition.overrides import ParsedOverride, nested_keys, parse_overrides
from quintet.config.dialects.composition.plain_composition import HYDRA, Composed, compose_plainly
from quintet.config.dialects.release_tables import NO_EVIDENCE, ReleaseEvidence
from quintet.config.dotted import delete_value, get_value, has_key, sections_around, set_value
from quintet.config.problems import describe_setting
from quintet.config.yaml_reader import read_file
from quintet.errors import ConfigError

REFERENCE = "default"
MISSING = "???"
REFERENCE_TO_KEY = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")
"""Interpolation of another key: `${actor.model.path}`."""


class _NeedsOmegaConf(Exception):
    """A tree has interpolations, or merges of them, for which plain data do not suffice."""


@dataclass(frozen=True)
class MergedConfig:
    """A user's configuration merged onto the defaults of the dialect's references."""

    plain: Mapping[Any, Any]
    """Values before interpolation."""
    sources: Mapping[str, str]
    """Sources of the keys that the user set: `file.yaml:12` or `command line`."""
    _interpolated: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def tree(self) -> DictConfig:
        """The values as OmegaConf's nodes, which interpolate. They are slow to create."""
        return OmegaConf.create(dict(self.plain))

    def leaves(self) -> Iterator[str]:
        """Yield the dotted keys that the user set, without sections."""
        yield from _leaves(self.sources)

    def value(self, key: str) -> Any:
        """Return the interpolated value of a key as plain data; None if it has none.

        Raises:
            ConfigError: an interpolation refers to a missing key or environment variable, or to itself.
        """
        if key not in self._interpolated:
            self._interpolated[key] = self._interpolate(key)
        return deepcopy(self._interpolated[key])

    def _interpolate(self, key: str) -> Any:
        try:
            return self._resolve(self._node(key), MAX_CHAIN)
        except _NeedsOmegaConf:
            return self._interpolate_by_omegaconf(key)

    def _node(self, key: str) -> Any:
        node: Any = self.plain
        for part in key.split("."):
            if isinstance(node, str):
                raise _NeedsOmegaConf  # the section may be an interpolation
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def _resolve(self, node: Any, depth: int) -> Any:
        """Return a value with `${other.key}` resolved; other interpolations need OmegaConf."""
        if isinstance(node, Mapping):
            return {name: self._resolve(value, depth) for name, value in node.items()}
        if isinstance(node, list):
            return [self._resolve(value, depth) for value in node]
        if not isinstance(node, str) or ("${" not in node and node != MISSING):
            return node
        targets = {name: self._target(name, depth) for name in REFERENCE_TO_KEY.findall(node)}
        if REFERENCE_TO_KEY.fullmatch(node):
            return next(iter(targets.values()))
        text = REFERENCE_TO_KEY.sub("", node)
        if (
            "$" in text
            or "\\" in text
            or text == MISSING
            or not all(isinstance(value, str) for value in targets.values())
        ):
            raise _NeedsOmegaConf
        return REFERENCE_TO_KEY.sub(lambda match: str(targets[match[1]]), node)

    def _target(self, key: str, depth: int) -> Any:
        if depth == 0 or not has_key(self.plain, key):
            raise _NeedsOmegaConf  # which describes the problem
        return self._resolve(self._node(key), depth - 1)

    def _interpolate_by_omegaconf(self, key: str) -> Any:
        node: Any = self.tree
        try:
            for part in key.split("."):
                node = node[part] if isinstance(node, DictConfig) and part in node else None
            return OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig | ListConfig) else node
        except (OmegaConfBaseException, RecursionError, ArithmeticError, TypeError, ValueError) as error:
            source = self.sources.get(key, REFERENCE)
            problem = first_line(error)
            message = f"{key} ({source}) cannot be interpolated: {problem}"
            raise ConfigError(message, key=key, source=source, hint=hint_for(problem)) from None

    def raw(self, key: str) -> Any:
        """Return the value of a key before interpolation; None if it has none."""
        return get_value(self.plain, key)

    def interpolated(self, value: Any) -> Any:
        """Interpolate a text with `${…}`; return other values, and text that cannot be interpolated, unchanged."""
        if not (isinstance(value, str) and "${" in value):
            return value
        inner: Any = OmegaConf.create({"text": value})
        inner._set_parent(self.tree)
        try:
            return inner["text"]
        except OmegaConfBaseException:
            return value


def _leaves(sources: Mapping[str, str]) -> list[str]:
    above = {key.rpartition(".")[0] for key in sources}
    return sorted(key for key in sources if key not in above)


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """A user's configuration: files and overrides, without the defaults of a reference."""

    tree: DictConfig
    sources: Mapping[str, str]
    evidence: ReleaseEvidence = NO_EVIDENCE
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names that the user wrote, by the documented names by which they were replaced."""

    appended: frozenset[str] = frozenset()
    """Keys of overrides with `+`, by which Hydra adds keys that no file has."""
    trainer_files: tuple[Path, ...] = ()
    """Files that the trainer has in the checkout of the run."""
    misfits: tuple[str, ...] = ()
    """Overrides that Hydra refuses with the file that the trainer has in the checkout."""

    def leaves(self) -> list[str]:
        """Return the dotted keys that are set, without sections."""
        return _leaves(self.sources)

    def trainer_keys(self) -> dict[str, str]:
        """Return the keys of the trainer's own files, each with its source."""
        keys: dict[str, str] = {}
        for file in self.trainer_files:
            try:
                keys |= _compose(file, []).sources
            except ConfigError:  # its defaults list may name files that are not checked out
                read_file(file, keys)
        return keys

    def merge_onto(self, reference: Mapping[str, Any]) -> MergedConfig:
        """Merge the configuration onto the default values of a reference."""
        sources = dict(self.sources)
        plain = _merge(reference, _without_null_sections(self.plain(), reference, "", sources))
        check_growth(plain, sources)
        merged = MergedConfig(plain, sources)
        for key in list(merged.leaves()):
            if isinstance(value := merged.raw(key), str) and "${" in value:
                _note_section_keys(merged, key, sources)
        return merged

    def with_sections(self, sections: Mapping[str, Any], source: str) -> "ForeignConfig":
        """Return the configuration with further sections."""
        if not sections:
            return self
        added = config_from_tree(sections, source)
        return replace(
            self, tree=OmegaConf.create(self.plain() | dict(sections)), sources={**added.sources, **self.sources}
        )

    def with_values(self, values: Mapping[str, tuple[Any, str]]) -> "ForeignConfig":
        """Return the configuration with other values, by key; each has the source of the key from which it follows."""
        if not values:
            return self
        tree, sources = self.plain(), dict(self.sources)
        for key, (value, origin) in values.items():
            set_value(tree, key, value)
            for name in (key, *sections_around(key)):
                sources.setdefault(name, sources[origin])
        return replace(self, tree=OmegaConf.create(tree), sources=sources)

    def without_defaults(
        self, defaults: Mapping[str, Any], documented: Collection[str], decisive: Collection[str]
    ) -> "ForeignConfig":
        """Return the configuration of a checkout, in which keys with a default of the release do not count as set.

        Of them, those that are documented are left out; others keep their values, to which values may refer. `decisive`
        keys, whose default is not that of the release, count as set.
        """
        tree = self.plain()
        candidates = self.evidence.trainer_file_keys.difference(decisive)
        same = {key for key in candidates if key in defaults and defaults[key] == get_value(tree, key)}
        set_names = {name for key in self.leaves() if key not in same for name in (key, *sections_around(key))}
        for key in same & {*documented}:
            delete_value(tree, key)
        sources = {key: source for key, source in self.sources.items() if key in set_names}
        return replace(self, tree=OmegaConf.create(tree), sources=sources)

    def plain(self) -> dict[str, Any]:
        """Return its sections and values before interpolation."""
        return {str(key): value for key, value in _plain(self.tree).items()}


def _plain(tree: DictConfig) -> dict[Any, Any]:
    """Return a tree as plain data before interpolation; an empty one if it is null."""
    plain = OmegaConf.to_container(tree, resolve=False)
    return plain if isinstance(plain, dict) else {}


def _merge(reference: Mapping[Any, Any], changes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the reference with other values, as OmegaConf merges them, before interpolation."""
    try:
        return _merge_sections(reference, changes)
    except _NeedsOmegaConf:
        tree = OmegaConf.create(dict(reference))
        tree.merge_with(OmegaConf.create(dict(changes)))
        return _plain(tree)


def _merge_sections(reference: Mapping[Any, Any], changes: Mapping[Any, Any]) -> dict[Any, Any]:
    merged = dict(reference)
    for name, value in changes.items():
        if isinstance(value, Mapping):
            section = merged.get(name)
            if isinstance(section, str):
                raise _NeedsOmegaConf
            merged[name] = _merge_sections(section if isinstance(section, Mapping) else {}, value)
        elif value == MISSING:
            raise _NeedsOmegaConf
        else:
            merged[name] = value
    return merged


def _without_null_sections(
    tree: Mapping[str, Any], reference: Mapping[str, Any], prefix: str, sources: Mapping[str, str]
) -> dict[str, Any]:
    """Return the tree with empty sections in place of null, so that null does not remove a section of the reference.

    Raises:
        ConfigError: the tree has a list where the reference has a section.
    """
    result: dict[str, Any] = {}
    for name, value in tree.items():
        section, key = reference.get(name), f"{prefix}{name}"
        if isinstance(section, Mapping) and section:
            if isinstance(value, list):
                source = sources.get(key, "")
                message = f"{describe_setting(key, value, source)}: must be a section"
                raise ConfigError(message, key=key, value=value, source=source, hint="set the keys in it")
            value = {} if value is None else value
            value = _without_null_sections(value, section, f"{key}.", sources) if isinstance(value, Mapping) else value
        result[name] = value
    return result


def _note_section_keys(merged: MergedConfig, key: str, sources: dict[str, str]) -> None:
    """Note the keys of a section that is set to `${another}`."""
    try:
        value = merged.value(key)
    except ConfigError:
        return  # reported when the key is read
    for inner, _ in nested_keys(key, value):
        sources.setdefault(inner, sources[key])


def config_from_tree(tree: Mapping[str, Any], source: str = "translation") -> ForeignConfig:
    """Return a tree as a foreign configuration, with one source for all keys."""
    register_resolvers({})
    keys = (key for name, value in tree.items() for key, _ in nested_keys(name, value))
    return ForeignConfig(OmegaConf.create(dict(tree)), {key: source for key in keys if key != HYDRA})


def compose_config(
    path: Path | None,
    overrides: Sequence[str],
    override_sources: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    evidence: ReleaseEvidence = NO_EVIDENCE,
    is_frameworks_file: bool = False,
    trainer_files: Sequence[Path] = (),
) -> ForeignConfig:
    """Compose the file at `path`, the files in its defaults list, and overrides.

    `override_sources` are those of the first overrides; the others come from the command line. Variables in
    `environment` have precedence over those of this process in `${oc.env:…}`. `is_frameworks_file` tells whether the
    file is the framework's own, in a checkout. `trainer_files` are those that the trainer has in the checkout of the
    run; keys that only they have are those of a fork.

    Raises:
        ConfigError: a file is no YAML mapping; Hydra cannot compose it; an override cannot be parsed.
        MachineError: the file is missing or cannot be read.
    """
    register_resolvers(environment or {})
    if path is not None:
        read_file(path, {})
    parsed = parse_overrides(overrides, override_sources)
    composed = _compose(path, parsed)
    added = frozenset(override.key for override in parsed if re.match(r"\+(?!\+)", override.text))
    appended = frozenset(override.key for override in parsed if override.text.startswith("+"))
    config = ForeignConfig(
        composed.tree,
        composed.sources,
        replace(evidence, added=added),
        appended=appended,
        trainer_files=tuple(trainer_files),
    )
    if not is_frameworks_file:
        return config
    trainer_file_keys = frozenset(config.leaves()) - {
        name for each in parsed for name, _ in nested_keys(each.key, each.value)
    }
    evidence = replace(config.evidence, trainer_file_keys=trainer_file_keys)
    return replace(config, evidence=evidence, misfits=composed.misfits)


def _compose(path: Path | None, overrides: Sequence[ParsedOverride]) -> Composed:
    """Compose a file and overrides, by Hydra only if they need it."""
    if (plain := compose_plainly(path, overrides)) is not None:
        return plain
    from quintet.config.dialects.composition.hydra_composition import compose

    return compose(path, overrides)
