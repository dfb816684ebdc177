"""Verifiers of rows by their `data_source`, with the names of verl, RLinf and ROLL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from quintet.config.native.data import RewardConfig
from quintet.config.native.registry_union import validate_options
from quintet.errors import ConfigError, did_you_mean
from quintet.package_files import read_yaml
from quintet.registry import Entry
from quintet.rewards.score import Score
from quintet.rewards.verifier_process import ProcessKind
from quintet.rewards.verifiers.registry import VERIFIERS

SOURCES: Mapping[str, str] = read_yaml(__file__)
"""Verifier by data source; `*` matches any text."""

BUILT_IN = "quintet.rewards.verifiers."
UNCONFINED = frozenset({"code", "code_sandbox"})
"""Built-in verifiers that start processes."""
GYM = "reasoning_gym/"
KIND_KEY = "reward.kind"


@dataclass(frozen=True, slots=True)
class Route:
    """Verifier with its process kind and options, and extra fields besides the row's."""

    verifier: str
    process_kind: ProcessKind
    options: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


def route(source: str, config: RewardConfig) -> Route:
    """Return the verifier for rows of a source: its entry in `reward.verifiers`, or `reward.kind`.

    Raises:
        ConfigError: the source or verifier is unknown, its options are invalid, or a required package is missing.
    """
    verifier, key = config.verifiers.get(source), KIND_KEY
    kind = config.kind
    options, options_key = config.function_arguments, "reward.function_arguments"
    if verifier is not None:
        section = f"reward.verifiers.{source}"
        kind, key = verifier.kind, f"{section}.kind"
        options, options_key = verifier.arguments, f"{section}.arguments"
    name = _verifier_name(source) if kind == "rules" else kind
    entry = _entry(name, key) if kind != "rules" else VERIFIERS.get(name)
    check_options(entry, options, options_key)
    entry.load()
    extra = {"generator": source.removeprefix(GYM)} if source.startswith(GYM) else {}
    return Route(name, _process_kind(entry), options, extra)


def check_options(entry: Entry[Score], options: Mapping[str, Any], key: str) -> None:
    """Raise `ConfigError` if a verifier does not have these options; `key` names them."""
    if entry.config is not None:
        validate_options(entry.config, dict(options), key)
    elif options:
        message = f"{key} = {dict(options)!r}: the verifier {entry.name!r} has no options"
        raise ConfigError(message, key=key, value=dict(options), hint="leave it out")


def _entry(name: str, key: str) -> Entry[Score]:
    try:
        return VERIFIERS.get(name)
    except ConfigError as error:
        names = ["rules", *(entry.name for entry in VERIFIERS)]
        hint = f"{did_you_mean(name, names)} known: {', '.join(names)}".lstrip()
        raise ConfigError(f"{key} = {name!r}: {error.message}", key=key, value=name, hint=hint) from error


def _verifier_name(source: str) -> str:
    if source in SOURCES:
        return SOURCES[source]
    for pattern, name in SOURCES.items():
        if "*" in pattern and fnmatchcase(source, pattern):
            return name
    raise _unknown(source)


def _unknown(source: str) -> ConfigError:
    names = ", ".join(entry.name for entry in VERIFIERS)
    alternatives = f"set a verifier for all rows, reward.kind ({names}), or your own reward.function (file.py:function)"
    if not source:
        message = f"rows have no data_source to choose a verifier by, and {KIND_KEY} = 'rules'"
        return ConfigError(message, key=KIND_KEY, value="rules", hint=alternatives)
    similar = did_you_mean(source, SOURCES)
    hint = f"{similar} else {alternatives}" if similar else alternatives
    return ConfigError(f"no verifier is known for data_source {source!r}", key="data_source", value=source, hint=hint)


def _process_kind(entry: Entry[Score]) -> ProcessKind:
    """Run built-in verifiers in confined processes, with their large imports done before forking."""
    module = entry.target.partition(":")[0] if isinstance(entry.target, str) else ""
    is_built_in = module.startswith(BUILT_IN)
    modules = (module,) if is_built_in and entry.requires else ()
    return ProcessKind(is_built_in and entry.name not in UNCONFINED, modules)
