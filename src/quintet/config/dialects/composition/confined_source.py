"""A source of configuration files for Hydra that reads only files in directories that the user named.

Every file is checked before Hydra sees it. A defaults list may name files beside the primary file, in the directories
of its `hydra.searchpath`, and in a directory called `config` around or beside the primary file.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from quintet.config.dialects.composition.default_files import is_beside, is_broken_link, link_target
from quintet.config.dialects.composition.interpolation import check_grammar
from quintet.config.dialects.composition.plain_composition import check_nesting
from quintet.config.dialects.registry import FRAMEWORK_FILES
from quintet.config.yaml_reader import COMMAND_LINE, read_file, read_text
from quintet.errors import ConfigError

SCHEME, REFERENCE_SCHEME = "confined", "reference"
MAX_FILES = 1000
"""Entries of all defaults lists together; a list that names another twice doubles the entries of that one."""
HYDRA_KEYS = ("searchpath", "run", "output_subdir")
"""Keys of the `hydra` section that are read; the others configure Hydra's own start of a program."""
CONFIG_DIRECTORIES = ("config", "configs", "conf")
FRAMEWORK_PACKAGES = ("pkg://verl", "pkg://vagen", "pkg://ragen")


@dataclass(slots=True)
class ConfigFiles:
    """The files of the configuration that is being composed, and the directories that are searched."""

    path: Path | None
    """The primary file as the user named it; None allows no files but those of the search path."""
    sources: list["ConfinedSource"] = field(default_factory=list)
    lines: dict[str, dict[str, str]] = field(default_factory=dict)
    """The source of each key in each file that Hydra loaded, `file.yaml:12`, by the file's name in defaults lists."""
    file_counts: dict[str, int] = field(default_factory=dict)
    """Entries of the defaults lists beneath a configuration."""

    @property
    def name(self) -> str | None:
        """Name of the primary file."""
        return None if self.path is None else self.path.name

    @property
    def directory(self) -> Path | None:
        """Directory of the primary file, without symbolic links."""
        return None if self.path is None else self.path.parent.resolve()

    def source_of(self, key: str | None, name: str | None = None) -> str:
        """Return the source of a key in a file, by default the primary one."""
        if self.path is None:
            return COMMAND_LINE
        lines = self.lines.get(name or "") or self.lines.get(self.path.name, {})
        return lines.get(key or "", str(self.path))


_files: ContextVar[ConfigFiles] = ContextVar("_files")


@contextmanager
def confined_to(path: Path | None) -> Iterator[ConfigFiles]:
    """Confine Hydra to the files that a primary file may name."""
    _register_plugins()
    files = ConfigFiles(path)
    token = _files.set(files)
    try:
        yield files
    finally:
        _files.reset(token)


@cache
def _register_plugins() -> None:
    for plugin in (ConfinedSource, ReferenceSource, _PrimaryDirectory):
        Plugins.instance().register(plugin)


class _PrimaryDirectory(SearchPathPlugin):
    """Adds the directory of the primary file to Hydra's search path, and those that links in it point to."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (directory := _files.get().directory) is not None:
            search_path.append("main", f"{SCHEME}://{directory}")
            for linked in _linked_directories(directory):
                search_path.append("linked", f"{SCHEME}://{linked}")


def _linked_directories(directory: Path) -> list[Path]:
    """Return the directories of files that links in a directory point to, as far as they are beside or below it.

    RAGEN links the file of a submodule whose defaults list names files there.
    """
    links = (file.resolve() for file in sorted(directory.glob("*.yaml")) if file.is_symlink())
    targets = dict.fromkeys(target.parent for target in links if target.is_file())
    return [target for target in targets if target != directory and target.is_relative_to(directory.parent)]


def confined_search_path(entries: list[Any]) -> list[Any]:
    """Return the entries of a `hydra.searchpath` so that their files are confined and checked."""
    return [*(f"{SCHEME}://{entry}" for entry in entries), f"{REFERENCE_SCHEME}://"]


class ReferenceSource(ConfigSource):
    """Files that come with a framework and are missing here: their values are in the reference."""

    @staticmethod
    def scheme() -> str:
        return REFERENCE_SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        name = config_path.removesuffix(".yaml")
        tree = OmegaConf.create(dict(FRAMEWORK_FILES[name]))
        return ConfigResult(self.provider, name, tree, {"package": None})

    def is_config(self, config_path: str) -> bool:
        return config_path.removesuffix(".yaml") in FRAMEWORK_FILES

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class ConfinedSource(ConfigSource):
    """A directory of the search path.

    Raises:
        ConfigError: the entry is no directory, but another scheme than `file://`.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self.is_main = provider == "main"
        self.is_package = self.path.startswith(FRAMEWORK_PACKAGES)
        if not self.is_package:
            self.path = _directory(self.path)
        self.files.sources.append(self)

    @property
    def files(self) -> ConfigFiles:
        # no attribute, because Hydra copies its sources deeply
        return _files.get()

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def available(self) -> bool:
        return self.is_package or Path(self.path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return not self.is_package and self.file(config_path).is_file() and not is_broken_link(self.file(config_path))

    def is_group(self, config_path: str) -> bool:
        return not self.is_package and Path(self.path, config_path).is_dir()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names: list[str] = []
        directory = Path(self.path, config_path)
        for entry in sorted(directory.iterdir()) if self.is_group(config_path) else ():
            self._list_add_result(names, os.path.join(config_path, entry.name), entry.name, results_filter)
        return sorted(set(names))

    def load_config(self, config_path: str) -> ConfigResult:
        path, is_primary = self._shown_path(config_path), self._is_primary(config_path)
        sources = self.files.lines[config_path] = {}
        tree = read_file(path, sources)
        check_nesting(tree, "", sources)
        check_grammar(tree, sources)
        if "hydra" in tree or is_primary:
            tree["hydra"] = _hydra_section(tree.get("hydra", {}), sources, is_primary=is_primary)
        if isinstance(tree.get("defaults"), list):
            tree["defaults"] = [entry for entry in tree["defaults"] if not _configures_hydra(entry)]
        if not is_primary:
            _count_files(config_path, self.files, ())
        header = self._get_header_dict(read_text(path)[:512])
        return ConfigResult(self.provider, f"{SCHEME}://{self.path}", OmegaConf.create(tree), header)

    def _is_primary(self, config_path: str) -> bool:
        return self.is_main and config_path == self.files.name

    def file(self, config_path: str) -> Path:
        """Return the file of a name; of the text of a symbolic link, the file that it points to, if that exists.

        Raises:
            ConfigError: it is outside the directories that the user named.
        """
        if self._is_primary(config_path):
            return Path(self.path, config_path)
        file = Path(os.path.normpath(Path(self.path, self._normalize_file_name(config_path))))
        named = (Path(self.path), *_named_directories(self.files))
        is_named = any(file.is_relative_to(directory) for directory in named)
        if not is_named or not any(is_beside(file, directory) for directory in named):
            message = f"a defaults list names {config_path}, outside the directories that were named"
            hint = f"name its directory, too: hydra.searchpath: [file://{file.parent}]"
            raise ConfigError(message, key="defaults", value=config_path, hint=hint)
        return file if (target := link_target(file)) is None or not target.is_file() else target

    def _shown_path(self, config_path: str) -> Path:
        """Return the file of a name, below the directory of the primary file as the user wrote that."""
        file = self.file(config_path)
        if not self.is_main or self.files.path is None:
            return file
        shown = Path(self.files.path.parent, os.path.relpath(file, self.path))
        return Path(os.path.normpath(shown)) if ".." in config_path else shown


def _directory(entry: str) -> str:
    """Return the directory of an entry of the search path."""
    if "://" in entry and not entry.startswith("file://"):
        message = f"hydra.searchpath = {entry!r}: only directories are searched"
        raise ConfigError(message, key="hydra.searchpath", value=entry, hint="write file://DIRECTORY")
    return os.path.abspath(entry.removeprefix("file://"))


def _named_directories(files: ConfigFiles) -> Iterator[Path]:
    """Yield the directories of the search path, and those called `config` that a framework's examples share."""
    yield from (Path(source.path) for source in files.sources if not source.is_main and not source.is_package)
    if (directory := files.directory) is not None:
        yield from [parent for parent in (directory, *directory.parents) if parent.name in CONFIG_DIRECTORIES][:1]
        yield from (directory.parent / name for name in CONFIG_DIRECTORIES)


def _count_files(config_path: str, files: ConfigFiles, above: tuple[str, ...]) -> int:
    """Return the number of entries in the defaults lists beneath a configuration.

    Raises:
        ConfigError: they are too many, or name each other in a circle.
    """
    if config_path not in files.file_counts:
        source = next((source for source in files.sources if source.is_config(config_path)), None)
        tree = {} if source is None else read_file(source.file(config_path), {})
        count = MAX_FILES + 1 if config_path in above else 1
        if count == 1:
            children = _listed_files(tree.get("defaults"), os.path.dirname(config_path))
            count += sum(_count_files(child, files, (*above, config_path)) for child in children)
        if count > MAX_FILES:
            message = f"its defaults lists name more than {MAX_FILES} files, or each other in a circle"
            raise ConfigError(message, hint="name each file once")
        files.file_counts[config_path] = count
    return files.file_counts[config_path]


def _listed_files(defaults: Any, group: str) -> Iterator[str]:
    """Yield the names in a defaults list, relative to the search path."""
    for entry in defaults if isinstance(defaults, list) else ():
        for key, value in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
            subgroup = str(key).split(" ")[-1].partition("@")[0]
            for choice in value if isinstance(value, list) else [value]:
                if isinstance(choice, str) and choice != "_self_":
                    name = os.path.join("/", group, subgroup, choice.partition("@")[0])
                    yield os.path.normpath(name).lstrip("/")


def _configures_hydra(entry: Any) -> bool:
    """Whether an entry of a defaults list chooses how Hydra starts a program: `override hydra/launcher: ray`."""
    names = entry if isinstance(entry, Mapping) else [entry]
    return any(str(name).split(" ")[-1].startswith("hydra/") for name in names)


def _hydra_section(section: Any, sources: Mapping[str, str], *, is_primary: bool) -> dict[str, Any]:
    """Return the keys of a `hydra` section that are read.

    Raises:
        ConfigError: it, or its key `run`, is not a section.
    """
    run = section.get("run", {}) if isinstance(section, Mapping) else section
    if not isinstance(run, Mapping):
        key = "hydra.run" if isinstance(section, Mapping) else "hydra"
        source = sources.get(key, key)
        message = f"{key} = {run!r} ({source}): must be a section"
        raise ConfigError(message, key=key, value=run, source=source, hint="leave it out")
    read = {key: value for key, value in section.items() if key in HYDRA_KEYS}
    read["run"] = {"dir": run["dir"]} if "dir" in run else {}
    search_path = read.get("searchpath", [])
    if is_primary and (search_path is None or isinstance(search_path, list)):
        read["searchpath"] = confined_search_path(search_path or [])
    return read
