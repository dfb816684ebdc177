"""Conversion of ROLL's estimators, losses, KL penalty and rollout correction.

If ROLL normalises rewards by group and then sums them up by token (`grpo` with a discount, with `reward_clip` or with a
penalty on each token), the native estimator is `reinforce` of shaped rewards: the native `grpo` compares whole rewards,
penalties included. ROLL's KL penalty `full` does not sum over the vocabulary: it is not supported.
"""

from collections.abc import Iterator
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.algorithm_choice import (
    ADVANTAGE,
    LOSS,
    AlgorithmOptions,
    choose,
    config_class,
    export_name,
    set_options,
)
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Same, inverted
from quintet.config.dialects.roll.key_values import LEVELS, SEGMENT
from quintet.config.dialects.value_types import is_function_address
from quintet.config.problems import ConfigProblem

ESTIMATOR, RATIOS = "adv_estimator", "importance_sampling"
VARIANT, WORKER_CLASS = "actor_train.pg_variant", "actor_train.worker_cls"
CLIP, DUAL_CLIP, LOW_AND_HIGH = "pg_clip", "dual_clip_loss", "use_pg_clip_range"
KL_IN_LOSS, KL_IN_REWARD, KL_COEFFICIENT = "use_kl_loss", "add_token_level_kl", "init_kl_coef"
KL_LOSS_COEFFICIENT = "kl_loss_coef"
PENALTY_KEYS = {"estimator": "kl_penalty", "target": "target_kl", "horizon": "kl_horizon"}
WEIGHTS = "train_infer_correction.is_weight.enabled"
WEIGHT_LEVEL = "train_infer_correction.is_weight.weight_type"
DETACH = "train_infer_correction.is_weight.detach"
FILTERS = "train_infer_correction.filters"
NORMALIZATION = "reward_normalization"
GROUPING, METHOD = "reward_normalization.grouping", "reward_normalization.method"
TINY = 1e-12
"""Replaces 0, as the native `cispo` needs bounds above and below 1. No weight in float32 differs by it."""
OPTIONS = AlgorithmOptions(
    ADVANTAGE,
    {
        "gamma": "gamma",
        "lam": "lambd",
        "turn_gamma": "step_reward_gamma",
        "episode_weight": "episode_reward_weight",
        "turn_weight": "step_reward_weight",
    },
)
TOKEN_KEYS = ("gamma", "reward_clip", KL_IN_REWARD)
"""Keys that make ROLL sum up rewards by token after comparing them by group, unless they have their defaults."""
SHAPING_RULES = (
    Same("algorithm.shaping.center", "norm_mean_type"),
    Same("algorithm.shaping.divide", "norm_std_type"),
)


def trains_critic(values: ForeignValues, has_section: bool) -> bool:
    """Whether a critic is trained; `has_section` tells whether the file has a section for one."""
    if not values.is_set(ESTIMATOR) or is_function_address(values[ESTIMATOR]):
        return has_section
    return bool(config_class(ADVANTAGE, values[ESTIMATOR]).uses_values)


def needs_reference(values: ForeignValues) -> bool:
    """Whether a KL divergence from the reference counts."""
    return bool(values[KL_IN_REWARD] or values[KL_IN_LOSS])


def algorithm_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems between keys of the algorithm."""
    reads_variant = "pg_worker" in (values[WORKER_CLASS] or "")
    if reads_variant and values[VARIANT] is None:
        yield values.problem(WORKER_CLASS, f"needs {VARIANT}", f"{VARIANT}=vanilla")
    if values[RATIOS] != "seq":
        return
    ratios = values.describe(RATIOS)
    if values.native(VARIANT) != "ppo":
        yield values.problem(VARIANT, f"needs a ratio for each token: {ratios}", f"set {RATIOS}=token")


def algorithm_to_native(values: ForeignValues, native: NativeBuilder, has_critic: bool) -> None:
    """Set estimator, loss and rollout correction; `has_critic` tells whether the file has a section for a critic.

    The keys of the ledger set options of these afterwards.
    """
    _advantage_to_native(values, native, has_critic)
    _loss_to_native(values, native)
    _correction_to_native(values, native)


def _advantage_to_native(values: ForeignValues, native: NativeBuilder, has_critic: bool) -> None:
    name, origins = _estimator(values, has_critic)
    specs = values.dialect.specs()
    by_token = [key for key in TOKEN_KEYS if values[key] != specs[key].default]
    if GROUPING in specs:
        _turn_advantage_to_native(values, native, name, origins, by_token)
    elif name == "grpo" and by_token:
        choose(native, ADVANTAGE, "reinforce", *origins, *by_token)
        native.set("algorithm.shaping.center", "group", *origins)
        native.set("algorithm.shaping.divide", "group", *origins)
    else:
        choose(native, ADVANTAGE, name, *origins)
        native.apply(SHAPING_RULES if name != "grpo" else ())
    # a user's own function only gets the options that the user set
    options = {
        option: (float(values[key]), (key,) if values.is_set(key) else ()) for option, key in OPTIONS.keys.items()
    }
    set_options(native, ADVANTAGE, options)
    if is_function_address(name):
        native.set(f"{ADVANTAGE}.needs_critic", has_critic)


def _turn_advantage_to_native(
    values: ForeignValues, native: NativeBuilder, name: str, origins: tuple[str, ...], by_token: list[str]
) -> None:
    """Set the estimator of a run in environments, where `reward_normalization` says which episodes are compared."""
    center, divide = _normalization(values, native)
    keys = (GROUPING, METHOD, *(f"{NORMALIZATION}.norm_{kind}_type" for kind in ("mean", "std")), *origins)
    if name == "step_reinforce":
        _step_advantage_to_native(native, center, divide, keys, by_token)
        return
    if name == "agentic_reinforce" and values[KL_IN_REWARD]:
        native.require(KL_IN_REWARD, Capability.TURN_ESTIMATORS)
    in_groups = center == "group" and divide in ("group", "none")
    if name == "grpo" and in_groups and not by_token:
        choose(native, ADVANTAGE, "grpo", *keys)
        native.set(f"{ADVANTAGE}.normalize_by_std", divide == "group", *keys)
        return
    choose(native, ADVANTAGE, "reinforce" if name == "grpo" else name, *keys)
    if name == "gigpo":
        native.set(f"{ADVANTAGE}.normalize_by_std", divide == "group", *keys)
        if not in_groups:
            native.require(METHOD, Capability.TURN_ESTIMATORS)
        return
    native.set("algorithm.shaping.center", center, *keys)
    native.set("algorithm.shaping.divide", divide, *keys)


def _step_advantage_to_native(
    native: NativeBuilder, center: str, divide: str, keys: tuple[str, ...], by_token: list[str]
) -> None:
    """Set the estimator of turns, whose returns ROLL also discounts, clips and penalizes by token."""
    choose(native, ADVANTAGE, "step_reinforce", *keys)
    native.set(f"{ADVANTAGE}.center", center, *keys)
    native.set(f"{ADVANTAGE}.divide", divide, *keys)
    for key in by_token:
        native.require(key, Capability.TURN_ESTIMATORS)


def _normalization(values: ForeignValues, native: NativeBuilder) -> tuple[str, str]:
    """Return the episodes whose mean is subtracted, and by whose deviation rewards are divided."""
    scope = "batch" if values[GROUPING] in ("batch", "global") else "group"
    method = values[METHOD]
    mean = values["reward_normalization.norm_mean_type"] or (None if method == "identity" else scope)
    deviation = values["reward_normalization.norm_std_type"] or (scope if method in ("mean_std", "asym_clip") else None)
    if values[GROUPING] == "tags" and "group" in (mean, deviation):
        # the episodes of the only tag are those of the step
        if len(values["train_env_manager.tags"]) > 1:
            native.require(GROUPING, Capability.TURN_ESTIMATORS)
        mean, deviation = (kind and "batch" for kind in (mean, deviation))
    return mean or "none", deviation or "none"


def _estimator(values: ForeignValues, has_critic: bool) -> tuple[str, tuple[str, ...]]:
    """Return ROLL's name of the estimator and the keys that it follows from, also those of a critic without effect."""
    specs = values.dialect.specs()
    unused = () if trains_critic(values, has_critic) else tuple(key for key in specs if key.startswith("critic."))
    if values.is_set(ESTIMATOR):
        return values[ESTIMATOR], (ESTIMATOR, *unused)
    # ROLL's own default is always gae, but its reference has files without a critic
    return "gae" if has_critic else "grpo", unused


def _loss_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    if values[RATIOS] == "seq" and values[DUAL_CLIP]:
        native.require(DUAL_CLIP, Capability.SEQUENCE_DUAL_CLIP)
    loss, origin = ("gspo", RATIOS) if values[RATIOS] == "seq" else (values.native(VARIANT), VARIANT)
    native.set(LOSS, {"name": loss}, *dict.fromkeys((origin, WORKER_CLASS, RATIOS)))
    if loss in ("ppo", "gspo"):
        low, high = ("pg_clip_low", "pg_clip_high") if values[LOW_AND_HIGH] else (CLIP, CLIP)
        native.set(f"{LOSS}.clip_low", float(values[low]), low, LOW_AND_HIGH)
        native.set(f"{LOSS}.clip_high", float(values[high]), high, LOW_AND_HIGH)
    if loss == "ppo":
        native.set(f"{LOSS}.clip_dual", 1.0 + 2.0 * values[CLIP] if values[DUAL_CLIP] else None, DUAL_CLIP, CLIP)
    if values[VARIANT] == "tis":
        low, high = "actor_train.tis_lower_bound", "actor_train.tis_upper_bound"
        native.set(f"{LOSS}.clip_low", min(1.0 - values[low], 1.0 - TINY), low)
        native.set(f"{LOSS}.clip_high", max(values[high] - 1.0, TINY), high)


def kl_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the KL sections of a run with a reference: in the loss, in the rewards, or only logged."""
    if values[KL_IN_LOSS]:
        native.set("algorithm.kl.apply_to", "loss", KL_IN_LOSS)
        native.set("algorithm.kl.estimator", "k3", KL_IN_LOSS)
        native.set("algorithm.kl.coefficient", float(values[KL_LOSS_COEFFICIENT]), KL_LOSS_COEFFICIENT)
    else:
        native.set("algorithm.kl.apply_to", "reward", KL_IN_REWARD)
    if values[KL_IN_REWARD]:
        _penalty_to_native(values, native, "algorithm.reward_kl" if values[KL_IN_LOSS] else "algorithm.kl")
    elif not values[KL_IN_LOSS]:
        native.set("algorithm.kl.estimator", "k1")
        native.set("algorithm.kl.coefficient", 0.0, KL_IN_REWARD)


def _penalty_to_native(values: ForeignValues, native: NativeBuilder, section: str) -> None:
    native.set(f"{section}.coefficient", float(values[KL_COEFFICIENT]), KL_COEFFICIENT, KL_IN_REWARD)
    for field, key in PENALTY_KEYS.items():
        native.set(f"{section}.{field}", values.native(key), key)


def _correction_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    filters = [ratio_filter for ratio_filter in values[FILTERS] if _rejects(ratio_filter)]
    supported = [each for each in filters if each.get("agg_type") != SEGMENT and not each.get("diff_enabled", False)]
    if supported != filters:
        native.require(FILTERS, Capability.TURN_RATIOS)
        filters = supported
    if not values[WEIGHTS] and not filters:
        native.set("algorithm.correction", None, WEIGHTS, FILTERS)
        return
    if values[WEIGHTS]:
        level = values[WEIGHT_LEVEL] if values[WEIGHT_LEVEL] == "sequence" else "token"
        native.set("algorithm.correction.level", level, WEIGHTS, WEIGHT_LEVEL, DETACH)
    else:
        native.set("algorithm.correction.level", None, FILTERS, WEIGHTS)
    native.set("algorithm.correction.reject", list(map(_rejection_to_native, filters)), FILTERS)


def _rejects(ratio_filter: dict[str, Any]) -> bool:
    return bool(ratio_filter.get("enabled", False) and ratio_filter.get("ratio_enabled", True))


def _rejection_to_native(ratio_filter: dict[str, Any]) -> dict[str, Any]:
    """ROLL bounds the learner's probability divided by the engine's, the native `k1` its inverse."""
    return {
        "estimator": "k1",
        "over": LEVELS[ratio_filter.get("agg_type", "token")],
        "upper": 1.0 / ratio_filter.get("ratio_low", 0.8),
        "lower": 1.0 / ratio_filter.get("ratio_high", 1.2),
    }


def algorithm_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of the algorithm."""
    export_name(foreign, ADVANTAGE, ESTIMATOR)
    foreign.apply((OPTIONS, *SHAPING_RULES))
    _loss_from_native(foreign)
    _kl_from_native(foreign)
    _correction_from_native(foreign)


def _loss_from_native(foreign: ForeignBuilder) -> None:
    loss: Any = foreign.experiment.algorithm.loss
    foreign.set_native(VARIANT, "reinforce" if loss.name == "gpg" else loss.name)
    foreign.set(RATIOS, "seq" if loss.name == "gspo" else "token")
    if loss.name in ("ppo", "gspo"):
        dual = getattr(loss, "clip_dual", None)
        clip = loss.clip_low if dual is None else (dual - 1.0) / 2.0
        foreign.set(DUAL_CLIP, dual is not None)
        foreign.set(CLIP, _shortest(clip))
        foreign.set(LOW_AND_HIGH, not clip == loss.clip_low == loss.clip_high)
        foreign.set("pg_clip_low", loss.clip_low)
        foreign.set("pg_clip_high", loss.clip_high)


def _shortest(clip: float) -> float:
    """Return the shortest number with the same dual bound, 1 + 2 * clip."""
    rounded = (round(clip, digits) for digits in range(1, 17))
    return next((number for number in rounded if 1.0 + 2.0 * number == 1.0 + 2.0 * clip), clip)


def _kl_from_native(foreign: ForeignBuilder) -> None:
    in_loss, in_reward = foreign.experiment.algorithm.kl_in_loss, foreign.experiment.algorithm.kl_in_reward
    foreign.set(KL_IN_LOSS, in_loss is not None)
    if in_loss is not None:
        foreign.set(KL_LOSS_COEFFICIENT, in_loss.coefficient)
    foreign.set(KL_IN_REWARD, in_reward is not None and in_reward.coefficient > 0)
    if in_reward is not None:
        foreign.set(KL_COEFFICIENT, in_reward.coefficient)
        for field, key in PENALTY_KEYS.items():
            foreign.set_native(key, getattr(in_reward, field))


def _correction_from_native(foreign: ForeignBuilder) -> None:
    level, levels = foreign.native_value("algorithm.correction.level"), inverted(LEVELS)
    foreign.set(WEIGHTS, level is not None)
    foreign.set(WEIGHT_LEVEL, level)
    filters = [
        {
            "enabled": True,
            "agg_type": levels[rejection.over],
            "ratio_low": 1.0 / rejection.upper,
            "ratio_high": 1.0 / rejection.lower if rejection.lower else rejection.upper,
        }
        for rejection in foreign.native_value("algorithm.correction.reject", ())
        if rejection.estimator == "k1" and rejection.over in levels
    ]
    foreign.set(FILTERS, filters)
