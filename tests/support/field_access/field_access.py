"""Force one field of the configuration back to its default, wherever code reads it that acts on it.

`QUINTET_FIELD_ACCESS=1` prepares a process and those that it starts. `QUINTET_FORCED_FIELD`, which may change later,
names a field, such as `OptimizerConfig.learning_rate`: every read of it returns the default, whatever the configuration
says.

A field is named by the class that declares it: `InteractiveEnvSection.max_actions` is that of all environments. The
default is the default of the key: `actor.optimizer` and `warm_start.optimizer` have the same class. The key of a
section is known if the section was read from an `Experiment`; otherwise the default of the class is taken.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from inspect import get_annotations
from typing import Any

PREPARED, FORCED = "QUINTET_FIELD_ACCESS", "QUINTET_FORCED_FIELD"
SECTION_MODULE = "quintet.config.native.section"
WITHOUT_EFFECT = (
    *("quintet.diagnosis", "quintet.viewer", "quintet.config.checks", "quintet.config.dialects", "quintet.config.fit"),
    *(f"quintet.config.{name}" for name in ("schema", "validation", "yaml_writer")),
    *(f"quintet.config.plan.{name}" for name in ("advice", "component_memory", "costs", "memory")),
    *(f"quintet.config.plan.{name}" for name in ("run_plan", "step_time", "vision_encoder")),
    *(f"quintet.cli.{name}" for name in ("check", "doctor", "explain", "messages", "plan", "plan_fit", "plan_table")),
)
"""Modules and packages whose reads change messages and estimates alone."""

_paths: dict[int, tuple[Any, str]] = {}
"""Sections, kept alive so that their ids are not reused, and their dotted keys."""


class _InstallAfterImport(MetaPathFinder):
    """Finds the module with the base class of sections, and patches the class after the import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != SECTION_MODULE or (spec := PathFinder.find_spec(name, path)) is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            install(module.Section)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install_when_imported() -> None:
    if os.environ.get(PREPARED):
        sys.meta_path.insert(0, _InstallAfterImport())


def install(section: Any) -> None:
    """Have reads of a section's fields by code whose behaviour they decide go through `_read`."""

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name.startswith("_") or name not in type(self).__pydantic_fields__:
            return value
        by_run = not _validation.depth and _decides(sys._getframe(1).f_globals.get("__name__", ""))
        return _read(self, name, value, by_run=by_run)

    def validate(validator: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            _validation.depth += 1
            try:
                return validator(*arguments, **options)
            finally:
                _validation.depth -= 1

        return wrapped

    def dump(self: Any, **options: Any) -> dict[str, Any]:
        values = model_dump(self, **options)
        if _validation.depth or not _decides(sys._getframe(1).f_globals.get("__name__", "")):
            return values
        plain = {name: value for name, value in values.items() if not hasattr(type(vars(self)[name]), "is_watched")}
        return values | {name: _read(self, name, value, by_run=True) for name, value in plain.items()}

    model_dump = section.model_dump
    section.model_dump = dump
    section.__init__ = validate(section.__init__)
    section.model_validate = classmethod(validate(section.model_validate.__func__))
    section.__getattribute__ = read
    section.is_watched = True


class _Validation(threading.local):
    """Sections under validation read each other's fields, which is no effect of a field."""

    depth = 0


_validation = _Validation()


@cache
def _decides(module: str) -> bool:
    """Return whether code of a module runs what the configuration says: tests, messages and pages do not."""
    below = [f"{name}." for name in WITHOUT_EFFECT]
    return module.startswith("quintet.") and not f"{module}.".startswith(tuple(below))


@cache
def field_name(kind: Any, name: str) -> str:
    owner = next(parent for parent in kind.__mro__ if name in get_annotations(parent))
    return f"{owner.__name__}.{name}"


def _read(section: Any, name: str, value: Any, *, by_run: bool) -> Any:
    kind = type(section)
    parent = "" if kind.__name__ == "Experiment" else _paths.get(id(section), (None, None))[1]
    key = name if parent == "" else None if parent is None else f"{parent}.{name}"
    _remember(value, key)
    forced = os.environ.get(FORCED)
    return _default(key, kind, name) if by_run and forced and forced == field_name(kind, name) else value


def _remember(value: Any, key: str | None) -> None:
    """Remember the key of a section, or of those in a mapping, whose names the user has chosen."""
    if key is None:
        return
    for entry, part in value.items() if isinstance(value, dict) else [("", value)]:
        if hasattr(type(part), "is_watched"):
            _paths[id(part)] = part, f"{key}.*" if entry else key


@cache
def _default(key: str | None, kind: Any, name: str) -> Any:
    """Return the default of a field, which is that of the section around it if the section has the same class there."""
    from quintet.config.native.experiment import Experiment

    section: Any = Experiment() if key else None
    for parent in (key or "").split(".")[:-1]:
        section = vars(section).get(parent) if hasattr(type(section), "is_watched") else None
    if type(section) is kind:
        return vars(section)[name]
    return kind.__pydantic_fields__[name].get_default(call_default_factory=True, validated_data={})
