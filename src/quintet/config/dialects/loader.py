"""Loading of a foreign configuration: checks, conversion to a native `Experiment`, and problems that prevent a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from pydantic import ValidationError

from quintet.config.checks.backends import backend_problems, megatron_option_problems
from quintet.config.checks.processes import (
    devices_to_set,
    launch_command,
    placement_keys_satisfied_by_processes,
    planned_rank,
    process_problems,
)
from quintet.config.checks.sharding import sharding_problems
from quintet.config.checks.unsupported import UnsupportedValue, unsupported_values
from quintet.config.composed import ComposedConfig
from quintet.config.config_values import with_value
from quintet.config.dialects.aliases import resolve_aliases
from quintet.config.dialects.composition.foreign_config import (
    ForeignConfig,
    MergedConfig,
    compose_config,
    reference_values,
)
from quintet.config.dialects.conversion import ForeignValues, NativeBuilder
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.engine_choice import engine_fallback
from quintet.config.dialects.key_checks import (
    illegal_values,
    ineffective_keys,
    unknown_keys,
    unsupported_defaults,
    unsupported_keys,
)
from quintet.config.dialects.known_keys import known_keys
from quintet.config.dialects.passthrough import model_config_problems, unchecked_model_sections
from quintet.config.dotted import flatten
from quintet.config.native.experiment import Experiment
from quintet.config.native.megatron import MegatronConfig
from quintet.config.plan.batch_arithmetic import compute_batch_arithmetic
from quintet.config.problems import ConfigProblem, raise_problems, source_of
from quintet.config.schema import format_value
from quintet.config.torchrun import RankInfo, current_rank
from quintet.config.validation import describe_problems

UnknownKeyPolicy = Literal["refuse", "warn"]


class _Converter(Protocol):
    """Interface of a framework's `converter` module."""

    conflicts: Callable[[ForeignValues], Iterator[ConfigProblem]]
    to_native: Callable[[ForeignValues, NativeBuilder], None]


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """A foreign configuration converted to a native one."""

    composed: ComposedConfig
    """The complete conversion, unsupported values included."""
    unsupported: tuple[ConfigProblem, ...]
    """Settings of the user that this version does not support."""
    replaced_defaults: Mapping[str, Any]
    """Replacements for native values that follow from defaults only and are not supported."""
    remarks: tuple[str, ...]
    """Explanations of the replacements."""


def load_foreign(
    path: Path, overrides: Sequence[str], dialect: Dialect, *, unknown: UnknownKeyPolicy = "refuse"
) -> ComposedConfig:
    """Compose a file and overrides, and load them."""
    return load_config(compose_config(path, overrides), dialect, unknown=unknown)


def load_config(given: ForeignConfig, dialect: Dialect, *, unknown: UnknownKeyPolicy = "refuse") -> ComposedConfig:
    """Check and convert a configuration for a run on this machine.

    The remarks name keys that were ignored and defaults that were replaced.

    Raises:
        ConfigError: all problems and unsupported settings in one message, by their foreign keys.
        MachineError: a file is missing or cannot be read.
    """
    converted = convert(given, dialect, unknown=unknown, to_run=True)
    raise_problems([*conversion_problems(converted), *process_problems(_runnable(converted), current_rank())])
    tree = converted.composed.experiment.model_dump()
    for key, value in converted.replaced_defaults.items():
        _set(tree, key, value)
    experiment = Experiment.model_validate(tree)
    provenance = dict(converted.composed.provenance) | dict.fromkeys(converted.replaced_defaults, "this version")
    ready = ComposedConfig(experiment, provenance, (*converted.composed.remarks, *converted.remarks))
    compute_batch_arithmetic(ready)
    return ready


def conversion_problems(converted: ConversionResult) -> tuple[ConfigProblem, ...]:
    """Return all settings that this version, or its learners on this machine, cannot honour."""
    ready = _runnable(converted)
    return (*converted.unsupported, *backend_problems(ready), *sharding_problems(ready))


def _runnable(converted: ConversionResult) -> ComposedConfig:
    """Return the configuration with unsupported defaults replaced."""
    return replace(converted.composed, experiment=_replaced(converted.composed.experiment, converted.replaced_defaults))


def _replaced(config: Experiment, values: Mapping[str, Any]) -> Experiment:
    for key, value in values.items():
        config = with_value(config, key, value)
    return config


def convert(
    given: ForeignConfig,
    dialect: Dialect,
    *,
    unknown: UnknownKeyPolicy = "refuse",
    to_run: bool = False,
    to_plan: bool = False,
) -> ConversionResult:
    """Check every key and convert the configuration.

    With `to_run`, the error also lists unsupported settings. With `to_plan`, the number of processes is assumed to be
    the one that the configuration needs.

    Raises:
        ConfigError: all problems in one message, by their foreign keys.
    """
    written, narrowed, remarks = merge_with_reference(given, dialect)
    unknown_to_dialect = unknown_keys(written, narrowed, known_keys(dialect.name))
    refused = unknown_to_dialect if unknown == "refuse" else []
    wrong = [
        *(ConfigProblem(key.key, None, key.source, f"unknown key {key}") for key in refused),
        *illegal_values(written, narrowed),
        *model_config_problems(written, narrowed),
    ]
    raise_problems([*wrong, *(unsupported_keys(written, narrowed) if to_run and wrong else ())])
    native = _to_native(written, narrowed)
    sources = dict(native.provenance())
    try:
        experiment = Experiment.model_validate(native.tree)
    except ValidationError as error:
        raise_problems(describe_problems(error, native.tree, sources))
        raise
    ignored = (f"unknown key left out: {key}" for key in unknown_to_dialect)
    all_remarks = (
        *remarks,
        *ignored,
        *ineffective_keys(written, narrowed),
        *native.remarks,
        *unchecked_model_sections(written, narrowed),
    )
    provenance = {key: source_of(key, sources) for key in flatten(experiment.model_dump())}
    composed = ComposedConfig(experiment, provenance, all_remarks)
    rank = planned_rank(experiment) if to_plan else current_rank()
    return _with_unsupported(composed, native, written, narrowed, rank)


def merge_with_reference(given: ForeignConfig, dialect: Dialect) -> tuple[MergedConfig, Dialect, tuple[str, ...]]:
    """Return a configuration with documented names, merged onto the defaults of the references that apply to it; the
    dialect with these references; and a remark for each alias."""
    narrowed = dialect.narrowed(given.plain())
    renamed = resolve_aliases(given, narrowed.specs())
    return renamed.config.merge_onto(reference_values(narrowed)), narrowed, renamed.remarks


def _to_native(written: MergedConfig, dialect: Dialect) -> NativeBuilder:
    converter = cast("_Converter", import_module(f"quintet.config.dialects.{dialect.name}.converter"))
    values = ForeignValues(written, dialect)
    raise_problems(converter.conflicts(values))
    native = NativeBuilder(values)
    converter.to_native(values, native)
    return native


def _with_unsupported(
    composed: ComposedConfig, native: NativeBuilder, written: MergedConfig, dialect: Dialect, rank: RankInfo
) -> ConversionResult:
    """Collect unsupported settings of the user, by their foreign keys, and replacements for unsupported defaults."""
    ready = placement_keys_satisfied_by_processes(composed.experiment, rank)
    pending = (problem for problem in unsupported_keys(written, dialect) if not _is_ready(problem.key, dialect, ready))
    problems = {problem.key: _with_torchrun_hint(problem, composed.experiment, dialect) for problem in pending}
    replaced: dict[str, Any] = {}
    remarks = []
    for unsupported in unsupported_values(composed.experiment):
        if unsupported.key in ready:
            continue
        origins = native.origins_of(unsupported.key)
        set_by_user = [origin for origin in origins if native.values.is_set(origin)]
        if not origins or set_by_user:
            if not any(origin in problems for origin in set_by_user):
                problems[unsupported.key] = _unsupported_problem(unsupported, set_by_user, native.values)
        else:
            replaced[unsupported.key] = unsupported.default
            origin_values = ", ".join(f"{origin} = {format_value(native.values[origin])}" for origin in origins)
            default = f"{dialect.name}'s default {origin_values}"
            remarks.append(f"{default} is not supported yet (requires {unsupported.capability}): ignored")
    for key, value in devices_to_set(composed.experiment, rank, partial(_is_set_by_user, native)):
        replaced[key] = value
        remarks.append(f"{key} is not set: using {value}, the number of started processes")
    engines = engine_fallback(composed.experiment, native)
    problems |= engines.problems
    replaced |= engines.replaced
    remarks += engines.remarks
    for problem in megatron_option_problems(replace(composed, experiment=_replaced(composed.experiment, replaced))):
        origins = native.origins_of(problem.key)
        if origins and not any(map(native.values.is_set, origins)):
            replaced[problem.key] = MegatronConfig.model_fields[problem.key.rpartition(".")[2]].default
            remarks.append(f"default ignored: {problem.message}")
    for remark in unsupported_defaults(written, dialect):
        if not any(remark.split(" = ")[0] in native.origins_of(key) for key in native.origins):
            remarks.append(f"default: {remark}")
    return ConversionResult(composed, tuple(problems.values()), replaced, tuple(dict.fromkeys(remarks)))


def _with_torchrun_hint(problem: ConfigProblem, config: Experiment, dialect: Dialect) -> ConfigProblem:
    """Add the torchrun command if the setting would be supported with one process per device."""
    planned = planned_rank(config)
    if current_rank().size > 1 or not _is_ready(
        problem.key, dialect, placement_keys_satisfied_by_processes(config, planned)
    ):
        return problem
    hints = [problem.hint, f"start it with {launch_command(config, planned.size)}"]
    return replace(problem, hint="; or ".join(filter(None, hints)))


def _is_ready(key: str, dialect: Dialect, ready: Collection[str]) -> bool:
    """Whether the started ranks support all native keys that a foreign key sets."""
    spec = dialect.specs().get(key) or dialect.specs().get(dialect.documented(key))
    return spec is not None and bool(spec.native) and set(spec.native) <= set(ready)


def _is_set_by_user(native: NativeBuilder, key: str) -> bool:
    return any(map(native.values.is_set, native.origins_of(key)))


def _unsupported_problem(value: UnsupportedValue, origins: Sequence[str], values: ForeignValues) -> ConfigProblem:
    """Describe an unsupported native value by the foreign keys from which it follows."""
    if not origins:
        setting = f"{value.key} = {format_value(value.value)}, which this configuration implies,"
        message = f"{setting} is not supported yet: requires {value.capability}"
        return ConfigProblem(value.key, value.value, "this dialect", message)
    first, settings = origins[0], ", ".join(map(values.describe, origins))
    verb = "is" if len(origins) == 1 else "are"
    message = f"{settings} {verb} not supported yet: requires {value.capability}"
    return ConfigProblem(first, values[first], values.source(first), message)


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        tree = tree[section]
    tree[last] = value
