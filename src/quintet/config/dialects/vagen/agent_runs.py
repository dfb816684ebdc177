"""Conversion of VAGEN's `vagen_multiturn.yaml` since 2026: agents in lists of environments, over verl's trainer."""

from collections.abc import Iterator
from pathlib import PurePath

from quintet.config.capabilities import Capability
from quintet.config.dialects.algorithm_choice import ADVANTAGE, AlgorithmOptions
from quintet.config.dialects.conversion import ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import MiniBatches
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.vagen.agent_dialect import AGENT_KEYS
from quintet.config.dialects.vagen.agent_envs import TRAIN, entries, env_list_problems, envs_to_native
from quintet.config.dialects.vagen.key_values import LISTS, TABLES, loop_by_turns
from quintet.config.dialects.verl.constraints import ESTIMATOR, MINI_BATCH, PROMPTS, SAMPLES, shared_problems, step_size
from quintet.config.dialects.verl.converter import estimator_to_native
from quintet.config.dialects.verl.critic import critic_defaults
from quintet.config.dialects.verl.kl import KL_IN_LOSS, KL_IN_REWARD, kl_to_native
from quintet.config.dialects.verl.learners import STEPS, learning_to_native
from quintet.config.dialects.verl.run_settings import run_to_native
from quintet.config.problems import ConfigProblem
from quintet.errors import ConfigError

EPOCHS, SEED = "trainer.total_epochs", "data.seed"
PROMPT, RESPONSE = "actor_rollout_ref.rollout.prompt_length", "actor_rollout_ref.rollout.response_length"
CONCATENATES, LOOP = "trainer.concat_multi_turn", "actor_rollout_ref.rollout.agent.agent_loop_config_path"
UNMASKED = "no_concat_gae"
TURN_VALUES = {UNMASKED: "first", "no_concat_gae_first": "first", "no_concat_gae_last": "last"}
"""Token of a turn with its value, by estimator over turns."""
CRITIC = "critic.enable"
FILTER, FILTER_NAME = "filter.enable", "filter.name"
TOP_P = "filter.filter_kwargs.top_p"
TOP_K = "filter.filter_kwargs.topk"
DDOF = "filter.filter_kwargs.ddof"
RULES = (
    MiniBatches(MINI_BATCH, (PROMPTS,), ("training.groups_per_step",)),
    AlgorithmOptions(ADVANTAGE, {"gamma": "algorithm.gamma", "lam": "algorithm.lam"}, default=1.0),
)


def is_agent_run(dialect: Dialect) -> bool:
    """Whether a narrowed dialect is the format since 2026."""
    return any(reference.name == AGENT_KEYS for reference in dialect.references)


def conflicts(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems between keys: those of the lists, and those that VAGEN or verl asserts.

    Raises:
        ConfigError: the file is one of VAGEN's own that names no lists.
    """
    if not any(entries(values, section) or values[key] for section, key in LISTS.items()):
        source = next(iter(values.merged.sources.values()), "").rpartition(":")[0]
        hint = "give a script or file that sets data.train_files and data.val_files"
        raise ConfigError(f"{source} names no lists of environments: it is no run", source=source, hint=hint)
    yield from env_list_problems(values)
    yield from values.divisor_problems(
        MINI_BATCH, values[PROMPTS], f"environments of a step, from {values.describe(PROMPTS)}"
    )
    has_reference = bool(values[KL_IN_LOSS] or values[KL_IN_REWARD])
    yield from shared_problems(values, step_size(values), SAMPLES, has_reference=has_reference)
    yield from _turn_problems(values)


def _listed(values: ForeignValues) -> int:
    """Return the environments of a pass over the training list."""
    return sum(entry["n_envs"] for entry in entries(values, TRAIN))


def _turn_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield what does not fit together in runs that train on turns, and in those that train on episodes."""
    by_turns = not values[CONCATENATES]
    if (values[ESTIMATOR] in TURN_VALUES) > by_turns:
        problem = f"needs turns without earlier ones in their context, and {values.describe(CONCATENATES)}"
        yield values.problem(ESTIMATOR, problem, f"{CONCATENATES}=false, or {ESTIMATOR}=gae")
    if values[ESTIMATOR] in TURN_VALUES and not values[CRITIC]:
        problem = f"{values.describe(ESTIMATOR)} needs a critic, which verl only trains if this is true"
        yield values.problem(CRITIC, problem, f"{CRITIC}=true")
    if values[LOOP] is not None and loop_by_turns(str(values[LOOP])) not in (by_turns, None):
        file = PurePath(values[LOOP]).with_name("agent_no_concat.yaml" if by_turns else "agent.yaml")
        problem = f"is the agent loop of other runs than those with {values.describe(CONCATENATES)}"
        yield values.problem(LOOP, problem, f"{LOOP}={file}, or {CONCATENATES}={str(by_turns).lower()}")


def to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a configuration of agents in lists of environments."""
    native.set("warm_start", None)
    critic_defaults(values, native)
    native.set_from_keys(values.dialect.specs().values())
    native.set_constants(TABLES["constants"])
    estimator_to_native(values, native)
    _turn_estimator_to_native(values, native)
    native.apply(RULES)
    envs_to_native(values, native)
    _turns_to_native(values, native)
    _filter_to_native(values, native)
    _lengths_to_native(values, native)
    _steps_to_native(values, native)
    in_loss, in_reward = bool(values[KL_IN_LOSS]), bool(values[KL_IN_REWARD])
    kl_to_native(values, native, KL_IN_LOSS, KL_IN_REWARD, in_loss=in_loss, in_reward=in_reward)
    learning_to_native(values, native)
    run_to_native(values, native)


def _turns_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Train on episodes, or on turns that each have the system message and one observation as context."""
    by_turns = not values[CONCATENATES]
    native.set("rollout.window_size", 1 if by_turns else None, CONCATENATES)
    native.set("algorithm.turn_rewards", by_turns, CONCATENATES)
    size = values[MINI_BATCH] * values[SAMPLES] if by_turns else None
    native.set("training.mini_batch_sequences", size, CONCATENATES, MINI_BATCH, SAMPLES)
    if not by_turns:
        return
    if values[ESTIMATOR] not in TURN_VALUES:
        native.require(ESTIMATOR, Capability.TURN_ESTIMATORS)
    if values[KL_IN_REWARD]:
        native.require(KL_IN_REWARD, Capability.TURN_ESTIMATORS)


def _turn_estimator_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set how the estimators over turns read the value of a turn, and what they whiten over."""
    if values[ESTIMATOR] in TURN_VALUES:
        native.set(f"{ADVANTAGE}.turn_value", TURN_VALUES[values[ESTIMATOR]], ESTIMATOR)
        native.set(f"{ADVANTAGE}.whiten_over", "tokens", ESTIMATOR)
    if values[ESTIMATOR] == UNMASKED:
        native.remarks.append(
            f"{values.describe(ESTIMATOR)}: the critic learns the values of first tokens only; VAGEN's trainer has no "
            "mask for this name, so that its critic also learns the placeholder -100 at all other tokens"
        )


def _filter_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the filter of groups by the variance of their rewards, which VAGEN applies to advantages."""
    if not values[FILTER]:
        return
    if not values[CONCATENATES]:
        native.require(FILTER, Capability.GROUP_FILTERS)
    section = "algorithm.filter"
    native.set(f"{section}.keep_by", "variance", FILTER, FILTER_NAME)
    native.set(f"{section}.ddof", values[DDOF], DDOF)
    native.set(f"{section}.after_advantages", True, FILTER)
    if values[FILTER_NAME] == "reward_variance":
        native.set(f"{section}.keep_share", float(values[TOP_K]), TOP_K, FILTER_NAME)
        return
    # with all of the variance, groups without any are left out
    top_p = float(values[TOP_P])
    native.set(f"{section}.top_p", top_p, TOP_P, FILTER_NAME)
    native.set(f"{section}.drop_zero", top_p == 1.0, TOP_P, FILTER_NAME)
    native.set(f"{section}.keep_all_if_empty", True, FILTER_NAME)
    native.set(f"{section}.scale_advantages", "sqrt", FILTER_NAME)


def _lengths_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Limit the context so that each response fits into the prompt and the responses that VAGEN allows together."""
    longest = native.get("rollout.max_response_tokens")
    native.set("rollout.max_prompt_tokens", values[PROMPT] + values[RESPONSE] - longest, PROMPT, RESPONSE)
    # a response that fills all that VAGEN allows is the last one
    native.set("rollout.truncation_ends_episode", longest >= values[RESPONSE], RESPONSE)


def _steps_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the number of steps: that of the trainer, or that of the passes over the list, whichever ends first."""
    of_passes = _listed(values) // values[PROMPTS] * values[EPOCHS]
    limit = values[STEPS] if (values[STEPS] or -1) > 0 else of_passes
    sizes = (entry.key("n_envs") for entry in entries(values, TRAIN))
    native.set("training.steps", min(limit, of_passes), STEPS, EPOCHS, PROMPTS, *sizes)
    if _listed(values) < values[PROMPTS]:
        problem = (
            f"a step needs more environments than the {_listed(values)} of the training list, so that there is none;"
            " VAGEN ends because its train dataloader is empty"
        )
        native.unsupported[PROMPTS] = values.problem(PROMPTS, problem, f"at most: {PROMPTS}={_listed(values)}")
    if values[SEED] is not None:
        native.set("seed", values[SEED], SEED)
