"""Conversion of verl's policy loss, group filter and rollout correction, and of options of the estimator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quintet.config.dialects.algorithm_choice import (
    ADVANTAGE,
    LOSS,
    choose,
    export_name,
    option_value,
    set_options,
)
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import inverted
from quintet.config.dialects.verl.batches import ACTOR, ROLLOUT
from quintet.config.dialects.verl.key_values import NORMALIZING_ESTIMATOR, parse_bounds
from quintet.config.native.algorithm import CorrectionConfig, RejectionConfig
from quintet.config.problems import ConfigProblem

ESTIMATORS = {"grpo": "grpo", "rloo": "rloo", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""Native names of advantage estimators, where verl has several or others."""
LOSSES = {"vanilla": "ppo", "bypass_mode": "ppo", "geo_mean": "gmpo"}
EXPORTED_LOSSES = {"vanilla": "ppo", "geo_mean": "gmpo", "gpg": "reinforce"}
MODE, CLIP, LOW, HIGH, DUAL = (
    f"{ACTOR}.{key}"
    for key in ("policy_loss.loss_mode", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
)
LOSS_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "sapo": {"temperature_positive": f"{ACTOR}.tau_pos", "temperature_negative": f"{ACTOR}.tau_neg"},
    "dppo_tv": {"max_ratio": DUAL},
    "dppo_kl": {"max_ratio": DUAL},
    "dro": {"beta": f"{ACTOR}.policy_loss.dro_beta"},
    "clip_cov": {
        "share": f"{ACTOR}.policy_loss.clip_cov_ratio",
        "min_covariance": f"{ACTOR}.policy_loss.clip_cov_lb",
        "max_covariance": f"{ACTOR}.policy_loss.clip_cov_ub",
    },
    "kl_cov": {
        "share": f"{ACTOR}.policy_loss.kl_cov_ratio",
        "coefficient": f"{ACTOR}.policy_loss.ppo_kl_coef",
    },
}
"""Foreign keys of the options that a single native loss has."""
NORMALIZE, REWARD_PARTS, REWARD_WEIGHTS = (
    f"algorithm.{key}" for key in ("norm_adv_by_std_in_grpo", "gdpo_reward_keys", "gdpo_reward_weights")
)
FILTER, METRIC, MAX_ROUNDS = (f"algorithm.filter_groups.{key}" for key in ("enable", "metric", "max_num_gen_batches"))
UNLIMITED_ROUNDS = 10**6
BYPASS, BYPASS_LOSS, LEVEL, BOUND, NORMALIZE_WEIGHTS, REJECTIONS, REJECTION_BOUNDS = (
    f"algorithm.rollout_correction.{key}"
    for key in (
        *("bypass_mode", "loss_type", "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"),
        *("rollout_rs", "rollout_rs_threshold"),
    )
)
AGGREGATIONS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}


def _bypasses(values: ForeignValues) -> bool:
    """Whether the engine's log-probs are used in place of the learner's."""
    return values[BYPASS] is True


def loss_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the policy loss. verl trains on groups with equal rewards, unless it filters and replaces them."""
    bypasses = _bypasses(values)
    loss = "reinforce" if bypasses and values[BYPASS_LOSS] == "reinforce" else values[MODE]
    choose(native, LOSS, loss, LOSSES, MODE, *([BYPASS_LOSS, BYPASS] if bypasses else []))
    low, high = ((values[CLIP] if values[key] is None else values[key]) for key in (LOW, HIGH))
    options: dict[str, tuple[Any, tuple[str, ...]]] = {
        "clip_low": (low, (LOW, CLIP)),
        "clip_high": (high, (HIGH, CLIP)),
        "clip_dual": (values[DUAL], (DUAL,)),
    }
    loss_options = LOSS_OPTIONS.get(native.get(f"{LOSS}.name"), {})
    set_options(native, LOSS, options | {option: (values[key], (key,)) for option, key in loss_options.items()})
    replaced = all(values.is_set(key) and values[key] not in (None, values[CLIP]) for key in (LOW, HIGH))
    if replaced and values.is_set(CLIP):
        native.remarks.append(f"{values.describe(CLIP)} has no effect, because of {values.describe(LOW, HIGH)}")
    native.set("algorithm.drop_groups_without_signal", bool(values[FILTER]), FILTER)


def objective_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set options of the estimator, the group filter and the rollout correction."""
    if NORMALIZING_ESTIMATOR.accepts(values["algorithm.adv_estimator"]):
        native.set(f"{ADVANTAGE}.normalize_by_std", values[NORMALIZE], NORMALIZE)
    if native.get(f"{ADVANTAGE}.name") == "gdpo":
        parts = values[REWARD_PARTS] or []
        weights = dict(zip(parts, map(float, values[REWARD_WEIGHTS] or [1.0] * len(parts)), strict=True))
        native.set(f"{ADVANTAGE}.weights", weights, REWARD_PARTS, REWARD_WEIGHTS)
    if values[FILTER]:
        rounds = values[MAX_ROUNDS] - 1 if values[MAX_ROUNDS] > 0 else UNLIMITED_ROUNDS
        native.set("algorithm.filter.refill_rounds", rounds, MAX_ROUNDS, METRIC, FILTER)
        if values[METRIC] in ("acc", "seq_final_reward"):
            native.remarks.append(f"{values.describe(METRIC)}: groups are compared by the rewards of whole responses")
    native.set("rollout.recompute_logprobs", not _bypasses(values), BYPASS)
    correction = None if _bypasses(values) else _correction_to_native(values)
    origins = (LEVEL, BOUND, NORMALIZE_WEIGHTS, REJECTIONS, REJECTION_BOUNDS)
    native.set("algorithm.correction", correction, *origins)


def _correction_to_native(values: ForeignValues) -> dict[str, Any] | None:
    if values[LEVEL] is None and values[REJECTIONS] is None:
        return None
    lower, upper = parse_bounds(values[BOUND]) or (None, 2.0)
    rejections = zip(_rejection_names(values), _rejection_bounds(values), strict=True)
    return {
        "level": values[LEVEL],
        "upper": upper,
        "lower": lower,
        "normalize": values[NORMALIZE_WEIGHTS],
        "reject": [_rejection_to_native(name, *bounds) for name, bounds in rejections],
    }


def _rejection_to_native(name: str, lower: float | None, upper: float) -> dict[str, Any]:
    aggregation, _, estimator = name.rpartition("_")
    lower = lower if estimator == "k1" else None
    return {"estimator": estimator, "over": AGGREGATIONS[aggregation], "upper": upper, "lower": lower}


def _rejection_names(values: ForeignValues) -> list[str]:
    names = values[REJECTIONS]
    return [] if names is None else [*dict.fromkeys(name.strip() for name in names.split(","))]


def _rejection_bounds(values: ForeignValues) -> list[tuple[float | None, float]]:
    """Return the bounds of each rejection; a single bound holds for all."""
    text = values[REJECTION_BOUNDS]
    parsed = [] if text is None else [parse_bounds(part.strip()) for part in str(text).split(",")]
    bounds = [pair for pair in parsed if pair is not None]
    return bounds * len(_rejection_names(values)) if len(bounds) == 1 else bounds


def objective_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of the loss, the rollout correction and the reward weights."""
    beta = LOSS_OPTIONS["dro"]["beta"]
    if values[MODE] == "dro" and values[beta] is None:
        yield values.problem(beta, "the loss dro needs it", f"set it to a number above 0: {beta}=0.1")
    if (values[LOW] or 0) >= 1 and values[MODE] not in ("geo_mean", "dppo_tv", "dppo_kl"):
        yield values.problem(LOW, "must be less than 1: ratios are above 0", f"for example {LOW}=0.2")
    yield from _bypass_problems(values)
    bounds, names = _rejection_bounds(values), _rejection_names(values)
    if names and len(bounds) != len(names):
        problem = f"must have one bound for each of {values.describe(REJECTIONS)}, or one for all"
        yield values.problem(REJECTION_BOUNDS, problem, f"give {len(names)} bounds, joined by commas")
    for name, (lower, _) in zip(names, bounds, strict=False):
        if lower is not None and not name.endswith("k1"):
            yield values.problem(REJECTION_BOUNDS, f"{name} has only an upper bound", "give one number for it")
    parts, weights = values[REWARD_PARTS] or [], values[REWARD_WEIGHTS]
    if values["algorithm.adv_estimator"] == "gdpo" and weights is not None and len(weights) != len(parts):
        problem = f"must have one weight for each of {values.describe(REWARD_PARTS)}"
        yield values.problem(REWARD_WEIGHTS, problem, f"give {len(parts)} weights, or leave it out")


def _bypass_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    if not _bypasses(values):
        if values[MODE] == "bypass_mode":
            yield values.problem(MODE, f"needs {BYPASS}", f"set {BYPASS}=true, or {MODE}=vanilla")
        return
    bypass, loss = values.describe(BYPASS), values.describe(BYPASS_LOSS)
    if values[MODE] not in ("vanilla", "bypass_mode"):
        problem = f"is not read: with {bypass} the loss is that of {loss}"
        yield values.problem(MODE, problem, f"leave it out, or set {BYPASS}=false")
    if values[REJECTIONS] is not None:
        problem = f"with {bypass} verl rejects by the policy that is being updated, which is not supported"
        yield values.problem(REJECTIONS, problem, f"set {BYPASS}=false, or {REJECTIONS}=null")
    if values[BYPASS_LOSS] == "reinforce" and values[LEVEL] is not None:
        problem = f"with {loss} the weights change while the policy is updated, which is not supported"
        yield values.problem(LEVEL, problem, f"set {LEVEL}=null, or {BYPASS_LOSS}=ppo_clip")


def objective_from_native(foreign: ForeignBuilder) -> None:
    """Set verl's keys of loss, group filter and rollout correction, and options of the estimator."""
    algorithm = foreign.experiment.algorithm
    _loss_from_native(foreign)
    if hasattr(algorithm.advantage, "normalize_by_std"):
        foreign.set(NORMALIZE, algorithm.advantage.normalize_by_std)
    if weights := foreign.native_value("algorithm.advantage.weights"):
        foreign.set(REWARD_PARTS, list(weights))
        foreign.set(REWARD_WEIGHTS, None if set(weights.values()) == {1.0} else list(weights.values()))
    rounds = algorithm.filter.refill_rounds
    if rounds:
        foreign.set(FILTER, True)
        foreign.set(MAX_ROUNDS, rounds + 1 if rounds < UNLIMITED_ROUNDS else 0)
    _correction_from_native(foreign)


def _loss_from_native(foreign: ForeignBuilder) -> None:
    loss = foreign.experiment.algorithm.loss
    export_name(foreign, LOSS, MODE, EXPORTED_LOSSES)
    low = option_value(foreign, LOSS, "clip_low", 0.2)
    foreign.set(CLIP, low)
    foreign.set(LOW, low)
    foreign.set(HIGH, option_value(foreign, LOSS, "clip_high", low))
    dual = option_value(foreign, LOSS, "clip_dual")
    foreign.set(DUAL, option_value(foreign, LOSS, "max_ratio", 3.0) if dual is None else dual)
    for option, key in LOSS_OPTIONS.get(loss.name, {}).items():
        foreign.set(key, getattr(loss, option))


def _correction_from_native(foreign: ForeignBuilder) -> None:
    run = foreign.experiment
    correction, loss = run.algorithm.correction, run.algorithm.loss.name
    bypasses = not run.rollout.recompute_logprobs and correction is None and loss in ("ppo", "reinforce")
    if bypasses:
        foreign.set(BYPASS, True)
        foreign.set(MODE, "vanilla")
        foreign.set(BYPASS_LOSS, "ppo_clip" if loss == "ppo" else "reinforce")
    if bypasses or correction:
        foreign.set(f"{ROLLOUT}.calculate_log_probs", True)
    if correction:
        foreign.set(LEVEL, correction.level)
        foreign.set(BOUND, _format_bounds(correction))
        foreign.set(NORMALIZE_WEIGHTS, correction.normalize)
        aggregations = inverted(AGGREGATIONS)
        names = [f"{aggregations[rejection.over]}_{rejection.estimator}" for rejection in correction.reject]
        foreign.set(REJECTIONS, ",".join(names) or None)
        bounds = [_format_bounds(rejection) for rejection in correction.reject]
        foreign.set(REJECTION_BOUNDS, bounds[0] if len(bounds) == 1 else ",".join(map(str, bounds)) or None)


def _format_bounds(bounds: CorrectionConfig | RejectionConfig) -> float | str:
    return bounds.upper if bounds.lower is None else f"{bounds.lower}_{bounds.upper}"
