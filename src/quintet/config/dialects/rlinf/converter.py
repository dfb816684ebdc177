"""Conversion of RLinf's YAML files: runs on text, runs on simulators, and files of one simulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, apply_from_native, apply_to_native, loggers
from quintet.config.dialects.rlinf.algorithm import (
    ESTIMATOR,
    algorithm_from_native,
    algorithm_to_native,
    is_embodied,
    text_algorithm_problems,
)
from quintet.config.dialects.rlinf.component_placement import (
    parse_placements,
    placement_from_native,
    placement_to_native,
)
from quintet.config.dialects.rlinf.constraints import embodied_problems, math_problems, shared_problems
from quintet.config.dialects.rlinf.embodied import (
    embodied_from_native,
    embodied_to_native,
    env_file_from_native,
    env_file_to_native,
)
from quintet.config.dialects.rlinf.math import math_from_native, math_to_native
from quintet.config.dialects.supported_runs import require_env, require_no_stages
from quintet.config.native.envs import PromptsConfig, SimulatorConfig
from quintet.config.native.experiment import Experiment
from quintet.config.problems import ConfigProblem

DEFAULT_VALUE_CLIP = 0.2
"""`algorithm.value_clip` in RLinf's own files of embodied runs; its reference does not document it."""
NAME, SHOWN_NAME = "runner.experiment_name", "runner.logger.experiment_name"
OUTPUT_DIR, LOG_DIR = "runner.output_dir", "runner.logger.log_path"
RULES = (
    Derived(
        "tracking.config_dir",
        ("hydra.run.dir", "hydra.output_subdir"),
        lambda directory, inner: None if inner is None else str(PurePath(directory, inner)),
        lambda directory: (str(PurePath(directory).parent), PurePath(directory).name),
        export_none=False,
    ),
    loggers("tracking.loggers", "runner.logger.logger_backends", always=("console", "jsonl")),
)


def _is_env_file(values: ForeignValues) -> bool:
    return [reference.name for reference in values.dialect.references] == ["rlinf_env"]


def conflicts(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems between keys."""
    if _is_env_file(values):
        return
    yield from shared_problems(values)
    if is_embodied(values):
        yield from embodied_problems(values)
    else:
        yield from math_problems(values)
        yield from text_algorithm_problems(values)


def to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert an RLinf configuration; a simulator's own file becomes a run on that simulator."""
    if _is_env_file(values):
        env_file_to_native(values, native)
        return
    native.set("warm_start", None)
    native.set_from_keys(values.dialect.specs().values())
    apply_to_native(RULES, values, native)
    _names_to_native(values, native)
    native.set("validation.before_training", False)
    algorithm_to_native(values, native)
    placement_to_native(parse_placements(values), native)
    if is_embodied(values):
        embodied_to_native(values, native)
    else:
        math_to_native(values, native)
    if values[ESTIMATOR] == "gae" or native.get("algorithm.advantage.needs_critic"):
        _critic_to_native(values, native)


def _names_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the run's name, by default that of the loggers, and its directories."""
    if values.is_set(SHOWN_NAME) and not values.is_set(NAME):
        native.set("name", values[SHOWN_NAME], SHOWN_NAME)
    native.set(
        "tracking.run_name", None if values[SHOWN_NAME] == native.get("name") else values[SHOWN_NAME], SHOWN_NAME
    )
    if is_embodied(values) and values.is_set(LOG_DIR) and not values.is_set(OUTPUT_DIR):
        # embodied runs write everything where their loggers write
        native.set("output_dir", values[LOG_DIR], LOG_DIR)
        native.set("tracking.log_dir", None, LOG_DIR)
        return
    is_default = PurePath(values[LOG_DIR]) == PurePath(values[OUTPUT_DIR], values[NAME])
    native.set("tracking.log_dir", None if is_default else values[LOG_DIR], LOG_DIR)


def _critic_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the critic, with the policy's settings unless it has its own."""
    separate, clip = "critic.use_critic_model", "algorithm.value_clip"
    native.set("critic.shares_policy", not values[separate], separate, ESTIMATOR)
    if clip in values.dialect.specs():
        native.set("critic.value_clip", values[clip], clip)
    else:
        native.set("critic.value_clip", DEFAULT_VALUE_CLIP)
    for section in ("optimizer", "budget", "inference_budget"):
        for name, value in native.get(f"actor.{section}", {}).items():
            key = f"{section}.{name}"
            if f"critic.{key}" not in native.origins:
                native.set(f"critic.{key}", value, *native.origins[f"actor.{key}"])
    native.set("critic.backend", native.get("actor.backend"), *native.origins["actor.backend"])


def base_tree(experiment: Experiment) -> dict[str, Any]:
    """Return the keys that select RLinf's reference for a run.

    Raises:
        ConfigError: RLinf has no such environment, or no such kind of run.
    """
    require_env(experiment, "RLinf", ("prompts", "simulator"))
    require_no_stages(experiment, "RLinf")
    if isinstance(experiment.env, SimulatorConfig) and experiment.policy.path is None:
        return {"env_type": experiment.env.simulator}
    return {"runner": {"task_type": "math" if isinstance(experiment.env, PromptsConfig) else "embodied"}}


def from_native(foreign: ForeignBuilder) -> None:
    """Convert a native run to RLinf's format."""
    run, tracking = foreign.experiment, foreign.experiment.tracking
    is_simulator = run.env.name == "simulator"
    if is_simulator and run.policy.path is None:
        env_file_from_native(foreign)
        return
    apply_from_native(RULES, foreign)
    if tracking.log_dir is not None:
        foreign.set(LOG_DIR, tracking.log_dir)
    if tracking.run_name is not None:
        foreign.set(SHOWN_NAME, tracking.run_name)
    algorithm_from_native(foreign)
    placement_from_native(foreign)
    foreign.set("critic.use_critic_model", run.needs_critic and not run.critic.shares_policy)
    foreign.set("reward.use_reward_model", run.reward is not None and run.reward.model is not None)
    if is_simulator:
        embodied_from_native(foreign)
    else:
        math_from_native(foreign)
