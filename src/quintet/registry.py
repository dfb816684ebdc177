"""Generic registry of pluggable components: name, factory, config class, one line of help.

Every pluggable kind (env, engine, advantage estimator, …) is a protocol plus a registry of its implementations:

    ENVS: Registry[Env] = Registry("env", entry_points="quintet.envs")
    ENVS.add("frozenlake", "quintet.envs.frozenlake:FrozenLake", help="...", config=FrozenLakeConfig)
    ENVS.add_file(__file__, "envs.yaml")
    ENVS.get("frozenlake").load()

Another package adds an implementation through an entry point of the registry's group. It points to the factory itself
(a `config_class` attribute gives it typed arguments) or to an `Entry` whose `target` is imported on first use only.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import symtable
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from quintet import hardware
from quintet.errors import ConfigError, UserError, did_you_mean, nearest
from quintet.package_files import read_yaml
from quintet.shared_environment import installation

T = TypeVar("T")
DYNAMIC_NAMES = frozenset({"__getattr__", "exec", "globals", "locals", "setattr", "vars"})
"""Names in a file that may define others only while it runs."""
_IMPORT_LOCK = threading.RLock()
"""Held while a user's file is imported: another thread must not see half of it."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """Registered component. `target` is the factory or its `module:attribute` address, imported on first use."""

    name: str
    target: Callable[..., T] | str
    help: str
    config: type | None = None
    """Pydantic class of the arguments."""
    requires: tuple[str, ...] = ()
    """Modules that must be importable."""
    extra: str | None = None
    """Extra of this distribution that installs them."""
    how: str | None = None
    """Installation hint, if `pip install` is not the way."""
    is_plugin: bool = False
    """Registered by another package."""

    def missing(self) -> tuple[str, ...]:
        """Return the required modules that are not installed."""
        return tuple(name for name in self.requires if not hardware.is_installed(name))

    @property
    def guide(self) -> str:
        """Installation hint for missing modules."""
        packages = (hardware.extra_packages(self.extra) if self.extra else []) or self.missing()
        return self.how or installation(packages)

    def load(self) -> Callable[..., T]:
        """Return the factory.

        Raises:
            ConfigError: a required module is not installed; the message says what to install.
        """
        if missing := self.missing():
            raise ConfigError(
                f"{self.name!r} requires {', '.join(missing)}, which is not installed",
                value=self.name,
                hint=self.guide,
            )
        return _import_address(self.target) if isinstance(self.target, str) else self.target


class Registry(Generic[T]):
    """Components of one kind. `entry_points` is the group through which other packages add theirs."""

    def __init__(self, kind: str, entry_points: str | None = None, old_entry_points: str | None = None) -> None:
        self.kind = kind
        self.version = 0
        """Number of changes, for caches that depend on the entries."""
        self._group = entry_points
        self._old_group = old_entry_points
        self._entries: dict[str, Entry[T]] = {}
        self._plugins: dict[str, EntryPoint] | None = None

    def add(
        self,
        name: str,
        target: Callable[..., T] | str,
        *,
        help: str,  # noqa: A002 - the common name of this argument
        config: type | None = None,
        requires: tuple[str, ...] = (),
        extra: str | None = None,
        how: str | None = None,
    ) -> None:
        """Register a component; see `Entry` for the arguments.

        Raises:
            ValueError: `name` is already registered.
        """
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = Entry(name, target, help, config, requires, extra, how)
        self.version += 1

    def add_file(self, module_file: str, name: str) -> None:
        """Register the components of a YAML file beside a module, whose `__file__` is given. By name it has the
        arguments of `add`, with `config` as `module:class`."""
        for key, arguments in read_yaml(module_file, name).items():
            config, requires = arguments.pop("config", None), arguments.pop("requires", ())
            self.add(key, **arguments, config=config and _import_address(config), requires=tuple(requires))

    def get(self, name: str) -> Entry[T]:
        """Return the entry of that name.

        Raises:
            ConfigError: the name is not registered (the message suggests the nearest), or its plugin cannot be
                imported.
        """
        plugins = self._find_plugins()
        if name in plugins:
            self._load_plugin(plugins.pop(name))
        if name in self._entries:
            return self._entries[name]
        names = [*self._entries, *plugins]
        raise ConfigError(
            f"unknown {self.kind} {name!r}",
            value=name,
            hint=f"{did_you_mean(name, names)} known: {', '.join(sorted(names))}".lstrip(),
        )

    def in_order(self) -> list[Entry[T]]:
        """Return all entries in order of registration; plugins that cannot be imported are left out with a warning."""
        plugins = self._find_plugins()
        for name in list(plugins):
            try:
                self._load_plugin(plugins.pop(name))
            except ConfigError as error:
                warnings.warn(str(error), stacklevel=2)
        return list(self._entries.values())

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(sorted(self.in_order(), key=lambda entry: entry.name))

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._find_plugins()

    def _find_plugins(self) -> dict[str, EntryPoint]:
        """Entry points of other packages that are not imported yet."""
        if self._plugins is None:
            self._plugins = {}
            for group in filter(None, (self._group, self._old_group)):
                for point in _entry_points(importlib.metadata.entry_points).select(group=group):
                    if group == self._old_group:
                        message = f"entry point group {group!r} of {point.value!r} is deprecated: use {self._group!r}"
                        warnings.warn(message, DeprecationWarning, stacklevel=2)
                    if point.name not in self._entries:
                        self._plugins[point.name] = point
                        self.version += 1
        return self._plugins

    def _load_plugin(self, point: EntryPoint) -> None:
        target = load_entry_point(point, self.kind)
        if isinstance(target, Entry):
            entry = replace(target, name=point.name, is_plugin=True)
        else:
            lines = (target.__doc__ or f"from {point.value}").strip().splitlines()
            config = getattr(target, "config_class", None)
            entry = Entry(point.name, target, lines[0], config, is_plugin=True)
        self._entries[point.name] = entry
        self.version += 1


@cache
def _entry_points(read: Callable[[], Any]) -> Any:
    """Return the entry points of all installed packages, whose files are read once for all registries."""
    return read()


def _import_address(address: str) -> Any:
    """Return the object with an address `module:attribute`."""
    module, _, attribute = address.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_entry_point(point: EntryPoint, kind: str) -> Any:
    """Import the object that another package's entry point names.

    Raises:
        ConfigError: the import fails.
    """
    with _import_errors(f"{kind} {point.name!r} from {point.value!r} cannot be imported", value=point.name):
        return point.load()


@contextmanager
def _import_errors(problem: str, **source: Any) -> Iterator[None]:
    """Report an import that fails; `source` has arguments of `ConfigError`."""
    try:
        yield
    except Exception as error:  # importing somebody else's module can raise anything
        raise ConfigError(f"{problem}: {type(error).__name__}: {error}", **source) from error


def load_user_object(reference: str, key: str, entry_points: str | None = None) -> Callable[..., Any]:
    """Import the function or class that a user names as `file.py:name`, `module:name`, or by the name under which
    another package registers it in the group `entry_points`. `key` is the config key, for messages.

    Raises:
        ConfigError: there is no such file, module or name, or importing it fails.
    """
    for point in _entry_points(importlib.metadata.entry_points).select(group=entry_points) if entry_points else ():
        if point.name == reference:
            target = load_entry_point(point, key)
            return target.load() if isinstance(target, Entry) else cast("Callable[..., Any]", target)
    location, colon, name = reference.rpartition(":")
    if not colon:
        raise ConfigError(
            f"{key} = {reference!r} does not name a function or class",
            key=key,
            value=reference,
            hint="write file.py:name or module:name",
        )
    module = _import(location, key, reference)
    if not hasattr(module, name):
        raise _missing_name(key, reference, _defined_names(module))
    return cast("Callable[..., Any]", getattr(module, name))


def check_user_file(reference: str, key: str) -> None:
    """Check the file of `file.py:name` without running it; other references are not checked. See `load_user_object`.

    Raises:
        ConfigError: there is no such file, it is no Python, or it does not bind the name.
    """
    location, _, name = reference.rpartition(":")
    if not location.endswith(".py"):
        return
    path = _user_file(location, key, reference)
    with _import_errors(f"{key} = {reference!r}: importing it failed", key=key, value=reference):
        code = path.read_text("utf-8")
        table = symtable.symtable(code, str(path), "exec")
    is_dynamic = "import *" in code or not DYNAMIC_NAMES.isdisjoint(table.get_identifiers())
    bound = [symbol for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()]
    if not is_dynamic and all(symbol.get_name() != name for symbol in bound):
        defined = [symbol.get_name() for symbol in bound if symbol.is_namespace()]
        raise _missing_name(key, reference, [each for each in defined if not each.startswith("_")])


def _missing_name(key: str, reference: str, defined: list[str]) -> ConfigError:
    location, _, name = reference.rpartition(":")
    return ConfigError(
        f"{key} = {reference!r}: {location} has no {name!r}; it defines {', '.join(defined) or 'no function'}",
        key=key,
        value=reference,
        hint=did_you_mean(name, defined, f"{location}:{{}}") or f"define it in {location}, or name one of those",
    )


def load_user_module(location: str, key: str) -> ModuleType:
    """Import the module or file that a user names; see `load_user_object`."""
    return _import(location, key, location)


@contextmanager
def user_errors(reference: str, key: str) -> Iterator[None]:
    """Report exceptions of a user's function or class with the line of its file, without Quintet's frames.

    Raises:
        ConfigError: the block raised an exception other than a `UserError`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a user's code can raise anything
        message = f"{key} = {reference!r} raised {type(error).__name__}: {error}"
        line = _user_line(error, reference.rpartition(":")[0])
        raise ConfigError(message, key=key, value=reference, hint=f"correct the code: {line}") from error


def _user_line(error: BaseException, location: str) -> str:
    """Return file and line of the innermost call in the file or module `location`, else of the innermost one."""
    name = Path(location).stem if location.endswith(".py") else location.rpartition(".")[2]
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if Path(frame.filename).stem == name), frames[-1])
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def _defined_names(module: ModuleType) -> list[str]:
    """Return the public functions and classes that a module defines, in order, without those that it imports."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]


def _user_file(location: str, key: str, reference: str) -> Path:
    """
    Raises:
        ConfigError: there is no such file.
    """
    path = Path(location).expanduser()
    if not path.is_file():
        close = nearest(path.name, [other.name for other in path.parent.glob("*.py")])
        hint = f"did you mean {Path(location).parent / close}?" if close else f"the current directory is {Path.cwd()}"
        message = f"{key} = {reference!r}: there is no file {location}"
        raise ConfigError(message, key=key, value=reference, hint=hint)
    return path


def _import(location: str, key: str, reference: str) -> ModuleType:
    path = _user_file(location, key, reference) if location.endswith(".py") else None
    with _import_errors(f"{key} = {reference!r}: importing it failed", key=key, value=reference):
        return importlib.import_module(location) if path is None else _import_file(path.resolve())


def _import_file(path: Path) -> ModuleType:
    with _IMPORT_LOCK:
        return _import_file_once(path)


def _import_file_once(path: Path) -> ModuleType:
    name = f"quintet_outside_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    with ExitStack() as on_failure:
        sys.modules[name] = module
        on_failure.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        on_failure.pop_all()
    return module
