"""Conversion of RAGEN's `config/base.yaml` since May 2025: agents in several environments, over verl's trainer."""

from collections.abc import Iterator
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.algorithm_choice import ADVANTAGE, choose, config_class, option_value, set_options
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, MiniBatches, OptionalSection, Same, file_list
from quintet.config.dialects.ragen.custom_envs import (
    TRAIN,
    env_problems,
    envs_from_native,
    envs_to_native,
    group_counts,
)
from quintet.config.dialects.ragen.group_filter import (
    AMOUNT,
    GROUPS,
    MINI_BATCH,
    SAMPLES,
    STRATEGY,
    filter_from_native,
    filter_problems,
    filter_to_native,
)
from quintet.config.dialects.ragen.key_values import TABLES, format_devices, parse_devices
from quintet.config.dialects.verl.batches import StepSize, batch_problems
from quintet.config.dialects.verl.critic import critic_defaults, critic_problems
from quintet.config.dialects.verl.kl import KL_IN_LOSS, KL_IN_REWARD, kl_from_native, kl_to_native
from quintet.config.dialects.verl.learners import learning_from_native, learning_to_native
from quintet.config.dialects.verl.objective import objective_problems
from quintet.config.dialects.verl.run_settings import run_from_native, run_setting_problems, run_to_native
from quintet.config.problems import ConfigProblem

MODEL_TOKENS = "actor_rollout_ref.rollout.max_model_len"
PROMPT, RESPONSE = "actor_rollout_ref.rollout.prompt_length", "actor_rollout_ref.rollout.response_length"
SHARED_MINI_BATCH, CRITIC_MINI_BATCH = "ppo_mini_batch_size", "critic.ppo_mini_batch_size"
CONTEXT, WINDOW, BY_DEVIATION = (
    "agent_proxy.context_window_mode",
    "agent_proxy.max_context_window",
    "algorithm.norm_adv_by_std_in_grpo",
)
SOFT_WEIGHT = "algorithm.soft_advantage_reweight"
NEWER = (STRATEGY, AMOUNT, CONTEXT, "algorithm.zero_task_advantage", SOFT_WEIGHT)
"""Keys by which files of the releases since 2026 are recognised."""
SHARED_MODEL, ADAPTERS = "model_path", "lora.enabled"
ESTIMATOR, BI_LEVEL, LENGTH_WEIGHT = "algorithm.adv_estimator", "algorithm.bi_level_gae", "grpo_advantage_length_weight"
GAMMA = "algorithm.gamma"
TURN_GAMMA = "algorithm.high_level_gamma"
LAMBDA = "algorithm.lam"
GROUPING = "agent_proxy.reward_normalization.grouping"
METHOD = "agent_proxy.reward_normalization.method"
TURN_SCORES = "agent_proxy.use_turn_scores"
USE_REFERENCE = "actor_rollout_ref.actor.use_ref"
DEVICES, DEVICES_PER_NODE = "system.CUDA_VISIBLE_DEVICES", "trainer.n_gpus_per_node"
BETAS = {"actor": "actor_rollout_ref.actor.optim.betas", "critic": "critic.optim.betas"}
LOWEST, HIGHEST = 1.0, 3.0
"""Bounds of `asym_clip`, the first one negative."""
CENTER = {"state": "group", "batch": "batch", "inductive": "batch"}
VALIDATION_SAMPLES = ("es_manager.val.group_size", "trainer.validation_steps")
RULES = (
    MiniBatches(MINI_BATCH, (GROUPS, SAMPLES), ("training.groups_per_step", "training.samples_per_group")),
    Same("seed", "seed.train", to_value=lambda seed: seed or 0),
    Same("rollout.max_response_tokens", RESPONSE),
    Derived(
        "validation.sampling.samples",
        VALIDATION_SAMPLES,
        lambda size, rounds: size * rounds,
        lambda samples: (samples, 1),
    ),
    # RAGEN uses as many of the visible GPUs as a node has
    Derived(
        "placement.visible_devices",
        (DEVICES, DEVICES_PER_NODE),
        lambda visible, per_node: _first_devices(visible, per_node),
        format_devices,
        export_none=False,
    ),
    OptionalSection(
        "policy.lora",
        "actor_rollout_ref.model.lora_rank",
        (
            Same("policy.lora.rank", "actor_rollout_ref.model.lora_rank"),
            Same("policy.lora.alpha", "actor_rollout_ref.model.lora_alpha", to_value=float),
            file_list("policy.lora.target_modules", "actor_rollout_ref.model.target_modules"),
        ),
        off_value=0,
    ),
)


def _first_devices(visible: Any, per_node: int) -> list[int] | None:
    """Return the devices of a node among the visible ones; None if too few are visible."""
    devices = parse_devices(visible)
    return None if devices is None or len(devices) < per_node else devices[:per_node]


def conflicts(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems between keys: those that RAGEN or verl asserts, and settings without a meaning."""
    yield from env_problems(values)
    total = values[GROUPS] * values[SAMPLES]
    episodes = f"episodes of a step, from {values.describe(GROUPS, SAMPLES)}"
    yield from values.divisor_problems(_mini_batch_key(values), total, episodes)
    has_reference = _has_kl_loss(values) or bool(values[KL_IN_REWARD])
    yield from batch_problems(values, _step_size(values), critic=_has_critic(values), reference=has_reference)
    yield from filter_problems(values, _mini_batch_key(values), newer=_is_newer(values))
    yield from _algorithm_problems(values)
    yield from _length_problems(values)
    yield from _device_problems(values)
    yield from objective_problems(values)
    yield from run_setting_problems(values)
    yield from critic_problems(values)


def _has_critic(values: ForeignValues) -> bool:
    return bool(config_class(ADVANTAGE, _estimator(values)).uses_values)


def _max_tokens(values: ForeignValues) -> int:
    """Return the maximum tokens of prompt and response of a turn."""
    return int(values[MODEL_TOKENS] or (values[PROMPT] or 1) + values[RESPONSE])


def _step_size(values: ForeignValues) -> StepSize:
    """Return the size of a training step; RAGEN counts mini-batches in episodes."""
    return StepSize(
        sequences=values[GROUPS] * values[SAMPLES],
        mini_batch=values[MINI_BATCH],
        max_tokens=_max_tokens(values),
        sequences_from=(GROUPS, SAMPLES),
        mini_batch_from=MINI_BATCH,
        max_tokens_from=(MODEL_TOKENS,),
    )


LAST_OF_2025 = "2025-09-06"
"""Last release whose filter of groups is a share of them."""


def _is_newer(values: ForeignValues) -> bool:
    """Whether a file is one of the releases since 2026, which have another filter and compare groups in `grpo`."""
    return any(map(values.is_set, NEWER)) or not values.dialect.is_until(LAST_OF_2025)


def _mini_batch_key(values: ForeignValues) -> str:
    """Return the key of the mini-batch size that the others follow, if the policy's follows it."""
    return SHARED_MINI_BATCH if values[SHARED_MINI_BATCH] == values[MINI_BATCH] else MINI_BATCH


def _algorithm_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    if values[CRITIC_MINI_BATCH] != values[MINI_BATCH]:
        problem = f"critic and policy have the same mini-batches, and {values.describe(MINI_BATCH)}"
        yield values.problem(CRITIC_MINI_BATCH, problem, f"leave {CRITIC_MINI_BATCH} out")
    if values[BI_LEVEL] and values[ESTIMATOR] != "gae":
        yield values.problem(BI_LEVEL, f"needs the estimator gae, not {values.describe(ESTIMATOR)}", f"{ESTIMATOR}=gae")


def _length_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    if _max_tokens(values) <= values[RESPONSE] + 1:
        problem = f"leaves no tokens for the prompt beside {values.describe(RESPONSE)}"
        yield values.problem(MODEL_TOKENS, problem, f"for example {MODEL_TOKENS}={values[RESPONSE] * 9}")


def _device_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield a problem for too few devices, in releases since 2025-05."""
    devices, per_node = parse_devices(values[DEVICES]), values[DEVICES_PER_NODE]
    if devices and len(devices) < per_node and values.is_set(SHARED_MODEL):
        problem = f"names {len(devices)}, but {values.describe(DEVICES_PER_NODE)}"
        names = ",".join(map(str, range(per_node)))
        yield values.problem(DEVICES, problem, f"{DEVICES}=\"'{names}'\", or {DEVICES_PER_NODE}={len(devices)}")


def to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a configuration of agents."""
    native.set("warm_start", None)
    critic_defaults(values, native)
    specs = values.dialect.specs().values()
    native.set_from_keys(spec for spec in specs if not spec.key.startswith("custom_envs."))
    native.set_constants(TABLES["constants"])
    native.apply(RULES)
    tokens = _max_tokens(values) - values[RESPONSE]
    native.set("rollout.max_prompt_tokens", tokens, MODEL_TOKENS, RESPONSE, PROMPT)
    filter_to_native(values, native, newer=_is_newer(values))
    shows_all = values[CONTEXT] == "full" or (values[WINDOW] or 0) < 1
    native.set("rollout.window_size", None if shows_all else values[WINDOW], WINDOW, CONTEXT)
    envs_to_native(values, native)
    _algorithm_to_native(values, native)
    _kl_to_native(values, native)
    learning_to_native(values, native)
    for learner, key in BETAS.items():
        native.set(f"{learner}.optimizer.betas", [float(beta) for beta in values[key]], key)
    run_to_native(values, native)
    if parse_devices(values[DEVICES]) and native.get("placement.visible_devices") is None:
        native.remarks.append(
            f"{values.describe(DEVICES)} names fewer than {values.describe(DEVICES_PER_NODE)}: all devices are visible"
        )
    if values[ADAPTERS] is False:
        native.set("policy.lora", None, ADAPTERS)


def _method(values: ForeignValues) -> str:
    """Return the normalization of rewards: none with rewards of turns, as in RAGEN."""
    return "identity" if values[TURN_SCORES] else str(values[METHOD])


def _estimator(values: ForeignValues) -> str:
    """Return the native estimator. RAGEN's own do not compare episodes, which the normalization of rewards does."""
    compares = values[ESTIMATOR] == "grpo" and values[GROUPING] == "state" and values[SAMPLES] > 1
    if values[ESTIMATOR] == "grpo" and _is_newer(values) and _method(values) == "identity" and values[SAMPLES] > 1:
        return "grpo"
    if values[ESTIMATOR] == "grpo" and not (compares and _method(values) in ("mean", "mean_std")):
        return "raw"
    return "bi_level_gae" if values[BI_LEVEL] else str(values.native(ESTIMATOR))


def _by_deviation(values: ForeignValues) -> tuple[bool, tuple[str, ...]]:
    """Return whether `grpo` divides by the standard deviation, and the keys that say so."""
    if _is_newer(values) and _method(values) == "identity":
        return bool(values[BY_DEVIATION]), (BY_DEVIATION,)
    return _method(values) == "mean_std", (METHOD,)


def _algorithm_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    name, method = _estimator(values), _method(values)
    choose(native, ADVANTAGE, name, ESTIMATOR, BI_LEVEL, METHOD, GROUPING)
    options = {
        "gamma": (float(values[GAMMA]), (GAMMA,)),
        "lam": (float(values[LAMBDA]), (LAMBDA,)),
        "turn_gamma": (float(values[TURN_GAMMA]), (TURN_GAMMA,)),
        "turn_lam": (float(values[LAMBDA]), (LAMBDA,)),
        "normalize_by_std": _by_deviation(values),
        "length_weight": (values[LENGTH_WEIGHT] and values[ESTIMATOR] == "grpo", (LENGTH_WEIGHT, ESTIMATOR)),
        "deviation_weight": (values[SOFT_WEIGHT], (SOFT_WEIGHT,)),
    }
    if values[ESTIMATOR] == "reinforce_plus_plus_baseline":
        options["whiten"] = (True, (ESTIMATOR,))
    set_options(native, ADVANTAGE, options)
    if values[SOFT_WEIGHT] and values[ESTIMATOR] == "grpo" and name != "grpo":
        native.require(SOFT_WEIGHT, Capability.SAMPLE_MASKS)
    elif values[SOFT_WEIGHT] and name != "grpo":
        native.remarks.append(f"{values.describe(SOFT_WEIGHT)} only has an effect with grpo, as in RAGEN")
    shapes = method != "identity" and name != "grpo"
    center = CENTER[values[GROUPING]] if shapes else "none"
    native.set("algorithm.shaping.center", center, GROUPING, METHOD)
    native.set("algorithm.shaping.divide", center if method != "mean" else "none", GROUPING, METHOD)
    if shapes and values[GROUPING] == "inductive" and len(group_counts(values, TRAIN)) > 1:
        native.require(GROUPING, Capability.TURN_ESTIMATORS)
    clips = shapes and method == "asym_clip"
    native.set("algorithm.shaping.clip", HIGHEST if clips else None, METHOD)
    native.set("algorithm.shaping.clip_negative", LOWEST if clips else None, METHOD)
    if values[TURN_SCORES] and values[METHOD] != "identity":
        native.remarks.append(
            f"{values.describe(METHOD)} has no effect with {values.describe(TURN_SCORES)}, as in RAGEN"
        )


def _has_kl_loss(values: ForeignValues) -> bool:
    return bool(values[KL_IN_LOSS] and values[USE_REFERENCE])


def _kl_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    in_loss, in_reward = _has_kl_loss(values), bool(values[KL_IN_REWARD])
    kl_to_native(values, native, KL_IN_LOSS, KL_IN_REWARD, USE_REFERENCE, in_loss=in_loss, in_reward=in_reward)


def from_native(foreign: ForeignBuilder) -> None:
    """Convert a native run to the configuration of agents."""
    run = foreign.experiment
    foreign.apply(RULES)
    for key in (SHARED_MINI_BATCH, CRITIC_MINI_BATCH):
        foreign.set(key, foreign.values[MINI_BATCH])
    foreign.set(MODEL_TOKENS, run.rollout.max_prompt_tokens + run.rollout.max_response_tokens)
    filter_from_native(foreign)
    foreign.set(WINDOW, run.rollout.window_size or -1)
    learning_from_native(foreign)
    for learner, key in BETAS.items():
        foreign.set(key, list(foreign.native_value(f"{learner}.optimizer").betas))
    envs_from_native(foreign)
    _algorithm_from_native(foreign)
    run_from_native(foreign)


def _algorithm_from_native(foreign: ForeignBuilder) -> None:
    algorithm = foreign.experiment.algorithm
    name, shaping = algorithm.advantage.name, algorithm.shaping
    foreign.set(BI_LEVEL, name == "bi_level_gae")
    foreign.set(ESTIMATOR, "gae" if name == "bi_level_gae" else "grpo" if name == "raw" else name)
    for option, key in (("gamma", GAMMA), ("lam", LAMBDA), ("turn_gamma", TURN_GAMMA)):
        foreign.set(key, option_value(foreign, ADVANTAGE, option, 1.0))
    for option, key in (("length_weight", LENGTH_WEIGHT), ("deviation_weight", SOFT_WEIGHT)):
        foreign.set(key, option_value(foreign, ADVANTAGE, option, False))
    method = "mean" if shaping.divide == "none" else "asym_clip" if shaping.clip else "mean_std"
    if name == "grpo":
        method = "mean_std" if option_value(foreign, ADVANTAGE, "normalize_by_std", True) else "mean"
    elif shaping.center == "none":
        method = "identity"
    foreign.set(METHOD, method)
    foreign.set(GROUPING, "batch" if shaping.center == "batch" else "state")
    kl_from_native(foreign)


def agent_tree(envs: dict[str, Any]) -> dict[str, Any]:
    """Return the sections that select the keys of agents."""
    return envs | {"es_manager": {"format_penalty": -0.1}}
