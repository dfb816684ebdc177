"""Conversion of RLinf's YAML files: runs on text, runs on simulators, and files of one simulator."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, loggers
from quintet.config.dialects.ledger import KeySpec, load_constants
from quintet.config.dialects.rlinf.algorithm import (
    ESTIMATOR,
    HAS_CRITIC,
    TASK,
    algorithm_from_native,
    algorithm_to_native,
    is_embodied,
    only_evaluates,
    text_algorithm_from_native,
    text_algorithm_problems,
    text_algorithm_to_native,
)
from quintet.config.dialects.rlinf.backend import (
    BACKEND,
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
from quintet.config.dialects.rlinf.constraints import math_problems, shared_problems
from quintet.config.dialects.rlinf.critic import critic_from_native, critic_to_native
from quintet.config.dialects.rlinf.embodied import embodied_from_native, embodied_to_native
from quintet.config.dialects.rlinf.math import math_from_native, math_to_native
from quintet.config.dialects.rlinf.robot_constraints import embodied_problems
from quintet.config.dialects.rlinf.simulators import env_file_from_native, env_file_to_native, option_problems
from quintet.config.dialects.supported_runs import require_env, require_no_stages
from quintet.config.native.envs import PromptsConfig, SimulatorConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import PolicyConfig
from quintet.config.problems import ConfigProblem
from quintet.errors import ConfigError

VALUE_CLIP = "algorithm.value_clip"
DEFAULT_VALUE_CLIP = 0.2
"""`algorithm.value_clip` in RLinf's own files of embodied runs; its reference does not document it."""
NAME, SHOWN_NAME, TOKENIZER = (
    "runner.experiment_name",
    "runner.logger.experiment_name",
    "actor.tokenizer.tokenizer_model",
)
ENGINE_PATH = "rollout.model.model_path"
RANDOM_PRESETS = {"mlp": "state-mlp"}
"""Presets with random weights by kind of policy."""
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
SUPERVISED = "sft"
"""Task of supervised runs, of which only names and loggers are read."""


def _is_supervised(values: ForeignValues) -> bool:
    return bool(values[TASK] == SUPERVISED)


def _is_env_file(values: ForeignValues) -> bool:
    return values.dialect.references[0].name == "rlinf_env"


def conflicts(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems between keys."""
    if _is_env_file(values):
        yield from option_problems(values, "")
        return
    if _is_supervised(values):
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
        native.remarks += _keys_without_effect(values)
        return
    if _is_supervised(values):
        native.set_from_keys(values.dialect.specs().values())
        native.apply(RULES[:2])
        _names_to_native(values, native)
        return
    algorithm_to_native(values, native)
    if not is_embodied(values):
        text_algorithm_to_native(values, native)
    native.set_from_keys(spec for spec in values.dialect.specs().values() if _is_set_explicitly(values, spec))
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
    native.remarks += _keys_without_effect(values)
    if native.get("algorithm.advantage.name") == "gae" or native.get("algorithm.advantage.needs_critic"):
        _critic_to_native(values, native)


def _is_set_explicitly(values: ForeignValues, spec: KeySpec) -> bool:
    """Whether a key has a value of its own: the critic's keys have those of the actor unless the user set them."""
    return values.is_set(spec.key) or not str(spec.default).startswith("${actor.") or is_embodied(values)


def _keys_without_effect(values: ForeignValues) -> Iterator[str]:
    """Yield a remark for each key that was changed and has no effect in this version."""
    for key, spec in values.dialect.specs().items():
        _, marker, reason = spec.effect.partition("Has no effect here")
        is_changed = values.is_set(key) and values[key] != values.merged.interpolated(spec.default)
        if marker and not spec.native and is_changed:
            yield f"{values.describe(key)} has no effect here{reason.rstrip('.')}"


def _names_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the run's name, by default that of the loggers, and its directories."""
    shown, log_dir = values[SHOWN_NAME], values[LOG_DIR] or str(PurePath(values[OUTPUT_DIR], values[NAME]))
    if values.is_set(SHOWN_NAME) and not values.is_set(NAME):
        native.set("name", shown, SHOWN_NAME)
    native.set("tracking.run_name", None if shown == native.get("name") else shown, SHOWN_NAME)
    is_default = PurePath(log_dir) == PurePath(values[OUTPUT_DIR], values[NAME])
    if is_embodied(values) and values.is_set(LOG_DIR) and values[LOG_DIR] and not values.is_set(OUTPUT_DIR):
        # embodied runs write everything where their loggers write
        native.set("output_dir", values[LOG_DIR], LOG_DIR)
        is_default = True
    native.set("tracking.log_dir", None if is_default else values[LOG_DIR], LOG_DIR)


def _policy_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    path, kind = (_model_key(values, name) for name in ("model_path", "model_type"))
    # without weights a policy starts from random ones
    preset = RANDOM_PRESETS.get(values.native(kind), values.native(kind))
    native.set("policy.preset", None if values[path] else preset, path, kind)
    native.set("policy.path", values[path] or None, path)
    native.set("policy.kind", values.native(kind), kind)
    if is_embodied(values) and values.is_set(ENGINE_PATH) and values[ENGINE_PATH] not in (values[path], None, ""):
        native.remarks.append(f"{values.describe(ENGINE_PATH)} has no effect: {values.describe(path)} is trained")
    # the reference's tokenizer belongs to its own model
    is_other = values.is_set(TOKENIZER) and values[TOKENIZER] != values[path]
    native.set("policy.tokenizer", values[TOKENIZER] if is_other else None, TOKENIZER)


def _model_key(values: ForeignValues, name: str) -> str:
    """Return a key of the engine's model; in embodied runs of the learner's, unless only the engine's is set."""
    engine, learner = f"rollout.model.{name}", f"actor.model.{name}"
    if not is_embodied(values):
        # under FSDP, the engine gets the learner's weights before its first response
        has_weights = name == "model_path" and values[BACKEND] == "fsdp" and values[learner]
        return learner if has_weights else engine
    # without training there is no learner whose weights the engine gets
    evaluates_engine = name == "model_path" and only_evaluates(values) and values[engine]
    sets_only_engine = values.is_set(engine) and not values.is_set(learner)
    return engine if evaluates_engine or sets_only_engine else learner


def _critic_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the critic, with the policy's settings unless it has its own."""
    native.set("critic.shares_policy", not values[HAS_CRITIC], HAS_CRITIC, ESTIMATOR)
    if VALUE_CLIP in values.dialect.specs():
        native.set("critic.value_clip", values[VALUE_CLIP], VALUE_CLIP)
    else:
        native.set("critic.value_clip", DEFAULT_VALUE_CLIP)
    if not is_embodied(values) and values[HAS_CRITIC]:
        critic_to_native(values, native)
    for section in ("optimizer", "budget", "inference_budget"):
        for name, value in native.get(f"actor.{section}", {}).items():
            key = f"{section}.{name}"
            if f"critic.{key}" not in native.origins:
                native.set(f"critic.{key}", value, *native.origins[f"actor.{key}"])
    if "critic.backend" not in native.origins:
        native.set("critic.backend", native.get("actor.backend"), *native.origins["actor.backend"])


def _has_policy(experiment: Experiment) -> bool:
    """Whether a run on a simulator names its policy; otherwise it is like a simulator's own file."""
    default = PolicyConfig.model_fields["preset"].default
    return experiment.policy.path is not None or experiment.policy.preset != default


def base_tree(experiment: Experiment) -> dict[str, Any]:
    """Return the keys that select RLinf's reference for a run.

    Raises:
        ConfigError: RLinf has no such environment, or no such kind of run.
    """
    require_env(experiment, "RLinf", ("prompts", "simulator"))
    require_no_stages(experiment, "RLinf")
    if isinstance(experiment.env, SimulatorConfig) and ":" in experiment.env.simulator:
        message = f"RLinf has no simulator {experiment.env.simulator}: it takes no class of a user"
        raise ConfigError(message, key="env.simulator")
    if isinstance(experiment.env, SimulatorConfig) and not _has_policy(experiment):
        return {"env_type": experiment.env.simulator}
    return {"runner": {"task_type": "math" if isinstance(experiment.env, PromptsConfig) else "embodied"}}


def from_native(foreign: ForeignBuilder) -> None:
    """Convert a native run to RLinf's format."""
    run, policy = foreign.experiment, foreign.experiment.policy
    is_simulator = run.env.name == "simulator"
    if is_simulator and not _has_policy(run):
        env_file_from_native(foreign)
        return
    foreign.apply(RULES)
    if run.tracking.log_dir is not None:
        foreign.set(LOG_DIR, run.tracking.log_dir)
    foreign.set(SHOWN_NAME, run.tracking.run_name)
    model, default_kind = ("actor.model", "openvla_oft") if is_simulator else ("rollout.model", "qwen2.5")
    foreign.set(f"{model}.model_path", "" if policy.path is None else policy.path)
    foreign.set_native(f"{model}.model_type", policy.kind or default_kind)
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
        critic_from_native(foreign)
