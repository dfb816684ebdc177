"""Content of a run script: overrides of a framework's trainer, and what the script leaves open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quintet.config.dialects.scripts.override_list import key_of
from quintet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MissingValue:
    """An override whose value the script does not determine."""

    key: str
    source: str
    reason: str
    variable: str = ""
    """Variable of the environment that determines it."""
    of_fork: str = ""
    """For a key that the framework lacks: the override with the text of the script in place of what is not known."""

    def __str__(self) -> str:
        return f"{self.key} ({self.source}): {self.reason}"


@dataclass(frozen=True, slots=True)
class RunScript:
    """Content of a run script, a list of overrides, or a YAML file: a configuration file and overrides of it."""

    config: Path | None
    words: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    """Source of each override."""
    dialect: str | None = None
    missing: tuple[MissingValue, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script exports, for `${oc.env:…}`."""
    remarks: tuple[str, ...] = ()
    variables: frozenset[str] = frozenset()
    """Names of the variables that the script reads."""
    conditions: tuple[str, ...] = ()
    """What is assumed where it is not known whether the script trains."""
    takes_arguments: bool = False
    """Whether it is a script, which positional arguments can be passed to."""
    module: str = ""
    """Module of the trainer that it starts."""
    is_frameworks_file: bool = False
    """Whether the configuration file is the framework's own, in a checkout."""
    trainer_files: tuple[Path, ...] = ()
    """Files that the trainer has in the checkout around the script."""
    checkout: Path | None = None
    """Directory with the trainer's package in the checkout around the script."""

    def with_fork_values(self, overrides: Sequence[str]) -> RunScript:
        """Return the script with texts for unknown values of keys of a fork, from which no plan follows; those that the
        command line sets are left out."""
        overridden = set(map(key_of, overrides))
        texts = [value for value in self.missing if value.of_fork and value.key not in overridden]
        remarks = [f"{value}; its text is taken, since only a fork can have the key" for value in texts]
        return replace(
            self,
            words=(*self.words, *(value.of_fork for value in texts)),
            places=(*self.places, *(value.source for value in texts)),
            missing=tuple(value for value in self.missing if not value.of_fork),
            remarks=(*self.remarks, *remarks),
        )

    def with_overrides(self, overrides: Sequence[str]) -> list[str]:
        """Return the script's overrides and then those of the command line.

        Raises:
            ConfigError: the value of a key is unknown, and the command line does not set it; or an override sets a
                variable of the script.
        """
        for override in overrides:
            if (name := key_of(override)) in self.variables:
                message = f"{name} (command line) is no key, but an environment variable that the script reads"
                hint = f"write it before the command: {override} quintet plan …"
                raise ConfigError(message, key=name, value=override, source="command line", hint=hint)
        overridden = set(map(key_of, overrides))
        missing = [value for value in self.missing if value.key not in overridden]
        if missing:
            first = missing[0]
            hint = f"set it on the command line: {' '.join(f'{value.key}=…' for value in missing)}"
            if variables := dict.fromkeys(value.variable for value in missing if value.variable):
                path = first.source.rpartition(":")[0]
                hint += f"; or in the environment: {' '.join(f'{name}=…' for name in variables)} quintet plan {path}"
            raise ConfigError("\n".join(map(str, missing)), key=first.key, source=first.source, hint=hint)
        return [*self.words, *overrides]
