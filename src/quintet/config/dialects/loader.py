"""Loading of a foreign configuration: checks, conversion to a native `Experiment`, and problems that prevent a run."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from quintet.config.capabilities import Capability
from quintet.config.checks.backends import megatron_option_problems
from quintet.config.checks.processes import (
    devices_to_set,
    launch_command,
    placement_keys_satisfied_by_processes,
    planned_rank,
)
from quintet.config.checks.unsupported import UnsupportedValue, run_problems, unsupported_values
from quintet.config.composed import ComposedConfig, with_values
from quintet.config.dialects.aliases import resolve_aliases
from quintet.config.dialects.composition.foreign_config import ForeignConfig
from quintet.config.dialects.conversion import Adjustments, ForeignValues, NativeBuilder, converter_of
from quintet.config.dialects.dialect import Dialect, UnknownKeyPolicy
from quintet.config.dialects.engine_choice import ENGINE, adjust_engine
from quintet.config.dialects.foreign_hints import foreign_problems, translate_hint
from quintet.config.dialects.fork_values import fork_value_problems, without_fork_values
from quintet.config.dialects.key_checks import (
    illegal_values,
    ineffective_keys,
    unsupported_defaults,
    unsupported_keys,
)
from quintet.config.dialects.passthrough import model_config_problems, unchecked_model_sections
from quintet.config.dialects.release_choice import choose_release
from quintet.config.dialects.settings import ForeignSettings
from quintet.config.dialects.unknown_keys import sort_keys, unknown_keys
from quintet.config.dotted import flatten, get_value, sections_around, set_value
from quintet.config.native.experiment import Experiment
from quintet.config.native.megatron import MegatronConfig
from quintet.config.plan.batch_arithmetic import compute_batch_arithmetic
from quintet.config.problems import ConfigProblem, describe_setting, raise_problems, source_of
from quintet.config.schema import format_value
from quintet.config.torchrun import RankInfo, current_rank


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
    refused_keys: frozenset[str]
    """Native keys that follow from settings in `unsupported`."""


def load_config(config: ForeignConfig, dialect: Dialect, *, unknown: UnknownKeyPolicy = "refuse") -> ComposedConfig:
    """Check and convert a configuration for a run on this machine.

    The remarks name keys that were ignored and defaults that were replaced.

    Raises:
        ConfigError: all problems and unsupported settings in one message, by their foreign keys.
        MachineError: a file is missing or cannot be read.
    """
    result = convert(config, dialect, unknown=unknown, to_run=True)
    raise_problems(conversion_problems(result, current_rank()))
    tree = result.composed.experiment.model_dump()
    for key, value in result.replaced_defaults.items():
        set_value(tree, key, value)
    experiment = Experiment.model_validate(tree)
    provenance = dict(result.composed.provenance) | dict.fromkeys(result.replaced_defaults, "this version")
    remarks = (*result.composed.remarks, *result.remarks)
    ready = replace(result.composed, experiment=experiment, provenance=provenance, remarks=remarks)
    compute_batch_arithmetic(ready)
    return ready


def conversion_problems(result: ConversionResult, rank: RankInfo) -> tuple[ConfigProblem, ...]:
    """Return everything that the run asks for and that cannot be done with the processes that `rank` describes."""
    return (*result.unsupported, *run_problems(runnable(result), rank, result.refused_keys))


def runnable(result: ConversionResult) -> ComposedConfig:
    """Return the configuration with unsupported defaults replaced."""
    return with_values(result.composed, result.replaced_defaults)


def convert(
    config: ForeignConfig,
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
    values, alias_remarks = merge_with_reference(config, dialect)
    keys = sort_keys(values, unknown_keys(values, dialect, config), unknown)
    illegal = [*illegal_values(values)]
    of_fork = {each.key: each for each in fork_value_problems(values, illegal, config.evidence.checkout)}
    waiting = (*keys.waiting.values(), *of_fork.values())
    wrong = [
        *(ConfigProblem(key.key, None, key.source, f"unknown key {key}") for key in keys.refused),
        *(problem for problem in illegal if problem.key not in of_fork),
        *model_config_problems(values),
    ]
    raise_problems([*wrong, *((*unsupported_keys(values), *waiting) if to_run and wrong else ())])
    if of_fork:
        values = without_fork_values(values, of_fork)
    native = _to_native(values)
    sources = dict(native.provenance())
    try:
        experiment = Experiment.model_validate(native.tree)
    except ValidationError as error:
        raise_problems(foreign_problems(error, native))
        raise
    remarks = (
        *_misfit_remarks(config),
        *alias_remarks,
        *keys.remarks(),
        *ineffective_keys(values),
        *native.remarks,
        *unchecked_model_sections(values),
    )
    provenance = {key: source_of(key, sources) for key in flatten(experiment.model_dump())}
    release = str(values.dialect.release or "")
    composed = ComposedConfig(experiment, provenance, remarks, release, partial(translate_hint, experiment, native))
    result = _adjust(composed, native, to_plan=to_plan)
    settings = ForeignSettings(
        native,
        [key.key for key in keys.left_out],
        experiment.rollout.engine,
        result.replaced_defaults.get(ENGINE, experiment.rollout.engine),
    )
    with_settings = replace(composed, settings=settings.all())
    return replace(result, composed=with_settings, unsupported=(*result.unsupported, *waiting))


def merge_with_reference(config: ForeignConfig, dialect: Dialect) -> tuple[ForeignValues, tuple[str, ...]]:
    """Merge a configuration, with documented names, onto the defaults of the references that apply to it.

    Return a remark for each alias, too.
    """
    for source, sections in dialect.sections_of_files(config.plain()).items():
        config = config.with_sections(sections, source)
    as_written, newer = config, dialect.newer_values(config.plain())
    newer_remarks = tuple(_describe_newer_values(config, newer))
    config = config.with_values(newer)
    narrowed = dialect.narrowed(config.plain())
    release = choose_release(narrowed, config.plain(), as_written.leaves(), as_written.evidence)
    if release is not None:
        narrowed = narrowed.of_release(release)
        config = config.without_defaults(release.table, narrowed.specs(), narrowed.run_defaults)
    of_release = () if release is None else release.table
    renamed, remarks = resolve_aliases(config, narrowed.specs(), narrowed.shared_sections, of_release)
    remarks += newer_remarks
    read_as: dict[str, tuple[str, ...]] = {}
    for key, (_, origin) in newer.items():
        if key != origin:
            read_as[origin] = (*read_as.get(origin, ()), key)
    merged = renamed.merge_onto(narrowed.default_tree())
    written = {renamed.aliases.get(key, key): source for key, source in merged.sources.items()}
    above = {section for key in config.sources for section in sections_around(key)}
    dropped = {key: source for key, source in config.sources.items() if key not in written and key not in above}
    return ForeignValues(merged, narrowed, read_as, renamed.aliases, dropped), remarks


def _describe_newer_values(config: ForeignConfig, newer: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    """Yield a remark for each key whose value is read as that of keys of a newer release."""
    for origin in dict.fromkeys(origin for _, origin in newer.values()):
        values = {key: value for key, (value, source) in newer.items() if source == origin}
        read = (key if "${" in str(value) else f"{key} = {format_value(value)}" for key, value in values.items())
        setting = describe_setting(origin, get_value(config.plain(), origin), config.sources[origin])
        yield f"{setting} is read as {' and '.join(read)}"


def _misfit_remarks(config: ForeignConfig) -> Iterator[str]:
    if config.misfits:
        problem = "Hydra refuses to set keys that the trainer's file in the checkout lacks, or to add those that it has"
        yield f"{problem}: {', '.join(config.misfits)}; `++` in front of them does both"


def _to_native(values: ForeignValues) -> NativeBuilder:
    converter = converter_of(values.dialect)
    raise_problems(converter.conflicts(values))
    native = NativeBuilder(values)
    converter.to_native(values, native)
    _replace_path_in_name(native)
    return native


def _replace_path_in_name(native: NativeBuilder) -> None:
    """Replace what a name of a run may have in the frameworks, and not here, such as slashes."""
    name = str(native.get("name"))
    replaced = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")
    if replaced != name and replaced and (origins := native.origins_of("name")):
        native.set("name", replaced, *origins)
        native.remarks.append(f"{native.values.describe(*origins)}: the name of the run is {replaced}")


def _adjust(composed: ComposedConfig, native: NativeBuilder, *, to_plan: bool) -> ConversionResult:
    """Collect unsupported settings of the user, by their foreign keys, and replacements for unsupported defaults."""
    experiment = composed.experiment
    rank = planned_rank(experiment) if to_plan else current_rank()
    dialect = native.values.dialect
    adjustments = Adjustments()
    ready = placement_keys_satisfied_by_processes(experiment, rank)
    adjustments.problems.update(native.unsupported)
    for problem in unsupported_keys(native.values):
        if not _is_ready(problem.key, dialect, ready):
            adjustments.problems[problem.key] = _with_torchrun_hint(problem, experiment, dialect)
    for unsupported in unsupported_values(experiment):
        if unsupported.key not in ready:
            _adjust_unsupported(unsupported, native, adjustments)
    for key, value in devices_to_set(experiment, rank, native.is_set_by_user):
        adjustments.replace(key, value, f"{key} is not set: using {value}, the number of started processes")
    adjust_engine(experiment, native, adjustments, rank.local_size if to_plan else 0)
    for problem in megatron_option_problems(with_values(composed, adjustments.replaced)):
        if native.origins_of(problem.key) and not native.is_set_by_user(problem.key):
            default = MegatronConfig.model_fields[problem.key.rpartition(".")[2]].default
            adjustments.replace(problem.key, default, f"default ignored: {problem.message}")
    converted = {origin for origins in native.origins.values() for origin in origins}
    unused = (remark for key, remark in unsupported_defaults(native.values) if key not in converted)
    remarks = dict.fromkeys([*adjustments.remarks, *(f"default: {remark}" for remark in unused)])
    problems = adjustments.problems
    refused_keys = frozenset(key for key, origins in native.origins.items() if any(map(problems.__contains__, origins)))
    return ConversionResult(
        composed, tuple(problems.values()), adjustments.replaced, tuple(remarks), refused_keys | problems.keys()
    )


def _with_torchrun_hint(problem: ConfigProblem, experiment: Experiment, dialect: Dialect) -> ConfigProblem:
    """Add the torchrun command if the setting would be supported with one process per device."""
    planned = planned_rank(experiment)
    ready = placement_keys_satisfied_by_processes(experiment, planned)
    if current_rank().size > 1 or not _is_ready(problem.key, dialect, ready):
        return problem
    hints = [problem.hint, f"start it with {launch_command(experiment, planned.size)}"]
    return replace(problem, remedy="; or ".join(filter(None, hints)))


def _is_ready(key: str, dialect: Dialect, ready: Collection[str]) -> bool:
    """Whether a foreign key only needs processes, and the started ranks are what its native keys of the placement ask
    for; the size of an engine, which ROLL sets together with its devices, needs no further ones."""
    spec = dialect.spec(key)
    if spec is None or spec.requires is not Capability.PROCESSES:
        return False
    placed = {name for name in spec.native if name.startswith("placement.")}
    return bool(placed) and placed <= set(ready)


def _adjust_unsupported(unsupported: UnsupportedValue, native: NativeBuilder, adjustments: Adjustments) -> None:
    """Note a problem if the user set the value or it follows from no foreign key, otherwise replace it."""
    origins = native.origins_of(unsupported.key)
    set_by_user = [origin for origin in origins if native.values.is_set(origin)]
    if origins and not set_by_user:
        default = f"{native.values.dialect.name}'s default {native.describe_origins(unsupported.key)}"
        remark = f"{default} {unsupported.capability.refusal()}: ignored"
        adjustments.replace(unsupported.key, unsupported.default, remark)
    elif not any(origin in adjustments.problems for origin in set_by_user):
        adjustments.problems[unsupported.key] = _unsupported_problem(unsupported, set_by_user, native.values)


def _unsupported_problem(value: UnsupportedValue, origins: Sequence[str], values: ForeignValues) -> ConfigProblem:
    """Describe an unsupported native value by the foreign keys from which it follows."""
    if not origins:
        setting = f"{value.key} = {format_value(value.value)}, which this configuration implies,"
        message = f"{setting} {value.capability.refusal()}"
        return ConfigProblem(value.key, value.value, "this dialect", message, capability=value.capability)
    first, settings = origins[0], ", ".join(map(values.describe, origins))
    message = f"{settings} {value.capability.refusal(plural=len(origins) > 1)}"
    return ConfigProblem(first, values[first], values.source(first), message, capability=value.capability)
