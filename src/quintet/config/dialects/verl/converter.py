"""Conversion of verl's `ppo_trainer.yaml`, `sft_trainer.yaml`, `evaluation.yaml` and `generation.yaml`: one response to
each prompt."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.algorithm_choice import ADVANTAGE, AlgorithmOptions, choose, export_name
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import MiniBatches
from quintet.config.dialects.supported_runs import require_single_env
from quintet.config.dialects.verl.batches import ROLLOUT
from quintet.config.dialects.verl.constraints import (
    ESTIMATOR,
    MINI_BATCH,
    PROMPTS,
    REWARDS_OF_SINGLES,
    SAMPLES,
    mini_batch_size_problems,
    shared_problems,
    step_size,
    uneven_mini_batches_to_native,
)
from quintet.config.dialects.verl.critic import critic_defaults
from quintet.config.dialects.verl.dialect import MISSING_KINDS, OUTPUT_PATH, missing_kind
from quintet.config.dialects.verl.distillation import (
    distillation_from_native,
    distillation_problems,
    distillation_to_native,
)
from quintet.config.dialects.verl.generation import (
    generation_from_native,
    generation_problems,
    generation_to_native,
)
from quintet.config.dialects.verl.kl import KL_IN_LOSS, KL_IN_REWARD, kl_from_native, kl_to_native
from quintet.config.dialects.verl.learners import STEPS, learning_from_native, learning_to_native, policy_tree
from quintet.config.dialects.verl.objective import FILTER
from quintet.config.dialects.verl.release import workers_to_native
from quintet.config.dialects.verl.run_settings import (
    DATA_RULES,
    chat_template_from_native,
    chat_template_to_native,
    overlong_problems,
    reward_function,
    rewards_from_native,
    rewards_to_native,
    run_from_native,
    run_setting_problems,
    run_to_native,
    tool_problems,
    tools_from_native,
    tools_to_native,
)
from quintet.config.dialects.verl.separate_engines import (
    has_separate_engines,
    is_fully_async,
    placement_problems,
    separate_engines_to_native,
)
from quintet.config.dialects.verl.sft import automodel_problems, sft_from_native, sft_to_native
from quintet.config.native.experiment import Experiment
from quintet.config.native.training import TrainingConfig
from quintet.config.problems import ConfigProblem
from quintet.errors import ConfigError, UnsupportedRunError

GENERATED = "data.gen_batch_size"
RULES = (
    *DATA_RULES,
    MiniBatches(MINI_BATCH, (PROMPTS,), ("training.groups_per_step",)),
    AlgorithmOptions(ADVANTAGE, {"gamma": "algorithm.gamma", "lam": "algorithm.lam"}, default=1.0),
)


def _kind(values: ForeignValues) -> str:
    """Return `ppo`, `sft`, `evaluation` or `generation`."""
    if values[OUTPUT_PATH] is not None:
        return "generation"
    names = [reference.name for reference in values.dialect.references]
    return next((kind for kind in ("sft", "evaluation") if any(f"verl_{kind}" in name for name in names)), "ppo")


def conflicts(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems between keys: those that verl asserts at start-up, and contradictions in its reference.

    Raises:
        UnsupportedRunError: the run is of a kind that this version lacks, or computes no advantages.
    """
    if (key := missing_kind(values.merged.plain)) is not None:
        message = f"{values.describe(key)}: a run of this kind {MISSING_KINDS[key].refusal()}"
        raise UnsupportedRunError(message, source=values.source(key))
    kind = _kind(values)
    if kind != "ppo":
        checks = {"sft": (run_setting_problems, automodel_problems), "generation": (generation_problems,)}
        yield from (problem for check in checks.get(kind, ()) for problem in check(values))
        return
    if values[ESTIMATOR] is None:
        problem = f"a run without advantages {Capability.RECIPES.refusal()}"
        raise UnsupportedRunError(f"{values.describe(ESTIMATOR)}: {problem}", source=values.source(ESTIMATOR))
    if not is_fully_async(values):
        yield from mini_batch_size_problems(values)
    has_reference = bool(values[KL_IN_LOSS] or values[KL_IN_REWARD])
    yield from shared_problems(values, step_size(values), SAMPLES, has_reference=has_reference)
    yield from overlong_problems(values)
    yield from placement_problems(values)
    yield from distillation_problems(values)
    yield from tool_problems(values)


def to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a verl configuration."""
    native.set("warm_start", None)
    native.set("env", {"name": "prompts"})
    kind = _kind(values)
    if kind == "ppo":
        _ppo_to_native(values, native)
    elif kind == "sft":
        sft_to_native(values, native)
    elif kind == "generation":
        generation_to_native(values, native)
    else:
        native.set_from_keys(values.dialect.specs().values())
        reward_function("evaluation.function").to_native(values, native)
        native.set("name", PurePath(values["data.path"]).stem or "evaluation", "data.path")


def _ppo_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    critic_defaults(values, native)
    native.set_from_keys(values.dialect.specs().values())
    estimator_to_native(values, native)
    native.apply(RULES)
    workers_to_native(values, native)
    rewards_to_native(values, native)
    _steps_to_native(values, native)
    in_loss, in_reward = bool(values[KL_IN_LOSS]), bool(values[KL_IN_REWARD])
    kl_to_native(values, native, KL_IN_LOSS, KL_IN_REWARD, in_loss=in_loss, in_reward=in_reward)
    learning_to_native(values, native)
    for name in ("prompt", "response"):
        engine, data = f"{ROLLOUT}.{name}_length", f"data.max_{name}_length"
        native.set(f"rollout.max_{name}_tokens", values[engine], engine, data)
    native.set_constants({"rollout.think": False, "rollout.format_penalty": 0.0})
    chat_template_to_native(values, native)
    tools_to_native(values, native)
    run_to_native(values, native)
    if not is_fully_async(values):
        uneven_mini_batches_to_native(values, native, (PROMPTS,), SAMPLES)
    _rounds_to_native(values, native)
    separate_engines_to_native(values, native)
    distillation_to_native(values, native)


def _rounds_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the prompts of a generation: of a round of dynamic sampling, or without it those of a step."""
    prompts = values[GENERATED]
    if prompts in (None, values[PROMPTS]) or is_fully_async(values):
        return
    if values[FILTER] and has_separate_engines(values):
        native.remarks.append(f"{values.describe(GENERATED)} has no effect: prompts are generated one by one")
    elif values[FILTER]:
        native.set("algorithm.filter.groups_per_round", prompts, GENERATED)
    elif prompts % values[MINI_BATCH]:
        native.require(GENERATED, Capability.OVERSAMPLING)
    else:
        native.set("training.groups_per_step", prompts, GENERATED)
        native.set("training.mini_batches", prompts // values[MINI_BATCH], GENERATED, MINI_BATCH)


def estimator_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the advantage estimator; of those that compare responses, a single one keeps its reward (ARPO)."""
    if values[SAMPLES] > 1 or values.native(ESTIMATOR) not in REWARDS_OF_SINGLES:
        choose(native, ADVANTAGE, values.native(ESTIMATOR), ESTIMATOR)
        return
    choose(native, ADVANTAGE, "arpo", ESTIMATOR, SAMPLES)
    settings = f"{values.describe(ESTIMATOR)} with {values.describe(SAMPLES)}"
    native.remarks.append(
        f"{settings}: there is nothing to compare, and each response has its reward as advantage (arpo)"
    )


def _steps_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set a number of steps, or epochs over the data; if the user set both, whichever ends first."""
    epochs, is_limited = "trainer.total_epochs", (values[STEPS] or -1) > 0
    if is_limited and not values.is_set(epochs):
        native.set("training.steps", values[STEPS], STEPS)
        native.set("data.epochs", None, STEPS)
        return
    native.set("data.epochs", values[epochs], epochs)
    native.set("data.max_steps", values[STEPS] if is_limited else None, STEPS)


def base_tree(experiment: Experiment) -> dict[str, Any]:
    """Return the keys that select verl's reference for a run.

    Raises:
        ConfigError: the run has environments, or fine-tunes on an expert's episodes.
    """
    if experiment.evaluation is not None:
        return {"data": {"path": experiment.evaluation.path}}
    if experiment.generation is not None:
        return {"data": {"output_path": experiment.generation.output_path}}
    if experiment.sft is not None:
        if experiment.sft.episodes is not None:
            message = "verl fine-tunes on conversations from files, not on episodes of an expert"
            raise ConfigError(message, key="sft", hint="ragen supports expert episodes")
        return {"model": {"partial_pretrain": experiment.sft.path or experiment.policy.path or "model"}}
    require_single_env(experiment, "verl")
    if experiment.env.name != "prompts":
        message = f"verl trains on prompts from files and has no environment {experiment.env.name}"
        raise ConfigError(message, key="env.name", hint="ragen and vagen have environments")
    return policy_tree(experiment)


def from_native(foreign: ForeignBuilder) -> None:
    """Convert a native run to verl's format."""
    run = foreign.experiment
    if run.evaluation is not None:
        reward_function("evaluation.function").from_native(foreign)
    elif run.generation is not None:
        generation_from_native(foreign)
    elif run.sft is not None:
        sft_from_native(foreign)
    else:
        _ppo_from_native(foreign)


def _ppo_from_native(foreign: ForeignBuilder) -> None:
    run = foreign.experiment
    learning_from_native(foreign)
    distillation_from_native(foreign)
    export_name(foreign, ADVANTAGE, ESTIMATOR)
    kl_from_native(foreign)
    foreign.apply(RULES)
    if run.algorithm.filter.groups_per_round is not None:
        foreign.set(GENERATED, run.algorithm.filter.groups_per_round)
    if run.data and run.data.epochs and run.training.steps == TrainingConfig().steps:
        foreign.set("trainer.total_epochs", run.data.epochs)
        foreign.set(STEPS, run.data.max_steps or -1)
    else:
        foreign.set(STEPS, run.training.steps or -1)
    rewards_from_native(foreign)
    chat_template_from_native(foreign)
    tools_from_native(foreign)
    run_from_native(foreign)
