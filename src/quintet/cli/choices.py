"""Whether what a configuration names is there: engines, loggers, directories. Before anything heavy begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quintet.config import Composed
from quintet.config.faults import Fault, raise_faults
from quintet.errors import ConfigError, nearest
from quintet.registry import Registry

__all__ = ["check_choices"]


def check_choices(composed: Composed) -> None:
    """Look up every name and every directory to be read.

    Raises:
        ConfigError: one message for all that is missing.
    """
    from quintet.envs import catalogue  # noqa: F401 - registers the worlds
    from quintet.envs.world import WORLDS
    from quintet.rollout.engine import ENGINES
    from quintet.tracking.loggers import LOGGERS

    config = composed.experiment
    raise_faults(
        [
            *_registered(composed, "world.name", config.world.name, WORLDS),
            *_registered(composed, "rollout.engine", config.rollout.engine, ENGINES),
            *(
                fault
                for name in config.tracking.loggers
                for fault in _registered(composed, "tracking.loggers", name, LOGGERS)
            ),
            *_directory(composed, "policy.path", config.policy.path, "a directory with config.json and weights"),
            *_directory(composed, "resume", _resume_path(config.resume), "a global_step_N directory"),
        ]
    )


def _resume_path(resume: str) -> str | None:
    return None if resume in ("auto", "never") else resume


def _registered(composed: Composed, key: str, name: str, registry: Registry[Any]) -> Iterator[Fault]:
    source = composed.provenance.get(key, "default")
    try:
        entry = registry.get(name)
    except ConfigError as error:
        yield Fault(key, name, source, f"{key} = {name!r} ({source}): {error.message}", error.hint)
        return
    if missing := entry.missing():
        install = f"quintet[{entry.extra}]" if entry.extra else " ".join(missing)
        yield Fault(
            key,
            name,
            source,
            f"{key} = {name!r} ({source}) needs {', '.join(missing)}, not installed here",
            f"pip install '{install}'",
        )


def _directory(composed: Composed, key: str, value: str | None, wanted: str) -> Iterator[Fault]:
    if value is None or Path(value).is_dir():
        return
    path, source = Path(value), composed.provenance.get(key, "default")
    beside = [other.name for other in path.parent.iterdir() if other.is_dir()] if path.parent.is_dir() else []
    close = nearest(path.name, beside)
    hint = f"did you mean {path.parent / close}?" if close else f"{key} names {wanted}"
    yield Fault(key, value, source, f"{key} = {value!r} ({source}): no such directory", hint)
