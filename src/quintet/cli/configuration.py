"""Configuration of a command: composed, and checked or inspected, in any dialect."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from quintet.cli.config_source import NATIVE, ConfigSource, read_config_source
from quintet.cli.messages import warn
from quintet.config.checks.code_settings import run_code_problems
from quintet.config.checks.models import model_problems
from quintet.config.checks.processes import planned_rank
from quintet.config.checks.unsupported import refuse_unsupported, run_problems, with_torchrun_devices
from quintet.config.compose import load_experiment, unread_remarks
from quintet.config.composed import ComposedConfig, config_value, with_values
from quintet.config.dialects.dialect import UnknownKeyPolicy
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dotted import flatten
from quintet.config.key_states import KeyState, describe_counts, key_states
from quintet.config.model_locations.locations import local_directory
from quintet.config.native.experiment import Experiment
from quintet.config.problems import ConfigProblem, raise_problems
from quintet.contained_files import LINK_HINT, is_contained
from quintet.errors import ConfigError, nearest

if TYPE_CHECKING:
    from quintet.config.dialects.composition.foreign_config import ForeignConfig

LEARNER_DEFAULTS: Mapping[str, object] = {
    "backend": "fsdp2",
    "parallel": {},
    "sharding": {},
    "megatron": None,
    "memory": {},
}
TRAINING_CODE = ("algorithm.advantage", "algorithm.loss")
"""Settings that only training executes."""
EPISODE_CODE = (
    "env",
    "envs",
    "data",
    "reward",
    "rollout.tool_calls",
    "rollout.interactions",
)
"""Settings that only episodes execute."""
DEFAULT_MEMORY_SHARE = 0.5
"""Share of the machine's memory for model and KV cache, if no configuration sets it."""


def generation_settings(model: str, *, has_run: bool) -> dict[str, Any]:
    """Return the settings of commands that only generate with a model in one process: how it was trained does not
    matter. `has_run` tells whether they change the configuration of a run."""
    settings: dict[str, Any] = {"policy.preset": None, "policy.path": model, "resume": "never", "placement": {}}
    settings |= dict.fromkeys(("warm_start", "sft", "evaluation", "generation"))
    for learner in ("actor", "critic", "reference"):
        settings |= {f"{learner}.{key}": value for key, value in LEARNER_DEFAULTS.items()}
    if not has_run:
        return settings | {"rollout.engine_options.memory_share": DEFAULT_MEMORY_SHARE}
    # the directory of a run's policy has what they changed, and a preset's sizes are no settings of a directory
    return settings | {"policy.overrides": {}}


def as_overrides(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings as `KEY=VALUE`."""
    yield from (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items())


@dataclass(frozen=True, slots=True)
class InspectedConfig:
    """A configuration that may contain unsupported values."""

    composed: ComposedConfig
    dialect: str
    unsupported: tuple[ConfigProblem, ...]
    """Unsupported values that the user set."""
    runnable: ComposedConfig
    """The configuration as this machine would run it: without unsupported defaults of the source framework."""
    remarks: tuple[str, ...] = ()
    """Messages about unsupported values of the source framework's defaults, or about unread keys of a native file."""


def load_config(
    config: str | None,
    overrides: list[str],
    dialect: str | None,
    unknown_keys: str,
    *,
    allow_unsupported: bool = False,
    of_run: bool = False,
) -> ComposedConfig:
    """Compose a configuration and print its remarks to stderr, and its dialect if that was detected.

    With `of_run` it is the stored one of a run, of which a command needs a part: no unread key is remarked.

    Raises:
        ConfigError: one message names every problem, with unsupported values unless `allow_unsupported`.
        MachineError: the file is missing or cannot be read.
    """
    unknown, source = _parse_unknown_keys(unknown_keys), read_config_source(config, overrides, dialect)
    if allow_unsupported or source.dialect == NATIVE:
        inspected = _inspect(source, unknown)
        composed, unread = inspected.composed, inspected.remarks
        if not allow_unsupported:
            composed = with_torchrun_devices(composed)
            refuse_unsupported(composed)
    else:
        from quintet.config.dialects.loader import load_config as load_foreign_config

        loaded = load_foreign_config(compose_source(source), DIALECTS[source.dialect], unknown=unknown)
        composed, unread = loaded, ()
    if composed.release:
        print(f"defaults of {composed.release}", file=sys.stderr)
    for remark in (*composed.remarks, *(() if of_run or source.dialect != NATIVE else unread)):
        warn(remark)
    return with_cached_models(composed)


def model_paths(config: Experiment) -> dict[str, str]:
    """Return the models that a run loads, by key."""
    sft, reward = config.sft, config.reward
    has_teacher = sft is not None and sft.distillation is not None
    paths = {
        "policy.path": config.policy.path,
        "policy.tokenizer": config.policy.tokenizer,
        "sft.path": sft.path if sft else None,
        "critic.path": config.critic.path if config.needs_critic else None,
        "reference.path": config.reference.path if config.needs_reference or has_teacher else None,
        "reward.model.path": reward.model.path if reward and reward.model else None,
    }
    for section, judge in reward.judges.items() if reward else ():
        paths[f"reward.{section}.server.path"] = judge.server.path if judge.server else None
    return {key: path for key, path in paths.items() if path}


def with_cached_models(composed: ComposedConfig) -> ComposedConfig:
    """Return the configuration with directories in place of names and GGUF files whose models are in a cache."""
    cached = {key: local_directory(path) for key, path in model_paths(composed.experiment).items()}
    return with_values(composed, {key: directory for key, directory in cached.items() if directory is not None})


def print_key_states(composed: ComposedConfig) -> None:
    """Print how many keys are in each state, and where the run lists them."""
    from quintet.tracking.run_directory import RunDirectory

    if states := key_states(composed):
        print(f"keys: {describe_counts(states)}; see {RunDirectory.from_config(composed.experiment).keys}")


def load_run_config(config: Path | None, overrides: list[str], *, unused: Sequence[str]) -> ComposedConfig:
    """Compose the configuration of a run whose model a command uses, or the defaults. Code that the run names is only
    allowed by the command line; settings below the `unused` keys do not matter, and get their defaults.

    Raises:
        ConfigError: see `load_config`; or the run's configuration runs code.
        MachineError: the file is missing or cannot be read.
    """
    composed = load_config(None if config is None else str(config), overrides, NATIVE, "refuse", of_run=True)
    composed = with_defaults(composed, unused)
    if config is not None:
        raise_problems(run_code_problems(composed))
        raise_problems(_link_problems(composed, config.parent))
    return composed


def _link_problems(composed: ComposedConfig, run: Path) -> Iterator[ConfigProblem]:
    """Yield the settings that name a link in the run directory which leads out of it."""
    inside = f"{os.path.abspath(run)}{os.sep}"
    for key, value in flatten(composed.experiment.model_dump(mode="json")).items():
        for path in value if isinstance(value, list) else (value,):
            if isinstance(path, str) and os.path.abspath(path).startswith(inside) and not is_contained(run, Path(path)):
                yield composed.problem(key, f"it is a link out of the run directory; {LINK_HINT}")


def with_defaults(composed: ComposedConfig, keys: Sequence[str]) -> ComposedConfig:
    """Return the configuration with the defaults of keys that do not matter to a command."""
    defaults = Experiment()
    return with_values(composed, {key: config_value(defaults, key) for key in keys})


def inspect_config(config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str) -> InspectedConfig:
    """Compose a configuration and list its unsupported values.

    Raises:
        ConfigError: one message names every invalid key; or the dialect is unknown.
        MachineError: the file is missing or cannot be read.
    """
    inspected = _inspect(read_config_source(config, overrides, dialect), _parse_unknown_keys(unknown_keys))
    return replace(inspected, unsupported=(*inspected.unsupported, *model_problems(inspected.composed)))


def reread_config(config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str) -> ComposedConfig:
    """Compose a configuration again with other overrides, without messages.

    Raises:
        ConfigError: one message names every invalid key.
    """
    return reinspect_config(config, overrides, dialect, unknown_keys).composed


def reinspect_config(
    config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str
) -> InspectedConfig:
    """Inspect a configuration again with other overrides, without messages; raises as `reread_config` does."""
    source = read_config_source(config, overrides, dialect, quiet=True)
    inspected = _inspect(source, _parse_unknown_keys(unknown_keys))
    return replace(inspected, unsupported=(*inspected.unsupported, *model_problems(inspected.composed)))


def states_of_run(config: str | None, overrides: list[str], dialect: str | None) -> tuple[KeyState, ...]:
    """Return the state of each key that a configuration sets, without messages.

    Raises:
        ConfigError: one message names every invalid key.
    """
    inspected = _inspect(read_config_source(config, overrides, dialect, quiet=True), "refuse")
    return key_states(inspected.runnable, (*inspected.unsupported, *model_problems(inspected.composed)))


def _inspect(source: ConfigSource, unknown: UnknownKeyPolicy) -> InspectedConfig:
    if source.dialect == NATIVE:
        path = None if source.path is None else str(source.path)
        native = load_experiment(path, source.overrides, source.override_sources)
        native_problems = run_problems(native, planned_rank(native.experiment))
        return InspectedConfig(native, NATIVE, tuple(native_problems), native, tuple(unread_remarks(native)))
    from quintet.config.dialects.loader import conversion_problems, convert, runnable

    foreign = convert(compose_source(source), DIALECTS[source.dialect], unknown=unknown, to_plan=True)
    problems = conversion_problems(foreign, planned_rank(foreign.composed.experiment))
    return InspectedConfig(foreign.composed, source.dialect, tuple(problems), runnable(foreign), foreign.remarks)


def compose_source(source: ConfigSource) -> ForeignConfig:
    """Compose the configuration of another framework."""
    from quintet.config.dialects.composition.foreign_config import compose_config

    return compose_config(
        source.path,
        source.overrides,
        source.override_sources,
        source.environment,
        evidence=source.evidence,
        is_frameworks_file=source.is_frameworks_file,
        trainer_files=source.trainer_files,
    )


def _parse_unknown_keys(word: str) -> UnknownKeyPolicy:
    valid = get_args(UnknownKeyPolicy)
    if word not in valid:
        close = nearest(word, valid)
        hint = (f"did you mean {close}? " if close else "") + f"valid: {', '.join(valid)}"
        raise ConfigError(f"--unknown-keys {word}: unknown value", key="--unknown-keys", value=word, hint=hint)
    return cast("UnknownKeyPolicy", word)
