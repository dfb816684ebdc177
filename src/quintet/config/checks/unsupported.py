"""Values that this version, or the engine or backend of the run, does not support."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quintet.config.capabilities import Capability, Requires
from quintet.config.checks.backends import backend_problems
from quintet.config.checks.channels import channel_problems
from quintet.config.checks.chunk_algorithms import chunk_algorithm_problems
from quintet.config.checks.distillation import distillation_problems
from quintet.config.checks.engines import engine_problems, executor_problems
from quintet.config.checks.env_hosts import env_host_problems
from quintet.config.checks.judges import judge_problems
from quintet.config.checks.overlap import overlap_problems, sharded_reward_problems
from quintet.config.checks.processes import (
    COUNTS,
    devices_to_set,
    placement_keys_satisfied_by_processes,
    process_problems,
    ray_command,
    torchrun_command,
)
from quintet.config.checks.processes_per_device import processes_per_device_problems
from quintet.config.checks.profiles import profile_problems
from quintet.config.checks.robots import robot_problems
from quintet.config.checks.sharding import sharding_problems
from quintet.config.checks.svg_scores import svg_problems
from quintet.config.checks.tools import tool_problems
from quintet.config.checks.videos import video_problems
from quintet.config.checks.vision import vision_problems
from quintet.config.composed import ComposedConfig, config_value, with_value
from quintet.config.dotted import flatten
from quintet.config.native.experiment import Experiment
from quintet.config.native.section import Section
from quintet.config.plan.weight_transfer import weight_transfer_problems
from quintet.config.problems import ConfigProblem, raise_problems, source_of
from quintet.config.schema import format_value
from quintet.config.torchrun import RankInfo, current_rank


@dataclass(frozen=True, slots=True)
class UnsupportedValue:
    """A native key with a value that requires a missing capability."""

    key: str
    value: Any
    capability: Capability
    default: Any


def unsupported_values(section: Section, prefix: str = "") -> Iterator[UnsupportedValue]:
    """Yield the unsupported values in the order of the schema; an unsupported section counts once."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        default = field.get_default(call_default_factory=True)
        requires = next((mark for mark in field.metadata if isinstance(mark, Requires)), None)
        if isinstance(value, Section) and value.requires is not None:
            yield UnsupportedValue(key, value.model_dump(mode="json"), value.requires.capability, _plain(default))
        elif requires is not None and value != default and requires.applies_to(value):
            yield UnsupportedValue(key, _plain(value), requires.capability, _plain(default))
        elif isinstance(value, Section):
            yield from unsupported_values(value, f"{key}.")
        elif isinstance(value, dict):
            for entry, part in value.items():
                yield from unsupported_values(part, f"{key}.{entry}.") if isinstance(part, Section) else ()


def unsupported_value_problems(composed: ComposedConfig, rank: RankInfo) -> Iterator[ConfigProblem]:
    """Yield the values that require a missing capability, or more processes than were started."""
    met = placement_keys_satisfied_by_processes(composed.experiment, rank)
    for unsupported in unsupported_values(composed.experiment):
        if unsupported.key not in met:
            yield _problem(composed, unsupported)


CHECKS: tuple[Callable[[ComposedConfig], Iterator[ConfigProblem]], ...] = (
    executor_problems,
    backend_problems,
    sharding_problems,
    overlap_problems,
    channel_problems,
    sharded_reward_problems,
    judge_problems,
    distillation_problems,
    processes_per_device_problems,
    chunk_algorithm_problems,
    env_host_problems,
    weight_transfer_problems,
    vision_problems,
    svg_problems,
    tool_problems,
    video_problems,
    profile_problems,
    robot_problems,
)
"""Checks of a combination of values, for every configuration format."""


def run_problems(
    composed: ComposedConfig, rank: RankInfo | None = None, refused_keys: Container[str] = ()
) -> Iterator[ConfigProblem]:
    """Yield everything that the run asks for and that cannot be done, in any configuration format.

    `rank` is by default the rank of this process. Values of `refused_keys` are not refused again: the conversion of a
    framework's configuration refuses them by the framework's keys.
    """
    rank = rank or current_rank()
    for problem in (*unsupported_value_problems(composed, rank), *engine_problems(composed)):
        if problem.key not in refused_keys:
            yield problem
    for check in CHECKS:
        yield from check(composed)
    yield from process_problems(composed, rank)


def _problem(composed: ComposedConfig, unsupported: UnsupportedValue) -> ConfigProblem:
    key = unsupported.key
    value = unsupported.value
    source = _source(unsupported, composed)
    shown = value.get("name", value) if isinstance(value, dict) else value
    message = f"{key} = {format_value(shown)} ({source}) {unsupported.capability.refusal()}"
    hint = f"leave it out, or {key}={_format_default(unsupported.default)}"
    if key in COUNTS and (command := torchrun_command(composed.experiment)):
        hint += f", or start it with `{command}` or `{ray_command(composed.experiment)}`"
    return ConfigProblem(key, value, source, message, hint, capability=unsupported.capability)


def with_torchrun_devices(composed: ComposedConfig) -> ComposedConfig:
    """Return the configuration with as many devices as torchrun started processes, unless device keys are set."""
    rank, provenance = current_rank(), dict(composed.provenance)
    config = composed.experiment
    for key, count in devices_to_set(config, rank, partial(_is_set, config)):
        config, provenance[key] = with_value(config, key, count), "torchrun"
    return replace(composed, experiment=config, provenance=provenance)


def _is_set(config: Experiment, key: str) -> bool:
    """Return whether a key was given, even with its default."""
    parent, _, name = key.rpartition(".")
    section = config_value(config, parent)
    return isinstance(section, Section) and name in section.model_fields_set


def _source(unsupported: UnsupportedValue, composed: ComposedConfig) -> str:
    """Return the source of a value; of a section, that of its first key that was set."""
    key, value = unsupported.key, unsupported.value
    keys = [key, *(f"{key}.{name}" for name in flatten(value))] if isinstance(value, dict) else []
    sources = (composed.provenance.get(name, "default") for name in keys)
    return next((source for source in sources if source != "default"), source_of(key, composed.provenance))


def refuse_unsupported(composed: ComposedConfig) -> None:
    """Check that this version can do everything that the run asks for.

    Raises:
        ConfigError: one message names every unsupported key.
    """
    raise_problems(run_problems(composed))


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, Section) else value


def _format_default(value: Any) -> str:
    return f"{{name: {value['name']}}}" if isinstance(value, dict) and "name" in value else format_value(value)
