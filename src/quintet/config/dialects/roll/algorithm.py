"""What a ROLL run learns from: estimators, losses, the divergence from the reference and the engine's gap.

Where ROLL normalises rewards by group and then sums them up by token (`grpo` with a discount, with `reward_clip` or
with a penalty on each token), that is `reinforce` of shaped rewards here: the native `grpo` compares whole rewards,
penalties included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.chosen import choose, express_choice, give_options, is_outside, option_of
from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.roll.algorithm_keys import (
    ADVANTAGES,
    CORRECTION,
    ESTIMATORS,
    LEVELS,
    PG_WORKERS,
    POLICY,
    ROLL_ALGORITHM_KEYS,
    VARIANTS,
)
from quintet.config.faults import Fault

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["algorithm_rules", "convert_algorithm", "express_algorithm", "needs_reference", "trains_critic"]

ADVANTAGE, LOSS = "algorithm.advantage", "algorithm.loss"
ESTIMATOR, VARIANT, RATIOS = "adv_estimator", f"{POLICY}pg_variant", "importance_sampling"
WEIGHT, FILTERS = f"{CORRECTION}is_weight.", f"{CORRECTION}filters"
TINY = 1e-12
"""Instead of 0: the native `cispo` wants bounds above and below 1. No weight in float32 differs by it."""


def trains_critic(values: Values, given: bool) -> bool:
    """Whether a critic learns; `given` where the file has a section for one."""
    if not values.given(ESTIMATOR):
        return given
    return values[ESTIMATOR] == "gae" or (is_outside(values[ESTIMATOR]) and given)


def needs_reference(values: Values) -> bool:
    """Whether a divergence from the reference costs anything."""
    return bool(values["add_token_level_kl"] or values["use_kl_loss"])


def algorithm_rules(values: Values) -> Iterator[Fault]:
    """What holds between these keys."""
    both = "use_kl_loss"
    if values[both] and values["add_token_level_kl"]:
        problem = f"the divergence is a penalty on rewards already: {values.told('add_token_level_kl')}"
        yield values.fault(both, problem, "keep one of them")
    if values[f"{POLICY}worker_cls"] in PG_WORKERS and values[VARIANT] is None:
        problem = f"asks {VARIANT}, which nobody gave"
        yield values.fault(f"{POLICY}worker_cls", problem, f"set {VARIANT}=vanilla, or another")
    if values[RATIOS] == "seq":
        yield from _sequence_ratios(values)
    for row in ROLL_ALGORITHM_KEYS:
        other = f"critic.{row.key.removeprefix(POLICY)}"
        if row.key.startswith(POLICY) and values.given(other) and values[other] != values[row.key]:
            yield values.fault(other, f"only the policy has it: {values.told(row.key)}", "leave it out")


def _sequence_ratios(values: Values) -> Iterator[Fault]:
    if values["dual_clip_loss"]:
        problem = f"ratios of whole replies have no second bound here: {values.told(RATIOS)}"
        yield values.fault("dual_clip_loss", problem, "set dual_clip_loss=false")
    if VARIANTS[values[VARIANT]] != "ppo":
        yield values.fault(VARIANT, f"has a ratio for each token: {values.told(RATIOS)}", f"set {RATIOS}=token")


def convert_algorithm(values: Values, native: Native, critic: bool) -> None:
    """What is learnt from what; `critic` where the file has a section for one."""
    _advantage(values, native, critic)
    _loss(values, native)
    _correction(values, native)


def _advantage(values: Values, native: Native, critic: bool) -> None:
    name, origins = _estimator(values, critic)
    if name == "grpo" and (by := _by_tokens(values)):
        choose(native, ADVANTAGE, "reinforce", ADVANTAGES, *origins, *by)
        native.put("algorithm.shaping.center", "group", *origins)
        native.put("algorithm.shaping.divide", "group", *origins)
    else:
        choose(native, ADVANTAGE, name, ADVANTAGES, *origins)
        if name != "grpo":
            for key, ours in {"norm_mean_type": "center", "norm_std_type": "divide"}.items():
                native.put(f"algorithm.shaping.{ours}", values[key] or "none", key)
    native.put("algorithm.shaping.clip", values["reward_clip"], "reward_clip")
    told = {key: _origins(values, key) for key in ("gamma", "lambd")}
    give_options(
        native,
        ADVANTAGE,
        {
            "gamma": (float(values["gamma"]), told["gamma"]),
            "lam": (float(values["lambd"]), told["lambd"]),
            "turn_gamma": (float(values["step_reward_gamma"]), _origins(values, "step_reward_gamma")),
            "game_weight": (float(values["episode_reward_weight"]), _origins(values, "episode_reward_weight")),
            "turn_weight": (float(values["step_reward_weight"]), _origins(values, "step_reward_weight")),
        },
    )
    native.put(f"{ADVANTAGE}.whiten", values["whiten_advantages"], "whiten_advantages")
    if is_outside(name):
        native.put(f"{ADVANTAGE}.needs_critic", critic)


def _estimator(values: Values, critic: bool) -> tuple[str, tuple[str, ...]]:
    """Its name, and the keys that it follows from: without a critic, those of one ask for nothing."""
    rows = values.dialect.rows()
    none = () if trains_critic(values, critic) else tuple(key for key in rows if key.startswith("critic."))
    if values.given(ESTIMATOR):
        return values[ESTIMATOR], (ESTIMATOR, *none)
    # ROLL's own default is gae throughout, and its reference shows files without a critic
    return "gae" if critic else "grpo", none


def _by_tokens(values: Values) -> tuple[str, ...]:
    """Why rewards that were compared within groups are summed up by token: the keys, none where nothing asks for it."""
    asks = {
        "gamma": values["gamma"] != 1,
        "reward_clip": values["reward_clip"] is not None,
        "add_token_level_kl": values["add_token_level_kl"],
    }
    return tuple(key for key, told in asks.items() if told)


def _origins(values: Values, key: str) -> tuple[str, ...]:
    """The key where somebody gave it: functions of people's own are handed no others."""
    return (key,) if values.given(key) else ()


def _loss(values: Values, native: Native) -> None:
    loss, origin = VARIANTS[values[VARIANT]], VARIANT
    if values[RATIOS] == "seq":
        loss, origin = "gspo", RATIOS
    native.put(LOSS, {"name": loss}, *dict.fromkeys((origin, f"{POLICY}worker_cls", RATIOS)))
    for option, (value, *origins) in _bounds(values, loss).items():
        native.put(f"{LOSS}.{option}", value, *origins)


def _bounds(values: Values, loss: str) -> dict[str, tuple[Any, ...]]:
    """The options of a loss: value and keys that it follows from."""
    if loss in ("ppo", "gspo"):
        return _clips(values, loss)
    if values[VARIANT] == "tis":
        low, high = f"{POLICY}tis_lower_bound", f"{POLICY}tis_upper_bound"
        clips = min(1.0 - values[low], 1.0 - TINY), max(values[high] - 1.0, TINY)
        return {"clip_low": (clips[0], low), "clip_high": (clips[1], high)}
    named = {
        "cispo": {"clip_low": "cispo_epsilon_low", "clip_high": "cispo_epsilon_high"},
        "topr": {"positive_weight": "topr_positive_weight", "negative_weight": "topr_negative_weight"},
        "kimi": {"tau": "kimi15_tau"},
    }
    return {option: (float(values[POLICY + key]), POLICY + key) for option, key in named.get(loss, {}).items()}


def _clips(values: Values, loss: str) -> dict[str, tuple[Any, ...]]:
    own, both = "use_pg_clip_range", "pg_clip"
    low, high = ("pg_clip_low", "pg_clip_high") if values[own] else (both, both)
    clips: dict[str, tuple[Any, ...]] = {
        "clip_low": (float(values[low]), low, own),
        "clip_high": (float(values[high]), high, own),
    }
    if loss == "ppo":
        dual = "dual_clip_loss"
        clips["clip_dual"] = (1.0 + 2.0 * values[both] if values[dual] else None, dual, both)
    return clips


def convert_kl(values: Values, native: Native) -> None:
    """What it costs to leave the reference, where there is one."""
    term, penalty = "use_kl_loss", "add_token_level_kl"
    if values[term]:
        native.put("algorithm.kl.place", "loss", term)
        native.put("algorithm.kl.estimator", "k3", term)
        native.put("algorithm.kl.coefficient", float(values["kl_loss_coef"]), "kl_loss_coef")
        return
    native.put("algorithm.kl.place", "reward", penalty)
    native.put("algorithm.kl.estimator", "k1")
    native.put("algorithm.kl.coefficient", 0.0, penalty)
    if values[penalty]:
        native.put("algorithm.kl.estimator", ESTIMATORS[values["kl_penalty"]], "kl_penalty")
        native.put("algorithm.kl.coefficient", float(values["init_kl_coef"]), "init_kl_coef", penalty)
        native.put("algorithm.kl.target", values["target_kl"], "target_kl")
        native.put("algorithm.kl.horizon", values["kl_horizon"], "kl_horizon")


def _correction(values: Values, native: Native) -> None:
    weighs, filters = f"{WEIGHT}enabled", [one for one in values[FILTERS] if _asks(one)]
    if not values[weighs] and not filters:
        native.put("algorithm.correction", None, weighs, FILTERS)
        return
    level = f"{WEIGHT}weight_type"
    native.put(
        "algorithm.correction.level", values[level] if values[weighs] else None, weighs, level, f"{WEIGHT}detach"
    )
    if values[weighs]:
        native.put("algorithm.correction.upper", float(values[f"{WEIGHT}upper_bound"]), f"{WEIGHT}upper_bound")
    else:
        native.put("algorithm.correction.level", None, FILTERS, weighs)
    native.put("algorithm.correction.reject", list(map(_rejection, filters)), FILTERS)


def _asks(one: dict[str, Any]) -> bool:
    """Whether a filter leaves anything out."""
    return bool(one.get("enabled", False) and one.get("ratio_enabled", True))


def _rejection(one: dict[str, Any]) -> dict[str, Any]:
    """ROLL bounds the learner's probability over the engine's, the native `k1` its inverse."""
    return {
        "estimator": "k1",
        "over": LEVELS[one.get("agg_type", "token")],
        "upper": 1.0 / one.get("ratio_low", 0.8),
        "lower": 1.0 / one.get("ratio_high", 1.2),
    }


def express_algorithm(foreign: Foreign) -> None:
    """The same in ROLL's words."""
    algorithm = foreign.experiment.algorithm
    express_choice(foreign, ADVANTAGE, ESTIMATOR, ADVANTAGES)
    options = {"gamma": "gamma", "lambd": "lam", "step_reward_gamma": "turn_gamma"}
    options |= {"episode_reward_weight": "game_weight", "step_reward_weight": "turn_weight"}
    for key, option in options.items():
        if (value := option_of(algorithm.advantage, option, None)) is not None:
            foreign.put(key, value)
    foreign.put("whiten_advantages", algorithm.advantage.whiten)
    for key, over in {"norm_mean_type": algorithm.shaping.center, "norm_std_type": algorithm.shaping.divide}.items():
        foreign.put(key, None if over == "none" else over)
    foreign.put("reward_clip", algorithm.shaping.clip)
    _express_loss(foreign)
    _express_kl(foreign)
    _express_correction(foreign)


def _express_loss(foreign: Foreign) -> None:
    loss: Any = foreign.experiment.algorithm.loss
    if loss.name in ("ppo", "gspo"):
        foreign.put(RATIOS, "seq" if loss.name == "gspo" else "token")
        same, dual = loss.clip_low == loss.clip_high, getattr(loss, "clip_dual", None)
        foreign.put("dual_clip_loss", dual is not None)
        base = loss.clip_low if dual is None else (dual - 1.0) / 2.0
        foreign.put("pg_clip", _shortest(base))
        foreign.put("use_pg_clip_range", not same or base != loss.clip_low)
        foreign.put("pg_clip_low", loss.clip_low)
        foreign.put("pg_clip_high", loss.clip_high)
        return
    variants = {"reinforce": "vanilla", "gpg": "vanilla", "topr": "topr", "cispo": "cispo", "kimi": "kimi15"}
    if loss.name in variants:
        foreign.put(VARIANT, variants[loss.name])
    named = {"clip_low": "cispo_epsilon_low", "clip_high": "cispo_epsilon_high", "tau": "kimi15_tau"}
    named |= {f"{sign}_weight": f"topr_{sign}_weight" for sign in ("positive", "negative")}
    for option, key in named.items():
        if (value := getattr(loss, option, None)) is not None:
            foreign.put(POLICY + key, value)


def _shortest(base: float) -> float:
    """The shortest number whose double and 1 make the same bound."""
    return next(
        (short for digits in range(1, 17) if 1.0 + 2.0 * (short := round(base, digits)) == 1.0 + 2.0 * base), base
    )


def _express_kl(foreign: Foreign) -> None:
    kl = foreign.experiment.algorithm.kl
    if kl is None:
        return
    term, penalty = kl.place == "loss", kl.place == "reward" and kl.coefficient > 0
    foreign.put("use_kl_loss", term)
    foreign.put("add_token_level_kl", penalty)
    if term:
        foreign.put("kl_loss_coef", kl.coefficient)
    if penalty:
        words = {ours: theirs for theirs, ours in ESTIMATORS.items()}
        foreign.put("init_kl_coef", kl.coefficient)
        foreign.put("kl_penalty", words.get(kl.estimator, "kl"))
        foreign.put("target_kl", kl.target)
        foreign.put("kl_horizon", kl.horizon)


def _express_correction(foreign: Foreign) -> None:
    correction = foreign.experiment.algorithm.correction
    if correction is None:
        return
    foreign.put(f"{WEIGHT}enabled", correction.level is not None)
    if correction.level is not None:
        foreign.put(f"{WEIGHT}weight_type", correction.level)
        foreign.put(f"{WEIGHT}upper_bound", correction.upper)
    words = {ours: theirs for theirs, ours in LEVELS.items()}
    foreign.put(
        FILTERS,
        [
            {
                "enabled": True,
                "agg_type": words[one.over],
                "ratio_low": 1.0 / one.upper,
                "ratio_high": 1.0 / one.lower if one.lower else one.upper,
            }
            for one in correction.reject
            if one.estimator == "k1" and one.over in words
        ],
    )
