"""A validated experiment with the source of each value."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quintet.config.dotted import is_inside
from quintet.config.native.experiment import Experiment
from quintet.config.problems import ConfigProblem, describe_setting, source_of
from quintet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """A key that the user set, in the format of the user."""

    key: str
    value: Any
    source: str
    native: tuple[str, ...] = ()
    """Native keys that follow from it."""
    written_as: str | None = None
    """Name of the key that the user wrote, if it is another one."""
    no_effect: str | None = None
    """Why nothing follows from it."""
    substitute: str | None = None
    """What Quintet has in place of what the value names, and what differs."""

    @property
    def name(self) -> str:
        """Name of the key that the user wrote."""
        return self.written_as or self.key


IN_NATIVE_FORMAT = "in the native format"
"""Begins a hint that has no counterpart in the format of the user."""


@dataclass(frozen=True, slots=True)
class ComposedConfig:
    """A validated experiment with the source of each value."""

    experiment: Experiment
    provenance: Mapping[str, str]
    """Source of each dotted key: `file.yaml:12`, `command line` or `default`."""
    remarks: tuple[str, ...] = ()
    """Messages about deprecated keys, keys without effect, and differences from the source framework."""
    release: str = ""
    """Release of the source framework whose defaults apply, and why; empty for a native configuration."""
    translate_hint: Callable[[str], str | None] = str
    """Translates a hint from native keys to those of the framework whose format the user wrote; None if it has none."""
    settings: tuple[Setting, ...] = ()
    """Every key that the user set."""

    def hint_for_user(self, hint: str) -> str:
        """Return a hint in the format of the user, otherwise how to follow it in the native format."""
        return self.translate_hint(hint) or f"{IN_NATIVE_FORMAT} (`quintet translate CONFIG -o FILE`): {hint}"

    def value(self, key: str) -> Any:
        """Return the value of a dotted key, None if a section on the way is null."""
        return config_value(self.experiment, key)

    def source(self, key: str) -> str:
        """Return the source of a value; for a foreign configuration, the foreign key it was converted from."""
        return source_of(key, self.provenance)

    def describe(self, key: str) -> str:
        """Return `key = value (source)` for a message."""
        return describe_setting(key, self.value(key), self.source(key))

    def problem(self, key: str, problem: str, hint: str | None = None) -> ConfigProblem:
        """Return a problem whose message names key, value and source.

        The hint has native keys. Alternatives in it are separated by ", or ", and each sets keys by `KEY=VALUE`.
        """
        message = f"{self.describe(key)}: {problem}"
        remedy = hint and partial(self.hint_for_user, hint)
        return ConfigProblem(key, self.value(key), self.source(key), message, remedy)

    def with_source(self, error: ConfigError) -> ConfigError:
        """Return an error of a running program with the source of its key, and with its hint in the format of the user.

        An error that has a source, or whose key is none of the configuration, is returned as it is.
        """
        section = error.key
        if error.source is not None or section is None or not any(is_inside(key, section) for key in self.provenance):
            return error
        named = re.search(rf"{re.escape(section)}(?:\.\w+)*", error.message)
        source = self.source(named[0] if named else section)
        message = f"{error.message} ({source})" if named else f"{self.describe(section)}: {error.message}"
        hint = error.hint and self.hint_for_user(error.hint)
        return ConfigError(message, key=section, value=error.value, source=source, hint=hint)


@contextmanager
def errors_with_sources(composed: ComposedConfig) -> Iterator[None]:
    """Name the sources of keys in errors, see `ComposedConfig.with_source`.

    Raises:
        ConfigError: that of the block.
    """
    try:
        yield
    except ConfigError as error:
        raise composed.with_source(error) from None


def config_value(experiment: Experiment, key: str) -> Any:
    """Return the value of a dotted key, None if a section on the way is null."""
    node: Any = experiment
    for part in key.split("."):
        if node is not None:
            node = node[part] if isinstance(node, Mapping) else getattr(node, part)
    return node


def with_value(experiment: Experiment, key: str, value: object) -> Experiment:
    """Return a copy of the experiment with another value for one key, without validation."""
    changed: Experiment = _replace(experiment, key.split("."), value)
    return changed


def with_values(composed: ComposedConfig, values: Mapping[str, object]) -> ComposedConfig:
    """Return the configuration with other values, by dotted key, without validation."""
    experiment = composed.experiment
    for key, value in values.items():
        experiment = with_value(experiment, key, value)
    return replace(composed, experiment=experiment)


def _replace(section: Any, parts: list[str], value: object) -> Any:
    name, *rest = parts
    return section.model_copy(update={name: _replace(getattr(section, name), rest, value) if rest else value})
