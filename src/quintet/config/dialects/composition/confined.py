"""Hydra's loader, kept to files that somebody named: every file is checked before Hydra sees it, and those of a
defaults list come from the directories that the primary file names, or from beside it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from quintet.config.dialects.composition.growth import check_grammar
from quintet.config.dialects.scripts.script import OWN_FILES
from quintet.config.source import read_file, read_text
from quintet.errors import ConfigError

__all__ = ["HYDRA_KEYS", "ConfinedLoader", "check_nesting"]

MOST_FILES = 1000
"""Entries of all defaults lists of a configuration together; one that names each twice doubles them each time."""
HYDRA_KEYS = ("searchpath", "run", "output_subdir")
"""Of the section by which Hydra itself is configured; the rest says how a program of Hydra's begins."""
CONFIG_FOLDERS = ("config", "configs", "conf")
OWN_PACKAGES = ("pkg://verl", "pkg://vagen", "pkg://ragen")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class _CheckedFiles(FileConfigSource):
    """A directory that is searched."""

    def __init__(self, provider: str, path: str, named: tuple[Path, ...]) -> None:
        super().__init__(provider, f"file://{os.path.abspath(path)}")
        self.named = named
        """Directories to which a name may lead out of this one."""
        self.shown = Path(path)
        """As it was written."""

    def load_config(self, config_path: str) -> ConfigResult:
        file = self.file(config_path)
        shown = self.shown / file.relative_to(self.path) if file.is_relative_to(self.path) else file
        sources: dict[str, str] = {}
        tree = read_file(shown, sources)
        check_nesting(tree, "", sources)
        check_grammar(tree, sources)
        if "hydra" in tree:
            tree["hydra"] = _of_hydra(tree["hydra"], sources)
        header = ConfigSource._get_header_dict(read_text(shown)[:512])
        return ConfigResult(self.provider, f"file://{self.path}", OmegaConf.create(tree), header)

    def is_config(self, config_path: str) -> bool:
        return self.file(config_path).is_file()

    def file(self, config_path: str) -> Path:
        """The file of a name, as long as it doesn't lead out of the directories that were named.

        Raises:
            ConfigError: it does.
        """
        file = Path(os.path.normpath(Path(self.path, self._normalize_file_name(config_path))))
        inside = (Path(self.path), *self.named)
        if not any(file.is_relative_to(directory) for directory in inside):
            message = f"a defaults list names {config_path}, outside the directories that were named"
            hint = f"name its directory, too: hydra.searchpath: [file://{file.parent}]"
            raise ConfigError(message, key="defaults", value=config_path, hint=hint)
        return file


class _PrimaryFile(_CheckedFiles):
    """The directory of the primary file, which may have any ending."""

    def __init__(self, provider: str, named: tuple[Path, ...], primary: Path) -> None:
        super().__init__(provider, str(primary.parent), named)
        self.primary = primary.name

    def file(self, config_path: str) -> Path:
        return Path(self.path, self.primary) if config_path == self.primary else super().file(config_path)


class _Repository(ConfigRepository):
    """The directories that are searched."""

    def __init__(self, config_search_path: ConfigSearchPath, primary: Path | None) -> None:
        self.primary = primary
        super().__init__(config_search_path)

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        entries = config_search_path.get_path()
        for entry in list(entries):
            if str(entry.provider).startswith("hydra.searchpath") and not _is_directory(str(entry.path)):
                entries.remove(entry)
        super().initialize_sources(config_search_path)
        # Hydra loads its own classes of sources twice, so they are told by what they search
        files = [source for source in self.sources if source.scheme() == "file"]
        named = tuple(Path(os.path.abspath(source.path)) for source in files if source.provider != "main")
        named += _shared(self.primary.parent) if self.primary is not None else ()
        self.sources = [self._checked(source, named) for source in self.sources]

    def _checked(self, source: ConfigSource, named: tuple[Path, ...]) -> ConfigSource:
        if source.scheme() != "file":
            return source
        if source.provider == "main" and self.primary is not None:
            return _PrimaryFile(source.provider, named, self.primary)
        return _CheckedFiles(source.provider, source.path, named)

    def load_config(self, config_path: str) -> ConfigResult | None:
        """A file's keys; of one that comes with a framework and isn't at hand, what its reference doesn't say."""
        found = super().load_config(config_path)
        name = config_path.removesuffix(".yaml")
        if found is None and name in OWN_FILES:
            found = ConfigResult("reference", name, OmegaConf.create(dict(OWN_FILES[name])), {"package": None}, [])
        if found is not None and not config_path.startswith("hydra/"):
            # which logger or launcher a program of Hydra's takes says nothing of a run
            found.defaults_list = [
                one for one in found.defaults_list or [] if not str(getattr(one, "group", "")).startswith("hydra/")
            ]
        return found


class _Counted(CachingConfigRepository):
    """Files are read once; how often they are asked for is counted."""

    def __init__(self, delegate: CachingConfigRepository) -> None:
        self.delegate, self.cache, self.asked = delegate.delegate, delegate.cache, 0

    def load_config(self, config_path: str) -> ConfigResult | None:
        self.asked += 1
        if self.asked > 2 * MOST_FILES:
            message = f"its defaults lists name more than {MOST_FILES} files, or each other in a circle"
            raise ConfigError(message, hint="name each file once")
        return super().load_config(config_path)


class ConfinedLoader(ConfigLoaderImpl):
    """Composes as Hydra does, from such directories alone."""

    def __init__(self, config_search_path: ConfigSearchPath, primary: Path | None) -> None:
        super().__init__(config_search_path)
        self.repository = _Repository(config_search_path, primary)

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed, repository = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        return parsed, _Counted(repository)


def _shared(directory: Path) -> tuple[Path, ...]:
    """The folder called `config` in which a file stands, and the one beside its own folder: frameworks keep there
    what their examples share, and name it by `../`."""
    folder = Path(os.path.abspath(directory))
    around = [above for above in (folder, *folder.parents) if above.name in CONFIG_FOLDERS][:1]
    beside = [folder.parent / name for name in CONFIG_FOLDERS]
    return (*around, *beside)


def _of_hydra(section: Any, sources: Mapping[str, str]) -> dict[str, Any]:
    """Of the section by which Hydra is configured, what counts here.

    Raises:
        ConfigError: it isn't a section, or `run` in it isn't.
    """
    inner = section.get("run", {}) if isinstance(section, Mapping) else section
    if not isinstance(inner, Mapping):
        key = "hydra.run" if isinstance(section, Mapping) else "hydra"
        source = sources.get(key, key)
        message = f"{key} = {inner!r} ({source}): must be a section"
        raise ConfigError(message, key=key, value=inner, source=source, hint="leave it out")
    kept = {key: value for key, value in section.items() if key in HYDRA_KEYS}
    return kept | ({"run": {"dir": inner["dir"]}} if "dir" in inner else {"run": {}})


def _is_directory(entry: str) -> bool:
    """Whether an entry of a search path is a directory, or else a package whose values are in a reference here.

    Raises:
        ConfigError: it is another package, or something of another kind.
    """
    scheme, sign, _ = entry.partition("://")
    if not sign or scheme == "file":
        return True
    if entry.startswith(OWN_PACKAGES):
        return False
    message = f"hydra.searchpath = {entry!r}: only directories are searched"
    raise ConfigError(message, key="hydra.searchpath", value=entry, hint="write file://DIRECTORY")


def check_nesting(tree: Mapping[str, Any], prefix: str, sources: Mapping[str, str]) -> None:
    """Refuse `data.train_batch_size: 8` on one line: it would be a key of that whole name, which nobody reads.

    Raises:
        ConfigError: there is one.
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
