"""Conversion of ROLL's estimators, losses, KL penalty and rollout correction.

If ROLL normalises rewards by group and then sums them up by token (`grpo` with a discount, with `reward_clip` or with a
penalty on each token), the native estimator is `reinforce` of shaped rewards: the native `grpo` compares whole rewards,
penalties included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
from quintet.config.dialects.conversion_rules import Same, apply_from_native, inverted
from quintet.config.dialects.ledger import load_keys
from quintet.config.dialects.roll.key_values import (
    ADVANTAGES,
    CORRECTION,
    ESTIMATORS,
    LEVELS,
    PG_WORKERS,
    POLICY,
    VARIANTS,
)
from quintet.config.dialects.value_types import is_function_address
from quintet.config.problems import ConfigProblem

ESTIMATOR, VARIANT, WORKER_CLASS, RATIOS = (
    "adv_estimator",
    f"{POLICY}pg_variant",
    f"{POLICY}worker_cls",
    "importance_sampling",
)
KL_IN_LOSS, KL_IN_REWARD, DUAL_CLIP = "use_kl_loss", "add_token_level_kl", "dual_clip_loss"
WEIGHT, FILTERS = f"{CORRECTION}is_weight.", f"{CORRECTION}filters"
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
LOSS_OPTIONS = {
    "cispo": {"clip_low": f"{POLICY}cispo_epsilon_low", "clip_high": f"{POLICY}cispo_epsilon_high"},
    "topr": {"positive_weight": f"{POLICY}topr_positive_weight", "negative_weight": f"{POLICY}topr_negative_weight"},
    "kimi": {"tau": f"{POLICY}kimi15_tau"},
}
"""Foreign keys of the options of a native loss."""
EXPORTED_VARIANTS = inverted(VARIANTS) | {"gpg": "vanilla", "cispo": "cispo"}
SHAPING_RULES = tuple(
    Same(
        f"algorithm.shaping.{native}",
        foreign,
        to_value=lambda scope: scope or "none",
        from_value=lambda scope: None if scope == "none" else scope,
    )
    for native, foreign in {"center": "norm_mean_type", "divide": "norm_std_type"}.items()
)
REWARD_CLIP = Same("algorithm.shaping.clip", "reward_clip")
WHITEN = Same(f"{ADVANTAGE}.whiten", "whiten_advantages")


def trains_critic(values: ForeignValues, has_section: bool) -> bool:
    """Whether a critic is trained; `has_section` tells whether the file has a section for one."""
    if not values.is_set(ESTIMATOR):
        return has_section
    if is_function_address(values[ESTIMATOR]):
        return has_section
    return bool(config_class(ADVANTAGE, values[ESTIMATOR], ADVANTAGES).uses_values)


def needs_reference(values: ForeignValues) -> bool:
    """Whether a KL divergence from the reference counts."""
    return bool(values[KL_IN_REWARD] or values[KL_IN_LOSS])


def algorithm_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems between keys of the algorithm."""
    if values[KL_IN_LOSS] and values[KL_IN_REWARD]:
        problem = f"the KL divergence already counts in the rewards: {values.describe(KL_IN_REWARD)}"
        yield values.problem(KL_IN_LOSS, problem, "keep one of them")
    if values[WORKER_CLASS] in PG_WORKERS and values[VARIANT] is None:
        yield values.problem(WORKER_CLASS, f"needs {VARIANT}", f"set {VARIANT}=vanilla, or another variant")
    if values[RATIOS] == "seq":
        ratios = f"sequence-level ratios, from {values.describe(RATIOS)},"
        if values[DUAL_CLIP]:
            yield values.problem(DUAL_CLIP, f"{ratios} have no dual clip", f"set {DUAL_CLIP}=false")
        if VARIANTS[values[VARIANT]] != "ppo":
            yield values.problem(
                VARIANT, f"needs a ratio for each token: {values.describe(RATIOS)}", f"set {RATIOS}=token"
            )
    for spec in load_keys("roll", "roll_algorithm"):
        critic_key = f"critic.{spec.key.removeprefix(POLICY)}"
        if spec.key.startswith(POLICY) and values.is_set(critic_key) and values[critic_key] != values[spec.key]:
            yield values.problem(critic_key, f"only the policy has it: {values.describe(spec.key)}", "leave it out")


def algorithm_to_native(values: ForeignValues, native: NativeBuilder, has_critic: bool) -> None:
    """Set estimator, loss and rollout correction; `has_critic` tells whether the file has a section for a critic."""
    _advantage_to_native(values, native, has_critic)
    _loss_to_native(values, native)
    _correction_to_native(values, native)


def _advantage_to_native(values: ForeignValues, native: NativeBuilder, has_critic: bool) -> None:
    name, origins = _estimator(values, has_critic)
    if name == "grpo" and (by_token := _keys_by_token(values)):
        choose(native, ADVANTAGE, "reinforce", ADVANTAGES, *origins, *by_token)
        native.set("algorithm.shaping.center", "group", *origins)
        native.set("algorithm.shaping.divide", "group", *origins)
    else:
        choose(native, ADVANTAGE, name, ADVANTAGES, *origins)
        for rule in SHAPING_RULES if name != "grpo" else ():
            rule.to_native(values, native)
    REWARD_CLIP.to_native(values, native)
    # a user's own function only gets the options that the user set
    options = {
        option: (float(values[key]), (key,) if values.is_set(key) else ()) for option, key in OPTIONS.keys.items()
    }
    set_options(native, ADVANTAGE, options)
    WHITEN.to_native(values, native)
    if is_function_address(name):
        native.set(f"{ADVANTAGE}.needs_critic", has_critic)


def _estimator(values: ForeignValues, has_critic: bool) -> tuple[str, tuple[str, ...]]:
    """Return ROLL's name of the estimator and the keys that it follows from, also those of a critic without effect."""
    specs = values.dialect.specs()
    unused = () if trains_critic(values, has_critic) else tuple(key for key in specs if key.startswith("critic."))
    if values.is_set(ESTIMATOR):
        return values[ESTIMATOR], (ESTIMATOR, *unused)
    # ROLL's own default is always gae, but its reference has files without a critic
    return "gae" if has_critic else "grpo", unused


def _keys_by_token(values: ForeignValues) -> tuple[str, ...]:
    """Return the keys that make ROLL sum up rewards by token after comparing them by group."""
    conditions = {
        "gamma": values["gamma"] != 1,
        "reward_clip": values["reward_clip"] is not None,
        KL_IN_REWARD: values[KL_IN_REWARD],
    }
    return tuple(key for key, by_token in conditions.items() if by_token)


def _loss_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    loss, origin = ("gspo", RATIOS) if values[RATIOS] == "seq" else (VARIANTS[values[VARIANT]], VARIANT)
    native.set(LOSS, {"name": loss}, *dict.fromkeys((origin, WORKER_CLASS, RATIOS)))
    if loss in ("ppo", "gspo"):
        _clip_to_native(values, native, loss)
    elif values[VARIANT] == "tis":
        low, high = f"{POLICY}tis_lower_bound", f"{POLICY}tis_upper_bound"
        native.set(f"{LOSS}.clip_low", min(1.0 - values[low], 1.0 - TINY), low)
        native.set(f"{LOSS}.clip_high", max(values[high] - 1.0, TINY), high)
    else:
        for option, key in LOSS_OPTIONS.get(loss, {}).items():
            native.set(f"{LOSS}.{option}", float(values[key]), key)


def _clip_to_native(values: ForeignValues, native: NativeBuilder, loss: str) -> None:
    asymmetric, both = "use_pg_clip_range", "pg_clip"
    low, high = ("pg_clip_low", "pg_clip_high") if values[asymmetric] else (both, both)
    native.set(f"{LOSS}.clip_low", float(values[low]), low, asymmetric)
    native.set(f"{LOSS}.clip_high", float(values[high]), high, asymmetric)
    if loss == "ppo":
        native.set(f"{LOSS}.clip_dual", 1.0 + 2.0 * values[both] if values[DUAL_CLIP] else None, DUAL_CLIP, both)


def kl_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the KL section of a run with a reference."""
    if values[KL_IN_LOSS]:
        native.set("algorithm.kl.apply_to", "loss", KL_IN_LOSS)
        native.set("algorithm.kl.estimator", "k3", KL_IN_LOSS)
        native.set("algorithm.kl.coefficient", float(values["kl_loss_coef"]), "kl_loss_coef")
        return
    native.set("algorithm.kl.apply_to", "reward", KL_IN_REWARD)
    native.set("algorithm.kl.estimator", "k1")
    native.set("algorithm.kl.coefficient", 0.0, KL_IN_REWARD)
    if values[KL_IN_REWARD]:
        native.set("algorithm.kl.estimator", ESTIMATORS[values["kl_penalty"]], "kl_penalty")
        native.set("algorithm.kl.coefficient", float(values["init_kl_coef"]), "init_kl_coef", KL_IN_REWARD)
        native.set("algorithm.kl.target", values["target_kl"], "target_kl")
        native.set("algorithm.kl.horizon", values["kl_horizon"], "kl_horizon")


def _correction_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    enabled, level, upper = (f"{WEIGHT}{name}" for name in ("enabled", "weight_type", "upper_bound"))
    filters = [ratio_filter for ratio_filter in values[FILTERS] if _rejects(ratio_filter)]
    if not values[enabled] and not filters:
        native.set("algorithm.correction", None, enabled, FILTERS)
        return
    if values[enabled]:
        native.set("algorithm.correction.level", values[level], enabled, level, f"{WEIGHT}detach")
        native.set("algorithm.correction.upper", float(values[upper]), upper)
    else:
        native.set("algorithm.correction.level", None, FILTERS, enabled)
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
    export_name(foreign, ADVANTAGE, ESTIMATOR, ADVANTAGES)
    apply_from_native((OPTIONS, WHITEN, *SHAPING_RULES, REWARD_CLIP), foreign)
    _loss_from_native(foreign)
    _kl_from_native(foreign)
    _correction_from_native(foreign)


def _loss_from_native(foreign: ForeignBuilder) -> None:
    loss: Any = foreign.experiment.algorithm.loss
    if loss.name in ("ppo", "gspo"):
        foreign.set(RATIOS, "seq" if loss.name == "gspo" else "token")
        is_symmetric, dual = loss.clip_low == loss.clip_high, getattr(loss, "clip_dual", None)
        clip = loss.clip_low if dual is None else (dual - 1.0) / 2.0
        foreign.set(DUAL_CLIP, dual is not None)
        foreign.set("pg_clip", _shortest(clip))
        foreign.set("use_pg_clip_range", not is_symmetric or clip != loss.clip_low)
        foreign.set("pg_clip_low", loss.clip_low)
        foreign.set("pg_clip_high", loss.clip_high)
        return
    if loss.name in EXPORTED_VARIANTS:
        foreign.set(VARIANT, EXPORTED_VARIANTS[loss.name])
    for option, key in LOSS_OPTIONS.get(loss.name, {}).items():
        foreign.set(key, getattr(loss, option))


def _shortest(clip: float) -> float:
    """Return the shortest number with the same dual bound, 1 + 2 * clip."""
    rounded = (round(clip, digits) for digits in range(1, 17))
    return next((number for number in rounded if 1.0 + 2.0 * number == 1.0 + 2.0 * clip), clip)


def _kl_from_native(foreign: ForeignBuilder) -> None:
    kl = foreign.experiment.algorithm.kl
    if kl is None:
        return
    in_loss, in_reward = kl.apply_to == "loss", kl.apply_to == "reward" and kl.coefficient > 0
    foreign.set(KL_IN_LOSS, in_loss)
    foreign.set(KL_IN_REWARD, in_reward)
    if in_loss:
        foreign.set("kl_loss_coef", kl.coefficient)
    if in_reward:
        foreign.set("init_kl_coef", kl.coefficient)
        foreign.set("kl_penalty", inverted(ESTIMATORS).get(kl.estimator, "kl"))
        foreign.set("target_kl", kl.target)
        foreign.set("kl_horizon", kl.horizon)


def _correction_from_native(foreign: ForeignBuilder) -> None:
    correction = foreign.experiment.algorithm.correction
    if correction is None:
        return
    foreign.set(f"{WEIGHT}enabled", correction.level is not None)
    if correction.level is not None:
        foreign.set(f"{WEIGHT}weight_type", correction.level)
        foreign.set(f"{WEIGHT}upper_bound", correction.upper)
    levels = inverted(LEVELS)
    filters = [
        {
            "enabled": True,
            "agg_type": levels[rejection.over],
            "ratio_low": 1.0 / rejection.upper,
            "ratio_high": 1.0 / rejection.lower if rejection.lower else rejection.upper,
        }
        for rejection in correction.reject
        if rejection.estimator == "k1" and rejection.over in levels
    ]
    foreign.set(FILTERS, filters)
