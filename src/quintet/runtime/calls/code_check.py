"""What a process runs of the code that the other end of a connection names: only what its own command line names, too.

Every rank composes the configuration from its own command line, and gets one with the calls of the controller, in which
a phase of the run may have changed a part. A process that has become the controller must not be able to add code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quintet.config.checks.code_settings import code_settings, sections_of
from quintet.config.native.experiment import Experiment
from quintet.config.native.section import Section
from quintet.config.schema import format_value
from quintet.errors import MachineError
from quintet.tracking.run_directory import RunDirectory

_MODEL_FIELDS = ("path", "tokenizer")
"""Fields with the directory of a model or a tokenizer, which may have code."""
_TRUSTS_MODELS = ("trust_remote_code", "trust_tokenizer_code")
"""Ends of the keys by which code in these directories runs."""
_DIRECTORY_FIELDS = (*_MODEL_FIELDS, "directory", "output_dir")
"""Fields of the sections of a configuration with directories from which a run reads models, or to which it writes."""


@dataclass(frozen=True, slots=True)
class AllowedCode:
    """The code that the configuration of this process names."""

    config: Experiment | None = None
    """Composed from the command line of this process. Without one no code is allowed."""

    def check(self, received: Section | Path) -> None:
        """
        Raises:
            MachineError: a section of the configuration, or the path of a model, would run other code.
        """
        for key, value in _refused(self.config, received):
            raise MachineError(
                f"another process of the run has sent {key}={format_value(value)}, which runs code that the command "
                "line of this one does not name",
                "start all ranks with the same command and files",
            )


def _refused(own: Experiment | None, received: Section | Path) -> Iterator[tuple[str, object]]:
    """Yield the keys and values of code that `own` does not name."""
    if isinstance(received, Section):
        parts = () if own is None else (part for part in sections_of(own) if type(part) is type(received))
        named = [setting for part in parts for setting in code_settings(part)]
        yield from (setting for setting in code_settings(received) if setting not in named)
    if own is not None and any(key.endswith(_TRUSTS_MODELS) for key, _ in code_settings(own)):
        directories = _directories(own)
        for key, path in _paths(received):
            if not any(_absolute(path).is_relative_to(directory) for directory in directories):
                yield key, str(path)


def _paths(received: Section | Path) -> Iterator[tuple[str, Path]]:
    """Yield the directories of models with their keys."""
    if isinstance(received, Path):
        yield "directory", received
        return
    for part in sections_of(received):
        yield from ((name, Path(path)) for name in _MODEL_FIELDS if isinstance(path := getattr(part, name, None), str))


def _directories(config: Experiment) -> list[Path]:
    """Return the run directory, and the directories that a configuration names."""
    sections = (section for section in sections_of(config) if section is not config)
    values = (getattr(section, name, None) for section in sections for name in _DIRECTORY_FIELDS)
    named = (_absolute(value) for value in values if value and isinstance(value, str))
    return [_absolute(RunDirectory.from_config(config).path), _absolute(config.resume), *named]


def _absolute(path: Path | str) -> Path:
    """Return a path without `..`, by which it would leave a directory."""
    return Path(os.path.abspath(path))
