"""Conversion of RLinf's YAML files: runs on text, runs on simulators, and files of one simulator."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, loggers
from quintet.config.dialects.ledger import load_constants
from quintet.config.dialects.rlinf.algorithm import (
    ESTIMATOR,
    HAS_CRITIC,
    algorithm_from_native,
    algorithm_to_native,
    is_embodied,
    text_algorithm_from_native,
    text_algorithm_problems,
    text_algorithm_to_native,
)
from quintet.config.dialects.rlinf.backend import (
    backend_from_native,
    backend_to_native,
    megatron_from_native,
    megatron_to_native,
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

VALUE_CLIP = "algorithm.value_clip"
DEFAULT_VALUE_CLIP = 0.2
"""`algorithm.value_clip` in RLinf's own files of embodied runs; its reference does not document it."""
NAME, SHOWN_NAME, TOKENIZER = (
    "runner.experiment_name",
    "runner.logger.experiment_name",
    "actor.tokenizer.tokenizer_model",
)
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
    Derived(
        "actor.optimizer.betas",
        ("actor.optim.adam_beta1", "actor.optim.adam_beta2"),
        lambda first, second: [first, second],
        tuple,
    ),
)


def _is_env_file(values: ForeignValues) -> bool:
    return values.dialect.references[0].name == "rlinf_env"


def conflicts(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems between keys."""
    if _is_env_file(values):
        return
    placement = parse_placements(values)
    yield from shared_problems(values, placement)
    if is_embodied(values):
        yield from embodied_problems(values, placement)
    else:
        yield from math_problems(values, placement)
        yield from text_algorithm_problems(values)


def to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert an RLinf configuration; a simulator's own file becomes a run on that simulator."""
    if _is_env_file(values):
        env_file_to_native(values, native)
        return
    algorithm_to_native(values, native)
    if not is_embodied(values):
        text_algorithm_to_native(values, native)
    native.set_from_keys(values.dialect.specs().values())
    native.set_constants(load_constants("rlinf", "rlinf_basic"))
    native.apply(RULES)
    _names_to_native(values, native)
    _policy_to_native(values, native)
    backend_to_native(values, native)
    if is_embodied(values):
        embodied_to_native(values, native)
    else:
        math_to_native(values, native)
        megatron_to_native(values, native)
    placement_to_native(parse_placements(values), native)
    if values[ESTIMATOR] == "gae" or native.get("algorithm.advantage.needs_critic"):
        _critic_to_native(values, native)


def _names_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the run's name, by default that of the loggers, and its directories."""
    shown = values[SHOWN_NAME]
    if values.is_set(SHOWN_NAME) and not values.is_set(NAME):
        native.set("name", shown, SHOWN_NAME)
    native.set("tracking.run_name", None if shown == native.get("name") else shown, SHOWN_NAME)
    is_default = PurePath(values[LOG_DIR]) == PurePath(values[OUTPUT_DIR], values[NAME])
    if is_embodied(values) and values.is_set(LOG_DIR) and not values.is_set(OUTPUT_DIR):
        # embodied runs write everything where their loggers write
        native.set("output_dir", values[LOG_DIR], LOG_DIR)
        is_default = True
    native.set("tracking.log_dir", None if is_default else values[LOG_DIR], LOG_DIR)


def _policy_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    path, kind = (_model_key(values, name) for name in ("model_path", "model_type"))
    native.set("policy.preset", None, path)
    native.set("policy.path", values[path], path)
    native.set("policy.kind", values[kind], kind)
    # the reference's tokenizer belongs to its own model
    is_other = values.is_set(TOKENIZER) and values[TOKENIZER] != values[path]
    native.set("policy.tokenizer", values[TOKENIZER] if is_other else None, TOKENIZER)


def _model_key(values: ForeignValues, name: str) -> str:
    """Return a key of the engine's model; in embodied runs of the learner's, unless only the engine's is set."""
    engine, learner = f"rollout.model.{name}", f"actor.model.{name}"
    has_learner_key = is_embodied(values) and (values.is_set(learner) or not values.is_set(engine))
    return learner if has_learner_key else engine


def _critic_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the critic, with the policy's settings unless it has its own."""
    native.set("critic.shares_policy", not values[HAS_CRITIC], HAS_CRITIC, ESTIMATOR)
    if VALUE_CLIP in values.dialect.specs():
        native.set("critic.value_clip", values[VALUE_CLIP], VALUE_CLIP)
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
    run, policy = foreign.experiment, foreign.experiment.policy
    is_simulator = run.env.name == "simulator"
    if is_simulator and policy.path is None:
        env_file_from_native(foreign)
        return
    foreign.apply(RULES)
    foreign.set(LOG_DIR, run.tracking.log_dir)
    foreign.set(SHOWN_NAME, run.tracking.run_name)
    model, default_kind = ("actor.model", "openvla_oft") if is_simulator else ("rollout.model", "qwen2.5")
    foreign.set(f"{model}.model_path", policy.path)
    foreign.set(f"{model}.model_type", policy.kind or default_kind)
    foreign.set(TOKENIZER, policy.tokenizer or policy.path)
    foreign.set(HAS_CRITIC, run.needs_critic and not run.critic.shares_policy)
    algorithm_from_native(foreign)
    placement_from_native(foreign)
    backend_from_native(foreign)
    if is_simulator:
        embodied_from_native(foreign)
    else:
        text_algorithm_from_native(foreign)
        math_from_native(foreign)
        megatron_from_native(foreign)
