"""A foreign configuration, composed by Hydra as in its own framework, with the source of every value.

Hydra applies defaults lists, packages, search paths and overrides; OmegaConf interpolates. The defaults are those of
the dialect's references.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.composition.hydra_composition import compose
from quintet.config.dialects.composition.interpolation_limits import check_growth
from quintet.config.dialects.composition.overrides import ParsedOverride, nested_keys, parse_overrides
from quintet.config.dialects.composition.resolvers import first_line, hint_for, register_resolvers
from quintet.config.dialects.dialect import Dialect
from quintet.config.schema import format_value
from quintet.config.yaml_reader import read_file
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from omegaconf import DictConfig

REFERENCE = "default"
HYDRA = "hydra"
"""Section that configures Hydra itself; it is read before composition."""
SEARCH_PATH = "hydra.searchpath"
RUN_KEYS = ("hydra.run.dir", "hydra.output_subdir")
"""Keys of the `hydra` section that also configure the run."""


@dataclass(frozen=True, slots=True)
class MergedConfig:
    """A user's configuration merged onto the defaults of the dialect's references."""

    tree: DictConfig
    """Values before interpolation."""
    sources: Mapping[str, str]
    """Sources of the keys that the user set: `file.yaml:12` or `command line`."""
    _interpolated: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def leaves(self) -> Iterator[str]:
        """Yield the dotted keys that the user set, without sections."""
        above = {key.rpartition(".")[0] for key in self.sources}
        yield from sorted(key for key in self.sources if key not in above)

    def value(self, dotted: str) -> Any:
        """Return the interpolated value of a key as plain data; None if it has none.

        Raises:
            ConfigError: an interpolation refers to a missing key or environment variable, or to itself.
        """
        if dotted not in self._interpolated:
            self._interpolated[dotted] = self._interpolate(dotted)
        return deepcopy(self._interpolated[dotted])

    def _interpolate(self, dotted: str) -> Any:
        from omegaconf import DictConfig, ListConfig, OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        place: Any = self.tree
        try:
            for part in dotted.split("."):
                place = place[part] if isinstance(place, DictConfig) and part in place else None
            if isinstance(place, DictConfig | ListConfig):
                return OmegaConf.to_container(place, resolve=True)
        except (OmegaConfBaseException, RecursionError, ArithmeticError, TypeError, ValueError) as error:
            source = self.sources.get(dotted, REFERENCE)
            problem = first_line(error)
            message = f"{dotted} ({source}) cannot be interpolated: {problem}"
            raise ConfigError(message, key=dotted, source=source, hint=hint_for(problem)) from None
        return place

    def raw(self, dotted: str) -> Any:
        """Return the value of a key before interpolation; None if it has none."""
        from omegaconf import DictConfig, OmegaConf

        plain: Any = OmegaConf.to_container(self.tree, resolve=False) if isinstance(self.tree, DictConfig) else None
        for part in dotted.split("."):
            plain = plain.get(part) if isinstance(plain, Mapping) else None
        return plain

    def interpolated(self, value: Any) -> Any:
        """Interpolate a text with `${…}`; return other values, and text that cannot be interpolated, unchanged."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if not (isinstance(value, str) and "${" in value):
            return value
        inner: Any = OmegaConf.create({"text": value})
        inner._set_parent(self.tree)
        try:
            return inner["text"]
        except OmegaConfBaseException:
            return value


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """A user's configuration: files and overrides, without the defaults of a reference."""

    tree: DictConfig
    sources: Mapping[str, str]

    def merge_onto(self, reference: Mapping[str, Any]) -> MergedConfig:
        """Merge the configuration onto the default values of a reference."""
        from omegaconf import OmegaConf

        tree, sources = OmegaConf.create(dict(reference)), dict(self.sources)
        tree.merge_with(OmegaConf.create(_without_null_sections(self.plain(), reference, "", sources)))
        check_growth(OmegaConf.to_container(tree, resolve=False), sources)
        written = MergedConfig(tree, sources)
        for key in list(written.leaves()):
            section = _section_node(tree, key)
            if section is not None and OmegaConf.is_interpolation(section, key.rpartition(".")[2]):
                _note_section_keys(written, key, sources)
        return written

    def plain(self) -> dict[str, Any]:
        """Return its sections and values before interpolation."""
        from omegaconf import OmegaConf

        tree = OmegaConf.to_container(self.tree, resolve=False)
        return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


def _without_null_sections(
    tree: Mapping[str, Any], reference: Mapping[str, Any], prefix: str, sources: Mapping[str, str]
) -> dict[str, Any]:
    """Return the tree with empty sections in place of null, so that null does not remove a section of the reference.

    Raises:
        ConfigError: the tree has a list where the reference has a section.
    """
    result: dict[str, Any] = {}
    for key, value in tree.items():
        below, dotted = reference.get(key), f"{prefix}{key}"
        if isinstance(below, Mapping) and below:
            if isinstance(value, list):
                source = sources.get(dotted, "")
                message = f"{dotted} = {format_value(value)} ({source}): must be a section"
                raise ConfigError(message, key=dotted, value=value, source=source, hint="set the keys in it")
            value = {} if value is None else value
            value = _without_null_sections(value, below, f"{dotted}.", sources) if isinstance(value, Mapping) else value
        result[key] = value
    return result


def config_from_tree(tree: Mapping[str, Any], place: str = "translation") -> ForeignConfig:
    """Return a tree as a foreign configuration, with `place` as the source of all keys."""
    from omegaconf import OmegaConf

    register_resolvers({})
    dotted = (key for name, value in tree.items() for key in _dotted(name, value))
    sources = {key: place for key in dotted if key != HYDRA}
    return ForeignConfig(OmegaConf.create(dict(tree)), sources)


def read_merged(path: Path | None, overrides: Sequence[str], reference: Mapping[str, Any]) -> MergedConfig:
    """Compose a configuration and merge it onto a reference."""
    return compose_config(path, overrides).merge_onto(reference)


def compose_config(
    path: Path | None,
    overrides: Sequence[str],
    places: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ForeignConfig:
    """Compose the file at `path`, the files in its defaults list, and overrides.

    `places` are the sources of the first overrides; the others come from the command line. Variables in `environment`
    have precedence over those of this process in `${oc.env:…}`.

    Raises:
        ConfigError: a file is no YAML mapping; Hydra cannot compose it; an override cannot be parsed.
        MachineError: the file is missing or cannot be read.
    """
    register_resolvers(environment or {})
    if path is not None:
        read_file(path, {})
    parsed = parse_overrides(overrides, places)
    sources: dict[str, str] = {}
    with _hydra(path) as loader:
        choices = [bool(loader.get_group_options(one.key)) for one in parsed]
        words = [_hydra_word(one, is_choice=choice) for one, choice in zip(parsed, choices, strict=True)]
        config, files = compose(loader, path, words, parsed)
    for file, package in files:
        _note_lines(file, package, sources)
    for one, choice in zip(parsed, choices, strict=True):
        if not choice and one.key != SEARCH_PATH:
            one.note(sources)
    _reduce_hydra_section(config, [key for key in RUN_KEYS if key in sources])
    return ForeignConfig(config, sources)


def _reduce_hydra_section(config: DictConfig, keys: Sequence[str]) -> None:
    """Reduce the `hydra` section to the set keys."""
    from omegaconf import OmegaConf

    hydra: Any = config._get_node(HYDRA)
    del config[HYDRA]
    for key in keys:
        inner, last = key.partition(".")[2], key.rpartition(".")[2]
        OmegaConf.update(config, key, _section_node(hydra, inner)._get_node(last), force_add=True)


def _section_node(tree: DictConfig, key: str) -> Any:
    """Return the section of a key; None if there is none, as for names with dots."""
    from omegaconf import DictConfig

    place: Any = tree
    for part in key.split(".")[:-1]:
        place = place._get_node(part) if isinstance(place, DictConfig) else None
    return place if isinstance(place, DictConfig) else None


def _note_section_keys(written: MergedConfig, key: str, sources: dict[str, str]) -> None:
    """Note the keys of a section that is set to `${another}`."""
    try:
        value = written.value(key)
    except ConfigError:
        return  # reported when the key is read
    for dotted in _dotted(key, value):
        sources.setdefault(dotted, sources[key])


def _hydra_word(override: ParsedOverride, *, is_choice: bool) -> str:
    """Return an override as it is given to Hydra."""
    from quintet.config.dialects.composition.confined_source import confined_search_path

    entries = override.override.value()
    if override.key == SEARCH_PATH and isinstance(entries, list):
        return f"{SEARCH_PATH}=[{','.join(json.dumps(str(entry)) for entry in confined_search_path(entries))}]"
    return override.word if is_choice else override.forced


@contextmanager
def _hydra(path: Path | None) -> Iterator[ConfigLoader]:
    """Yield Hydra's loader, confined to the directories that the file names, without its warnings about style."""
    from hydra import initialize
    from hydra.core.global_hydra import GlobalHydra

    from quintet.config.dialects.composition.confined_source import confined_to

    GlobalHydra.instance().clear()
    with warnings.catch_warnings(), confined_to(path and path.parent.resolve() / path.name):
        warnings.simplefilter("ignore")
        # 1.1: files that were written before `_self_` existed keep the order for which they were written
        with initialize(None, version_base="1.1"):
            yield GlobalHydra.instance().config_loader()


def _note_lines(file: Path, package: str, sources: dict[str, str]) -> None:
    """Note the lines of a file's keys; later files replace the keys of earlier ones."""
    lines: dict[str, str] = {}
    read_file(file, lines)
    for key, place in lines.items():
        if _is_run_key(key, package):
            sources[f"{package}.{key}" if package else key] = place


def _is_run_key(key: str, package: str) -> bool:
    """Whether a key of a file configures the run, or is unknown to Hydra in its own section."""
    section = key.split(".")[0]
    if section != HYDRA:
        return section != "defaults"
    return not package and (key in RUN_KEYS or not _is_hydra_key(key))


def _is_hydra_key(key: str) -> bool:
    from hydra.conf import HydraConf

    place: Any = HydraConf
    for name in key.split(".")[1:]:
        if not is_dataclass(place):
            return True
        known = {field.name: field.type for field in fields(place)}
        if name not in known:
            return False
        place = known[name]
    return True


def _dotted(key: str, value: Any) -> Iterator[str]:
    yield from (dotted for dotted, _ in nested_keys(key, value))


def reference_values(dialect: Dialect) -> dict[str, Any]:
    """Return the defaults of the dialect's references as a tree, with the values to which they refer."""
    tree: dict[str, Any] = deepcopy(dict(dialect.context))
    for row in dialect.specs().values():
        *sections, last = row.key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = row.default
    return tree
