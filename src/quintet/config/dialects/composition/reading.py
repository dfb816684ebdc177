"""Reading a foreign configuration as its own users compose it, by Hydra's library, with the place of every value.

Hydra composes (defaults lists, packages, search paths, `key=value`, `+key=value`, `~key`) and
OmegaConf interpolates. Beneath the user's files lie the values that the dialect's reference shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.composition.composing import compose
from quintet.config.dialects.composition.growth import check_growth
from quintet.config.dialects.composition.overrides import dotted_keys, parsed
from quintet.config.dialects.composition.resolvers import first_line, hint_for, register_resolvers
from quintet.config.dialects.dialect import Dialect
from quintet.config.keys import show
from quintet.config.source import read_file
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from quintet.config.dialects.composition.confined import ConfinedLoader

__all__ = ["OF_THE_RUN", "Given", "Written", "composed", "given_tree", "read", "reference_values"]

REFERENCE = "default"
HYDRA = "hydra"
"""The section by which Hydra itself is configured; it is read before anything is composed."""
SEARCH_PATH = "hydra.searchpath"
OF_THE_RUN = ("hydra.run.dir", "hydra.output_subdir")
"""Its keys that say something of the run, too."""


@dataclass(frozen=True, slots=True)
class Written:
    """What somebody's files and words say."""

    tree: DictConfig
    """Their values over those of the reference, not yet interpolated."""
    sources: Mapping[str, str]
    """Of each key that they gave: `file.yaml:12` or `command line`."""
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Values that were interpolated already."""

    def leaves(self) -> Iterator[str]:
        """Every dotted key that they gave and that holds no further keys."""
        above = {key.rpartition(".")[0] for key in self.sources}
        yield from sorted(key for key in self.sources if key not in above)

    def value(self, dotted: str) -> Any:
        """The interpolated value of a key as plain data, None where there is none.

        Raises:
            ConfigError: the interpolation leads nowhere, in a circle, or to a missing environment variable.
        """
        if dotted not in self._known:
            self._known[dotted] = self._interpolate(dotted)
        return deepcopy(self._known[dotted])

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
            message = f"{dotted} ({source}) can't be interpolated: {problem}"
            raise ConfigError(message, key=dotted, source=source, hint=hint_for(problem)) from None
        return place

    def raw(self, dotted: str) -> Any:
        """The value of a key as it was written, None where there is none."""
        from omegaconf import DictConfig, OmegaConf

        plain: Any = OmegaConf.to_container(self.tree, resolve=False) if isinstance(self.tree, DictConfig) else None
        for part in dotted.split("."):
            plain = plain.get(part) if isinstance(plain, Mapping) else None
        return plain

    def interpolated(self, value: Any) -> Any:
        """Text with `${…}` as it reads in this configuration; what leads nowhere, and other values, as they are."""
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
class Given:
    """What somebody's files and words say by themselves."""

    tree: DictConfig
    sources: Mapping[str, str]

    def over(self, reference: Mapping[str, Any]) -> Written:
        """The same over the values that a reference shows."""
        from omegaconf import OmegaConf

        tree, sources = OmegaConf.create(dict(reference)), dict(self.sources)
        tree.merge_with(OmegaConf.create(_fitting(self.plain(), reference, "", sources)))
        check_growth(OmegaConf.to_container(tree, resolve=False), sources)
        written = Written(tree, sources)
        for key in list(written.leaves()):
            section = _parent(tree, key)
            if section is not None and OmegaConf.is_interpolation(section, key.rpartition(".")[2]):
                _note_inner(written, key, sources)
        return written

    def plain(self) -> dict[str, Any]:
        """Its sections and values, interpolations as they were written."""
        from omegaconf import OmegaConf

        tree = OmegaConf.to_container(self.tree, resolve=False)
        return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


def _fitting(
    tree: Mapping[str, Any], reference: Mapping[str, Any], prefix: str, sources: Mapping[str, str]
) -> dict[str, Any]:
    """A tree in which a section that is null has no keys, rather than taking away those of the reference.

    Raises:
        ConfigError: a list stands where the reference has a section.
    """
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        below, dotted = reference.get(key), f"{prefix}{key}"
        if isinstance(below, Mapping) and below:
            if isinstance(value, list):
                source = sources.get(dotted, "")
                message = f"{dotted} = {show(value)} ({source}): must be a section"
                raise ConfigError(message, key=dotted, value=value, source=source, hint="set the keys in it")
            value = {} if value is None else value
            value = _fitting(value, below, f"{dotted}.", sources) if isinstance(value, Mapping) else value
        kept[key] = value
    return kept


def given_tree(tree: Mapping[str, Any], place: str = "translation") -> Given:
    """A tree as if somebody had written it there."""
    from omegaconf import OmegaConf

    register_resolvers({})
    dotted = (key for name, value in tree.items() for key in _dotted(name, value))
    sources = {key: place for key in dotted if key != HYDRA}
    return Given(OmegaConf.create(dict(tree)), sources)


def read(path: Path | None, overrides: Sequence[str], reference: Mapping[str, Any]) -> Written:
    """`composed(path, overrides)` over the values of `reference`."""
    return composed(path, overrides).over(reference)


def composed(
    path: Path | None,
    overrides: Sequence[str],
    places: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Given:
    """Compose the file at `path`, with what its defaults list names, and `overrides`. `places` says where each
    override was written; those beyond it come from the command line. `environment` holds variables that
    `${oc.env:…}` finds before those of this process.

    Raises:
        ConfigError: a file isn't YAML that holds keys; Hydra can't compose it; an override can't be read.
        MachineError: the file is missing or can't be read.
    """
    register_resolvers(environment or {})
    if path is not None:
        read_file(path, {})
    said = parsed(overrides, places)
    sources: dict[str, str] = {}
    with _hydra(path) as loader:
        choices = [bool(loader.get_group_options(one.key)) for one in said]
        words = [one.word if choice else one.forced for one, choice in zip(said, choices, strict=True)]
        config, files = compose(loader, path, words, said)
    for file, package in files:
        _locate(file, package, sources)
    for one, choice in zip(said, choices, strict=True):
        if not choice and one.key != SEARCH_PATH:
            one.note(sources)
    _leave_of_hydra(config, [key for key in OF_THE_RUN if key in sources])
    return Given(config, sources)


def _leave_of_hydra(config: DictConfig, keys: Sequence[str]) -> None:
    """Of Hydra's own section only the given keys that say something of the run."""
    from omegaconf import OmegaConf

    hydra: Any = config._get_node(HYDRA)
    del config[HYDRA]
    for key in keys:
        inner, last = key.partition(".")[2], key.rpartition(".")[2]
        OmegaConf.update(config, key, _parent(hydra, inner)._get_node(last), force_add=True)


def _parent(tree: DictConfig, key: str) -> Any:
    """The section that a key stands in; None where there is none, as for names that have dots in them."""
    from omegaconf import DictConfig

    place: Any = tree
    for part in key.split(".")[:-1]:
        place = place._get_node(part) if isinstance(place, DictConfig) else None
    return place if isinstance(place, DictConfig) else None


def _note_inner(written: Written, key: str, sources: dict[str, str]) -> None:
    """A section that was given as `${another}` gives each of that one's keys."""
    try:
        value = written.value(key)
    except ConfigError:
        return  # told by whoever reads the key
    for dotted in _dotted(key, value):
        sources.setdefault(dotted, sources[key])


@contextmanager
def _hydra(path: Path | None) -> Iterator[ConfinedLoader]:
    """Hydra's loader with the file's directory to search; its warnings about style are left unsaid."""
    from hydra import initialize, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from quintet.config.dialects.composition.confined import ConfinedLoader

    GlobalHydra.instance().clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # 1.1: files that were written before `_self_` came keep the order they were written for
        begun = (
            initialize_config_dir(str(path.parent.resolve()), version_base="1.1") if path else initialize(None, "1.1")
        )
        with begun:
            searched = GlobalHydra.instance().config_loader().get_search_path()
            yield ConfinedLoader(searched, path)


def _locate(file: Path, package: str, sources: dict[str, str]) -> None:
    """Note the lines of a file's keys; what it gives replaces what files before it gave."""
    found: dict[str, str] = {}
    read_file(file, found)
    for key, place in found.items():
        if _counts(key, package):
            sources[f"{package}.{key}" if package else key] = place


def _counts(key: str, package: str) -> bool:
    """Whether a key of a file says something of the run. Of Hydra's own section two do; what Hydra itself doesn't
    know there is told as unknown."""
    section = key.split(".")[0]
    if section != HYDRA:
        return section != "defaults"
    return not package and (key in OF_THE_RUN or not _is_hydras(key))


def _is_hydras(key: str) -> bool:
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
    yield from (dotted for dotted, _ in dotted_keys(key, value))


def reference_values(dialect: Dialect) -> dict[str, Any]:
    """The values that the dialect's reference shows, as a tree, with those that it refers to."""
    tree: dict[str, Any] = deepcopy(dict(dialect.context))
    for row in dialect.rows().values():
        *sections, last = row.key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = row.default
    return tree
