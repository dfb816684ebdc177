"""Reading a foreign configuration as its own users compose it, by Hydra's library, with the place of every value.

Hydra composes (defaults lists, packages, search paths, `key=value`, `+key=value`, `~key`) and
OmegaConf interpolates. Beneath the user's files lie the values that the dialect's reference shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.dialect import Dialect
from quintet.config.source import COMMAND_LINE, read_file
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.default_element import ResultDefault
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

__all__ = ["Given", "Written", "composed", "given_tree", "read", "reference_values"]

REFERENCE = "default"
HYDRA = "hydra"
"""The section by which Hydra itself is configured; it is read before anything is composed."""


@dataclass(frozen=True, slots=True)
class Written:
    """What somebody's files and words say."""

    tree: DictConfig
    """Their values over those of the reference, not yet interpolated."""
    sources: Mapping[str, str]
    """Of each key that they gave: `file.yaml:12` or `command line`."""

    def leaves(self) -> Iterator[str]:
        """Every dotted key that they gave and that holds no further keys."""
        above = {key.rpartition(".")[0] for key in self.sources}
        yield from sorted(key for key in self.sources if key not in above)

    def value(self, dotted: str) -> Any:
        """The interpolated value of a key as plain data, None where there is none.

        Raises:
            ConfigError: the interpolation leads nowhere, in a circle, or to a missing environment variable.
        """
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
            message = f"{dotted} ({source}) can't be interpolated: {_first_line(error)}"
            raise ConfigError(message, key=dotted, source=source, hint="mend the ${…} in it") from None
        return place


@dataclass(frozen=True, slots=True)
class Given:
    """What somebody's files and words say by themselves."""

    tree: DictConfig
    sources: Mapping[str, str]

    def over(self, reference: Mapping[str, Any]) -> Written:
        """The same over the values that a reference shows."""
        from omegaconf import OmegaConf

        tree, sources = OmegaConf.create(dict(reference)), dict(self.sources)
        tree.merge_with(self.tree)
        written = Written(tree, sources)
        for key in list(written.leaves()):
            if OmegaConf.is_interpolation(_parent(tree, key), key.rpartition(".")[2]):
                _note_inner(written, key, sources)
        return written

    def plain(self) -> dict[str, Any]:
        """Its sections and values, interpolations as they were written."""
        from omegaconf import OmegaConf

        tree = OmegaConf.to_container(self.tree, resolve=False)
        return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


def given_tree(tree: Mapping[str, Any]) -> Given:
    """A tree as if somebody had written it."""
    from omegaconf import OmegaConf

    _register_resolvers()
    sources = {dotted: "translation" for name, value in tree.items() for dotted in _dotted(name, value)}
    return Given(OmegaConf.create(dict(tree)), sources)


def read(path: Path | None, overrides: Sequence[str], reference: Mapping[str, Any]) -> Written:
    """`composed(path, overrides)` over the values of `reference`."""
    return composed(path, overrides).over(reference)


def composed(path: Path | None, overrides: Sequence[str], places: Sequence[str] = ()) -> Given:
    """Compose the file at `path`, with what its defaults list names, and `overrides`. `places` says where each
    override was written; those beyond it come from the command line.

    Raises:
        ConfigError: a file isn't YAML that holds keys; Hydra can't compose it; an override can't be read.
        MachineError: the file is missing or can't be read.
    """
    _register_resolvers()
    if path is not None:
        read_file(path, {})
    with _hydra(path) as loader:
        words = [_forced(override, loader) for override in _parsed(overrides)]
        config, files = _composed(loader, path, words)
    sources: dict[str, str] = {}
    for file, package in files:
        _locate(file, package, sources)
    for number, override in enumerate(_parsed(words)):
        _note(override, sources, places[number] if number < len(places) else COMMAND_LINE)
    return Given(config, sources)


def _parent(tree: DictConfig, key: str) -> Any:
    """The section that a key stands in."""
    place: Any = tree
    for part in key.split(".")[:-1]:
        place = place._get_node(part)
    return place


def _note_inner(written: Written, key: str, sources: dict[str, str]) -> None:
    """A section that was given as `${another}` gives each of that one's keys."""
    try:
        value = written.value(key)
    except ConfigError:
        return  # told by whoever reads the key
    for dotted in _dotted(key, value):
        sources.setdefault(dotted, sources[key])


@contextmanager
def _hydra(path: Path | None) -> Iterator[ConfigLoader]:
    """Hydra's loader with the file's directory to search; its warnings about style are left unsaid."""
    from hydra import initialize, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # 1.1: files that were written before `_self_` came keep the order they were written for
        begun = (
            initialize_config_dir(str(path.parent.resolve()), version_base="1.1") if path else initialize(None, "1.1")
        )
        with begun:
            yield GlobalHydra.instance().config_loader()


def _parsed(overrides: Sequence[str]) -> list[Override]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    hint = "write key=value, +key=value or ~key"
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"can't read an override: {_first_line(error)}", source=COMMAND_LINE, hint=hint) from None
    for override in parsed:
        if not override.key_or_group:
            raise ConfigError(f"{override.input_line!r} names no key", source=COMMAND_LINE, hint=hint)
    return parsed


def _forced(override: Override, loader: ConfigLoader) -> str:
    """The override as one that also sets what the file leaves to the reference; whether there is such a key
    is asked later, of all keys at once. Choices from a group of files stay as they are."""
    from hydra.core.override_parser.types import OverrideType

    line = str(override.input_line)
    is_choice = bool(loader.get_group_options(override.key_or_group))
    if override.type in (OverrideType.CHANGE, OverrideType.ADD) and not is_choice and not override.is_hydra_override():
        return f"++{line.lstrip('+')}"
    return line


def _composed(loader: ConfigLoader, path: Path | None, words: list[str]) -> tuple[DictConfig, list[tuple[Path, str]]]:
    """The composed configuration without Hydra's own section, and its files with their packages, in order."""
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    name = path.name if path else None
    try:
        config = loader.load_configuration(name, words, RunMode.RUN, from_shell=False)
        defaults = loader.compute_defaults_list(name, words, RunMode.RUN).defaults
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        shown = name or COMMAND_LINE
        raise ConfigError(f"{shown} can't be composed: {_first_line(error)}", source=shown) from None
    roots = [Path(source.path) for source in config[HYDRA].runtime.config_sources if source.schema == "file"]
    if path:
        # the directory that was named stays as it was written
        roots = [path.parent if root == path.parent.resolve() else root for root in roots]
    files = [
        (file, "" if default.package in (None, "_global_") else str(default.package))
        for default in defaults
        if (file := _file(default, roots)) is not None
    ]
    OmegaConf.set_struct(config, False)
    del config[HYDRA]
    return config, files


def _file(default: ResultDefault, roots: list[Path]) -> Path | None:
    """The file of a defaults list's entry; None for what comes with Hydra."""
    name = str(default.config_path).removesuffix(".yaml")
    return next((file for root in roots if (file := root / f"{name}.yaml").is_file()), None)


def _locate(file: Path, package: str, sources: dict[str, str]) -> None:
    """Note the lines of a file's keys; what it gives replaces what files before it gave."""
    found: dict[str, str] = {}
    read_file(file, found)
    for key, place in found.items():
        if key.split(".")[0] not in ("defaults", HYDRA):
            sources[f"{package}.{key}" if package else key] = place


def _note(override: Override, sources: dict[str, str], place: str) -> None:
    """Note where a word set something, or took it away."""
    from hydra.core.override_parser.types import OverrideType

    key = str(override.key_or_group)
    if override.is_hydra_override():
        return
    for below in [other for other in sources if other == key or other.startswith(f"{key}.")]:
        del sources[below]
    if override.type is not OverrideType.DEL:
        for dotted in _dotted(key, override.value()):
            sources[dotted] = place


def _dotted(key: str, value: Any) -> Iterator[str]:
    yield key
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _dotted(f"{key}.{name}", inner)


def _register_resolvers() -> None:
    """The resolvers that the frameworks' own files use. A type's name stays a name: no torch is loaded for it."""
    from omegaconf import OmegaConf

    resolvers: dict[str, Any] = {
        "multiply": lambda a, b: a * b,
        "int_div": lambda a, b: a // b,
        "subtract": lambda a, b: a - b,
        "not": lambda a: not a,
        "torch.dtype": str,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def reference_values(dialect: Dialect) -> dict[str, Any]:
    """The values that the dialect's reference shows, as a tree."""
    tree: dict[str, Any] = {}
    for row in dialect.rows().values():
        *sections, last = row.key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = row.default
    return tree
