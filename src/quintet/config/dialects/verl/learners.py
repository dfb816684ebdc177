"""Conversion of verl's settings of policy, critic and reference; VAGEN has the same ones."""

import re
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.algorithm_choice import ADVANTAGE, config_class
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Same, file_list
from quintet.config.dialects.engine_choice import arguments_from_native, arguments_to_native
from quintet.config.dialects.verl.batches import ACTOR, ROLLOUT, budgets_from_native, budgets_to_native, passes
from quintet.config.dialects.verl.critic import critic_from_native, critic_to_native
from quintet.config.dialects.verl.key_values import UNCLIPPED
from quintet.config.dialects.verl.objective import loss_to_native, objective_from_native, objective_to_native
from quintet.config.dialects.verl.release import release_from_native, release_to_native
from quintet.config.dialects.verl.training_engines import training_engine, training_engines_to_native
from quintet.config.native.experiment import Experiment

STEPS = "actor_rollout_ref.actor.optim.total_training_steps"
DTYPE, MODE = "actor_rollout_ref.rollout.dtype", "actor_rollout_ref.rollout.mode"
DEFAULTS_FILE = re.compile(r"(^|/)trainer/config/rollout/rollout\.yaml:\d+$")
"""verl's file of all keys of the engine: its values are defaults, no wish of the user."""
PARTIAL, STALENESS = "async_training.partial_rollout", "async_training.staleness_threshold"
OPTIMIZERS = {"actor": f"{ACTOR}.optim", "critic": "critic.optim"}
RULES = (
    file_list("external_libs", "actor_rollout_ref.model.external_lib", scalar=False, empty=None),
    Same(
        "policy.overrides",
        "actor_rollout_ref.model.override_config.model_config",
        to_value=lambda overrides: overrides or {},
    ),
)


def learning_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set loss, policy, engine, critic and reference; the native estimator and KL section must be set already."""
    loss_to_native(values, native)
    policy_to_native(values, native)
    critic_to_native(values, native)
    has_reference = native.get("algorithm.kl") is not None
    trains_critic = config_class(ADVANTAGE, native.get(f"{ADVANTAGE}.name")).uses_values
    budgets_to_native(values, native, passes(values, critic=trains_critic, reference=has_reference))
    for learner, section in OPTIMIZERS.items():
        _warmup_to_native(values, native, learner, section)
        _megatron_optimizer_to_native(values, native, learner, section)
    objective_to_native(values, native)
    release_to_native(values, native)
    training_engines_to_native(values, native)


def policy_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set model and engine."""
    native.set("policy.preset", None, "actor_rollout_ref.model.path")
    native.apply(RULES)
    _generation_to_native(values, native)


def _generation_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    if values[MODE] == "async_envloop":
        native.require(MODE, Capability.RECIPES)
    dtype = values.native(DTYPE)
    learnable = dtype in ("bfloat16", "float32")
    native.set("policy.dtype", dtype if learnable else "bfloat16", DTYPE)
    native.set("rollout.engine_options.dtype", None if learnable else dtype, DTYPE)
    arguments_to_native(values, native)
    native.set("rollout.partial", values[PARTIAL] and values[STALENESS] > 0, PARTIAL, STALENESS)
    frees = "actor_rollout_ref.rollout.free_cache_engine"
    if values[STALENESS] and (not values.is_set(frees) or DEFAULTS_FILE.search(values.source(frees))):
        native.set("rollout.engine_options.sleep_between_steps", False, STALENESS)


def _warmup_to_native(values: ForeignValues, native: NativeBuilder, learner: str, section: str) -> None:
    """Set warm-up steps, or else the share of all steps; under Megatron 0 steps mean that the share counts, and under
    VeOmni any number of them does."""
    steps, ratio = f"{section}.lr_warmup_steps", f"{section}.lr_warmup_steps_ratio"
    warmup = -1 if values[steps] is None or training_engine(values) == "veomni" else values[steps]
    is_number = warmup > 0 or (warmup == 0 and not _has_megatron_optimizer(values))
    share = 0.0 if is_number else float(values[ratio] or 0.0)
    total = values[f"{section}.lr_decay_steps"] or values[STEPS] or -1
    if share and total > 0:
        warmup, share = int(share * total), 0.0
    native.set(f"{learner}.optimizer.warmup_steps", max(0, warmup), steps, ratio)
    native.set(f"{learner}.optimizer.warmup_ratio", share, ratio, steps)


def _has_megatron_optimizer(values: ForeignValues) -> bool:
    return values[f"{ACTOR}.optim.lr_decay_style"] is not None


def _megatron_optimizer_to_native(values: ForeignValues, native: NativeBuilder, learner: str, section: str) -> None:
    """Set what Megatron's optimizer has instead: an absolute minimum learning rate, and a clipping norm."""
    minimum, peak = f"{section}.min_lr", f"{section}.lr"
    ratio = f"{learner}.optimizer.min_learning_rate_ratio"
    if values[minimum] is not None:
        native.set(ratio, values[minimum] / native.get(f"{learner}.optimizer.learning_rate"), minimum, peak)
    elif _has_megatron_optimizer(values):
        native.set(ratio, 0.0)
    norm, older = f"{section}.clip_grad", f"{section.removesuffix('.optim')}.grad_clip"
    if (values.is_set(norm) and not _is_default_norm(values, norm, older)) or (
        values[norm] is not None and not values.is_set(older)
    ):
        native.set(f"{learner}.optimizer.max_grad_norm", float(values[norm] or UNCLIPPED), norm)


def _is_default_norm(values: ForeignValues, norm: str, older: str) -> bool:
    """Whether the file has both keys of the clipping norm, and only the older one differs from verl's default, 1."""
    return values.is_set(older) and values[norm] in (None, 1.0)


def policy_tree(experiment: Experiment) -> dict[str, Any]:
    """Return the sections that select verl's PPO reference, with Megatron's optimizer if the policy uses it, and with
    functions that are tools or users who reply."""
    policy: dict[str, Any] = {"model": {"path": experiment.policy.path or "model"}}
    if experiment.actor.backend == "megatron":
        policy["actor"] = {"strategy": "megatron"}
    tool_calls, interactions = experiment.rollout.tool_calls, experiment.rollout.interactions
    files = {
        "tool_config_path": tool_calls and tool_calls.file,
        "function_tool_path": tool_calls and tool_calls.function_file,
        "interaction_config_path": interactions and interactions.file,
    }
    policy["rollout"] = {"multi_turn": {key: file for key, file in files.items() if file is not None}}
    return {"actor_rollout_ref": policy}


def learning_from_native(foreign: ForeignBuilder) -> None:
    """Set verl's keys of policy, engine, critic and reference."""
    run, rollout = foreign.experiment, foreign.experiment.rollout
    foreign.apply(RULES)
    foreign.set(DTYPE, rollout.engine_options.dtype or run.policy.dtype)
    arguments_from_native(foreign, {engine: f"{ROLLOUT}.engine_kwargs.{engine}" for engine in ("vllm", "sglang")})
    foreign.set(PARTIAL, rollout.partial or not rollout.async_ratio)
    foreign.set("actor_rollout_ref.actor.use_kl_loss", run.algorithm.kl_in_loss is not None)
    objective_from_native(foreign)
    for learner, section in OPTIMIZERS.items():
        optimizer = foreign.native_value(f"{learner}.optimizer")
        if optimizer.warmup_steps:
            foreign.set(f"{section}.lr_warmup_steps", optimizer.warmup_steps)
        elif optimizer.warmup_ratio:
            foreign.set(f"{section}.lr_warmup_steps_ratio", optimizer.warmup_ratio)
        if run.actor.backend == "megatron" and optimizer.min_learning_rate_ratio:
            foreign.set(f"{section}.min_lr", optimizer.min_learning_rate_ratio * optimizer.learning_rate)
    budgets_from_native(foreign)
    critic_from_native(foreign)
    release_from_native(foreign)
