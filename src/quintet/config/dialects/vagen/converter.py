"""Conversion of VAGEN's overrides of verl's trainer and its env_config.yaml: multi-turn agents on text and images."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.algorithm_choice import ADVANTAGE, AlgorithmOptions, choose, export_name
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder, to_native_value
from quintet.config.dialects.conversion_rules import Derived, MiniBatches, Same
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.supported_runs import require_no_stages
from quintet.config.dialects.vagen import agent_runs, evaluation
from quintet.config.dialects.vagen.dialect import VAGEN
from quintet.config.dialects.vagen.env_sections import (
    env_problems,
    env_sections,
    envs_from_native,
    envs_to_native,
    envs_tree,
)
from quintet.config.dialects.vagen.evaluation_file import is_evaluation_run
from quintet.config.dialects.vagen.key_values import ENV
from quintet.config.dialects.verl.batches import StepSize
from quintet.config.dialects.verl.constraints import (
    REWARDS_OF_SINGLES,
    shared_problems,
    uneven_mini_batches_to_native,
)
from quintet.config.dialects.verl.critic import critic_defaults
from quintet.config.dialects.verl.learners import learning_from_native, learning_to_native, policy_tree
from quintet.config.dialects.verl.run_settings import (
    REWARD_SECTIONS,
    rewards_from_native,
    rewards_to_native,
    run_from_native,
    run_to_native,
)
from quintet.config.native.advantages import GigpoConfig
from quintet.config.native.data import DataConfig
from quintet.config.native.experiment import Experiment
from quintet.config.problems import ConfigProblem

GROUPS, SAMPLES, RESPONSES = "data.train_batch_size", "rollout_manager.n_trajectory", "actor_rollout_ref.rollout.n"
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
STRATEGY = "actor_rollout_ref.actor.strategy"
STEPS, EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"
TRAJECTORY = "data.max_trajectory_length"
START = "data.max_prompt_length"
RESPONSE = "data.max_response_length"
ESTIMATOR = "algorithm.adv_estimator"
TURN_DISCOUNT = "algorithm.high_level_gamma"
DISCOUNT = "algorithm.gamma"
LAMBDA = "algorithm.lam"
GAE_MASK = "rollout_manager.use_gae_mask"
WINDOW = "rollout_manager.window_size"
TURN_UPDATE = "rollout_manager.use_turn_update"
REWARD_MASK, USE_REFERENCE = "critic.use_reward_mask", "actor_rollout_ref.ref.use_ref"
CONCURRENT = "rollout_manager.mini_batch_size"
TOKEN_REWARD, DEVICES = "algorithm.token_reward_type", "trainer.n_gpus_per_node"
KL_IN_LOSS, KL_IN_REWARD, KL_PENALTY = (
    "actor_rollout_ref.actor.use_kl_loss",
    "algorithm.use_kl_in_reward",
    "algorithm.kl_penalty",
)
KL_REWARD_COEFFICIENT = "algorithm.kl_ctrl.kl_coef"
KL_CONTROL = "algorithm.kl_ctrl.type"
KL_TARGET = "algorithm.kl_ctrl.target_kl"
KL_HORIZON = "algorithm.kl_ctrl.horizon"
KL_IN_REWARD_RULES = (
    Same("algorithm.kl.estimator", KL_PENALTY, export_none=False),
    Same("algorithm.kl.horizon", KL_HORIZON),
    Derived(
        "algorithm.kl.target",
        (KL_TARGET, KL_CONTROL),
        lambda target, control: target if control == "adaptive" else None,
        lambda target: (0.1, "fixed") if target is None else (target, "adaptive"),
    ),
)
RULES = (
    MiniBatches(MINI_BATCH, (GROUPS, SAMPLES), ("training.groups_per_step", "training.samples_per_group")),
    # VAGEN counts past turns, the native window the current one, too
    Derived(
        "rollout.window_size",
        (WINDOW, TURN_UPDATE),
        lambda turns, _: None if turns is None else turns + 1,
        lambda turns: (None if turns is None else turns - 1,),
    ),
)
TURN_VALUE_ESTIMATORS = ("turn_wise_gae", "high_level_gae", "turn_update_high_level_gae")
"""Estimators whose critic learns one value of each turn."""
VALUE_OF_FIRST_TOKEN = ("high_level_gae", "turn_update_bi_level_gae", "turn_update_high_level_gae")
"""Estimators for which that is the value of the first token."""
TURN_UPDATE_GRPO = "turn_update_grpo"
GROUP_OPTIONS = {
    "episode_weight": "algorithm.traj_advantage_weight",
    "turn_weight": "algorithm.turn_advantage_weight",
    "normalize_by_std": "algorithm.use_std_normalization",
}
"""Keys of `turn_update_grpo` by option of the native estimator."""
FOLLOWERS = {
    "rollout_manager.max_trajectory_length": TRAJECTORY,
    "rollout_manager.n_gpus_per_node": DEVICES,
    "rollout_manager.truncation": "data.truncation",
}
"""Keys that must have the value of another one."""


def conflicts(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems between keys: those that VAGEN or verl asserts, and unclear settings of environments."""
    if (other := _other_runs(values)) is not None:
        yield from other.conflicts(values)
        return
    yield from env_problems(values)
    if values[STRATEGY] not in ("fsdp", "fsdp2"):  # whose workers split the episodes of a step, whatever is left
        episodes = f"episodes of a step, from {values.describe(GROUPS, SAMPLES)}"
        yield from values.divisor_problems(MINI_BATCH, values[GROUPS] * values[SAMPLES], episodes)
    yield from _length_problems(values)
    has_reference = _kl_coefficient_key(values) is not None
    yield from shared_problems(values, _step_size(values), SAMPLES, has_reference=has_reference)
    yield from _step_problems(values)
    yield from _trainer_problems(values)


def _other_runs(values: ForeignValues) -> ModuleType | None:
    """Return the module that converts runs since 2026; None for earlier ones."""
    if agent_runs.is_agent_run(values.dialect):
        return agent_runs
    return evaluation if is_evaluation_run(values.dialect) else None


def _trainer_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of keys that the reference omits."""
    for key, followed in FOLLOWERS.items():
        if values[key] != values[followed]:
            yield values.problem(
                key, f"must be {values.describe(followed)}", f"leave it out, or {followed}={values[key]}"
            )
    estimator = values[ESTIMATOR]
    is_per_turn = estimator in TURN_VALUE_ESTIMATORS
    if values[REWARD_MASK] is not None and values[REWARD_MASK] != is_per_turn:
        trained = "one value of each turn" if is_per_turn else "the value of every token"
        hint = f"{REWARD_MASK}={str(is_per_turn).lower()}"
        yield values.problem(REWARD_MASK, f"{values.describe(ESTIMATOR)} needs {trained}", hint)


def _step_size(values: ForeignValues) -> StepSize:
    """Return the size of a training step; VAGEN counts mini-batches in episodes."""
    responses = values[RESPONSES]
    return StepSize(
        sequences=values[GROUPS] * values[SAMPLES] * responses,
        mini_batch=min(values[MINI_BATCH], values[GROUPS] * values[SAMPLES]) * responses,
        max_tokens=values[TRAJECTORY],
        sequences_from=(GROUPS, SAMPLES),
        mini_batch_from=MINI_BATCH,
        max_tokens_from=(TRAJECTORY,),
    )


def _length_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    minimum = values[START] + values[RESPONSE]
    if values[TRAJECTORY] < minimum:
        problem = f"an episode has at least the tokens of {values.describe(START, RESPONSE)} together"
        yield values.problem(TRAJECTORY, problem, f"at least: {TRAJECTORY}={minimum}")


def _step_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    optimizer_steps = "actor_rollout_ref.actor.optim.total_training_steps"
    if (values[optimizer_steps] or -1) > 0 and values[optimizer_steps] != values[STEPS]:
        problem = f"the trainer sets it to {values.describe(STEPS)}"
        yield values.problem(optimizer_steps, problem, f"leave it out: {STEPS} sets it")
    envs = env_sections(values)
    key, states = envs[0].key("train_size"), sum(env["train_size"] for env in envs)
    if values[STEPS] is None and states < values[GROUPS]:
        together = f", and all environments together have {states}" if len(envs) > 1 else ""
        problem = f"a step needs more start states: {values.describe(GROUPS)}{together}"
        yield values.problem(key, problem, f"at least: {key}={values[GROUPS] - states + envs[0]['train_size']}")


def to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a VAGEN configuration."""
    if (other := _other_runs(values)) is not None:
        other.to_native(values, native)
        return
    native.set("warm_start", None)
    critic_defaults(values, native)
    specs = values.dialect.specs().values()
    native.set_from_keys(
        spec for spec in specs if not spec.key.startswith(f"{ENV}.") and not _sets(spec, "data.", "reward.")
    )
    envs_to_native(values, native)
    _data_to_native(values, native)
    _batches_to_native(values, native)
    _algorithm_to_native(values, native)
    learning_to_native(values, native)
    run_to_native(values, native)


def _sets(spec: KeySpec, *sections: str) -> bool:
    return bool(spec.native) and spec.native[0].startswith(sections)


def _data_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set data and reward keys that the user set: VAGEN itself does not use verl's prompt files."""
    defaults = DataConfig()
    for spec in values.dialect.specs().values():
        if spec.key.startswith("data.") and _sets(spec, "data.") and values.is_set(spec.key):
            field, value = spec.native[0].removeprefix("data."), to_native_value(spec, values[spec.key])
            if spec.key != "data.image_key" and hasattr(defaults, field) and value != getattr(defaults, field):
                native.set(spec.native[0], value, spec.key)
    if values["data.image_key"] != "images":
        native.set("data.image_key", values["data.image_key"], "data.image_key")
    if any(key.startswith(REWARD_SECTIONS) for key in values.merged.sources):
        rewards_to_native(values, native)
        native.set_from_keys(spec for spec in values.dialect.specs().values() if _sets(spec, "reward."))


def _batches_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    native.apply(RULES)
    uneven_mini_batches_to_native(values, native, (GROUPS, SAMPLES), RESPONSES)
    native.set("training.samples_per_group", values[SAMPLES] * values[RESPONSES], SAMPLES, RESPONSES)
    envs = env_sections(values)
    states, sizes = sum(env["train_size"] for env in envs), [env.key("train_size") for env in envs]
    epoch_steps = states // values[GROUPS] * values[EPOCHS]
    steps = min(values[STEPS] or epoch_steps, epoch_steps) or values[STEPS]
    native.set("training.steps", steps, STEPS, EPOCHS, *sizes, GROUPS)
    if steps * values[GROUPS] > states:
        for env, size in zip(envs, sizes, strict=True):
            key = f"envs.{env.name}.start_states" if env.is_mixed else "training.start_states"
            if env["train_size"]:
                native.set(key, env["train_size"], size)
    if values[CONCURRENT] is not None:
        native.set("rollout.max_concurrent", values[CONCURRENT], CONCURRENT)
    response = "actor_rollout_ref.rollout.response_length"
    native.set("rollout.max_response_tokens", values[response], response, RESPONSE)
    longest = (TRAJECTORY, "rollout_manager.max_trajectory_length")
    native.set("rollout.max_prompt_tokens", values[TRAJECTORY] - values[response], *longest, response, RESPONSE)


def _algorithm_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    estimator = values[ESTIMATOR]
    name = values.native(ESTIMATOR)
    if estimator == "multi_turn_gae":
        native.require(ESTIMATOR, Capability.MULTI_TURN_GAE)
    if _has_single_samples(values) and name in REWARDS_OF_SINGLES:
        name = "arpo"
        settings = f"{values.describe(ESTIMATOR)} with {values.describe(SAMPLES)}"
        native.remarks.append(f"{settings}: there is nothing to compare, and each episode has its reward as advantage")
    choose(native, ADVANTAGE, name, ESTIMATOR, REWARD_MASK, SAMPLES)
    native.apply([_discounts(name)])
    if estimator in VALUE_OF_FIRST_TOKEN:
        native.set("algorithm.advantage.turn_value", "first", ESTIMATOR, TOKEN_REWARD)
    if estimator == TURN_UPDATE_GRPO:
        native.set("algorithm.advantage.compare", "turns", ESTIMATOR)
        native.set("algorithm.advantage.whiten", True, ESTIMATOR)
        for option, key in GROUP_OPTIONS.items():
            native.set(f"algorithm.advantage.{option}", values[key], key)
    # `gae` includes the environment's tokens
    masked, origins = (False, (GAE_MASK, ESTIMATOR)) if estimator == "gae" else (values[GAE_MASK], (GAE_MASK,))
    native.set("algorithm.advantage_over_response_tokens", masked, *origins)
    _kl_to_native(values, native)


def _has_single_samples(values: ForeignValues) -> bool:
    """Whether each start state has one episode."""
    return bool(values[SAMPLES] * values[RESPONSES] == 1)


def _discounts(estimator: str) -> AlgorithmOptions:
    discount = TURN_DISCOUNT if estimator == "turn_wise_gae" else DISCOUNT
    keys = {"turn_gamma": TURN_DISCOUNT, "gamma": discount, "turn_lam": LAMBDA, "lam": LAMBDA}
    return AlgorithmOptions(ADVANTAGE, keys, default=1.0)


def _kl_coefficient_key(values: ForeignValues) -> str | None:
    """Return the key of the KL coefficient in the loss or in the rewards, None if the divergence does not count."""
    if values[KL_IN_LOSS]:
        return "actor_rollout_ref.actor.kl_loss_coef"
    if not values[USE_REFERENCE]:
        return None
    in_reward = values[KL_IN_REWARD] if values.is_set(KL_IN_REWARD) else values[KL_REWARD_COEFFICIENT] > 0
    return KL_REWARD_COEFFICIENT if in_reward else None


def _kl_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the KL section: under VAGEN, verl subtracts the divergence from the rewards unless it is in the loss."""
    coefficient = _kl_coefficient_key(values)
    if coefficient is None:
        native.set("algorithm.kl", None, KL_IN_LOSS, KL_IN_REWARD, KL_REWARD_COEFFICIENT, USE_REFERENCE)
        return
    place = "loss" if values[KL_IN_LOSS] else "reward"
    if not values[USE_REFERENCE]:
        needed = f"because {values.describe(KL_IN_LOSS)} needs a reference policy"
        native.remarks.append(f"{values.describe(USE_REFERENCE)} has no effect, {needed}")
    native.set("algorithm.kl.coefficient", float(values[coefficient]), coefficient)
    native.set("algorithm.kl.apply_to", place, KL_IN_LOSS, KL_IN_REWARD, coefficient, USE_REFERENCE)
    if place == "reward":
        native.apply(KL_IN_REWARD_RULES)


def base_tree(experiment: Experiment) -> dict[str, Any]:
    """Return a section for each environment, and those that select verl's reference.

    Raises:
        ConfigError: VAGEN has no such environment, or no such kind of run.
    """
    require_no_stages(experiment, "VAGEN")
    reserved = {key.partition(".")[0] for key in VAGEN.specs()} - {ENV}
    return envs_tree(experiment, reserved) | policy_tree(experiment)


def from_native(foreign: ForeignBuilder) -> None:
    """Convert a native run to VAGEN's format."""
    run, rollout = foreign.experiment, foreign.experiment.rollout
    foreign.apply(RULES)
    foreign.set(SAMPLES, run.training.samples_per_group)
    foreign.set(STEPS, run.training.steps or None)
    foreign.set(RESPONSE, rollout.max_response_tokens)
    foreign.set(TRAJECTORY, rollout.max_prompt_tokens + rollout.max_response_tokens)
    foreign.set(START, rollout.max_start_tokens or rollout.max_prompt_tokens)
    envs_from_native(foreign)
    learning_from_native(foreign)
    _algorithm_from_native(foreign)
    if run.data:
        foreign.set("data.image_key", run.data.image_key or "images")
        foreign.set("data.truncation", run.data.truncation)
    rewards_from_native(foreign)
    run_from_native(foreign)


def _algorithm_from_native(foreign: ForeignBuilder) -> None:
    algorithm = foreign.experiment.algorithm
    export_name(foreign, ADVANTAGE, ESTIMATOR)
    if algorithm.advantage.name == "gae" and not algorithm.advantage_over_response_tokens:
        foreign.set(ESTIMATOR, "gae")
    foreign.set(GAE_MASK, algorithm.advantage_over_response_tokens)
    if getattr(algorithm.advantage, "turn_value", "last") == "first":
        by_turn = algorithm.advantage.name == "turn_wise_gae"
        foreign.set(ESTIMATOR, "turn_update_high_level_gae" if by_turn else "turn_update_bi_level_gae")
    foreign.apply([_discounts(algorithm.advantage.name)])
    if isinstance(algorithm.advantage, GigpoConfig):
        for option, key in GROUP_OPTIONS.items():
            foreign.set(key, getattr(algorithm.advantage, option))
    kl = algorithm.kl
    if kl is None or kl.apply_to != "reward":
        foreign.set(KL_REWARD_COEFFICIENT, 0.0)
        return
    foreign.set(KL_REWARD_COEFFICIENT, kl.coefficient)
    if kl.coefficient == 0:
        foreign.set(KL_IN_REWARD, True)
    foreign.apply(KL_IN_REWARD_RULES)
