"""verl's policy loss, which groups are learnt from, and what is done about the gap between engine and learner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.chosen import LOSS, choose, express_choice, give_options, option_of
from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.verl.batches import ACTOR, ROLLOUT
from quintet.config.dialects.verl.newer_keys import NORMED, bounds
from quintet.config.faults import Fault
from quintet.config.native.advantages import GdpoConfig
from quintet.config.native.algorithm import CorrectionConfig, RejectionConfig

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["bypasses", "clipping", "express_objective", "objective_faults", "refine"]

WORDS = {"vanilla": "ppo", "bypass_mode": "ppo", "geo_mean": "gmpo"}
"""verl's names of losses that are called otherwise here."""
MODE, CLIP, LOW, HIGH, DUAL = (
    f"{ACTOR}.{key}"
    for key in ("policy_loss.loss_mode", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
)
OWN: Mapping[str, Mapping[str, str]] = {
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
"""Options that one loss has, and their keys."""
NORM, PARTS, WEIGHTS = (
    f"algorithm.{key}" for key in ("norm_adv_by_std_in_grpo", "gdpo_reward_keys", "gdpo_reward_weights")
)
FILTERED, METRIC, ROUNDS = (f"algorithm.filter_groups.{key}" for key in ("enable", "metric", "max_num_gen_batches"))
WITHOUT_END = 10**6
"""Rounds that no run gets through."""
BYPASS, KIND, LEVEL, BOUND, EVEN, REJECT, LIMITS = (
    f"algorithm.rollout_correction.{key}"
    for key in (
        *("bypass_mode", "loss_type", "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"),
        *("rollout_rs", "rollout_rs_threshold"),
    )
)
OVERS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}


def bypasses(values: Values) -> bool:
    """Whether the engine's log-probs stand for the learner's."""
    return values[BYPASS] is True


def clipping(values: Values, native: Native) -> None:
    """verl's policy loss; it learns from groups without signal, too, unless they are to be replaced."""
    plain = bypasses(values) and values[KIND] == "reinforce"
    loss = "reinforce" if plain else values[MODE]
    choose(native, LOSS, loss, WORDS, MODE, *([KIND, BYPASS] if bypasses(values) else []))
    low, high = ((values[CLIP] if values[key] is None else values[key]) for key in (LOW, HIGH))
    options: dict[str, tuple[Any, tuple[str, ...]]] = {
        "clip_low": (low, (LOW, CLIP)),
        "clip_high": (high, (HIGH, CLIP)),
        "clip_dual": (values[DUAL], (DUAL,)),
    }
    own = OWN.get(native.tree["algorithm"]["loss"]["name"], {})
    give_options(native, LOSS, options | {option: (values[key], (key,)) for option, key in own.items()})
    if all(values.given(key) and values[key] not in (None, values[CLIP]) for key in (LOW, HIGH)) and values.given(CLIP):
        native.remarks.append(f"{values.told(CLIP)} has no effect: {values.told(LOW)} and {values.told(HIGH)} hide it")
    native.put("algorithm.drop_groups_without_signal", bool(values[FILTERED]), FILTERED)


def refine(values: Values, native: Native) -> None:
    """What verl's newer keys say of an estimator that is chosen already, of groups, and of the gap to the engine."""
    advantage = "algorithm.advantage"
    if NORMED.accepts(values["algorithm.adv_estimator"]):
        native.put(f"{advantage}.normalize_by_std", values[NORM], NORM)
    if native.tree["algorithm"]["advantage"]["name"] == "gdpo":
        parts = values[PARTS] or []
        weights = dict(zip(parts, map(float, values[WEIGHTS] or [1.0] * len(parts)), strict=True))
        native.put(f"{advantage}.weights", weights, PARTS, WEIGHTS)
    _filter(values, native)
    native.put("rollout.recompute_logprobs", not bypasses(values), BYPASS)
    correction = None if bypasses(values) else _correction(values)
    native.put("algorithm.correction", correction, LEVEL, BOUND, EVEN, REJECT, LIMITS)


def _filter(values: Values, native: Native) -> None:
    if not values[FILTERED]:
        return
    most = values[ROUNDS]
    native.put("algorithm.filter.refill_rounds", most - 1 if most > 0 else WITHOUT_END, ROUNDS, METRIC, FILTERED)
    if values[METRIC] in ("acc", "seq_final_reward"):
        native.remarks.append(f"{values.told(METRIC)}: groups are compared by the rewards of whole replies, here")


def _correction(values: Values) -> dict[str, Any] | None:
    """Weights and rejections; None where nothing is asked for."""
    if values[LEVEL] is None and values[REJECT] is None:
        return None
    lower, upper = bounds(values[BOUND]) or (None, 2.0)
    return {
        "level": values[LEVEL],
        "upper": upper,
        "lower": lower,
        "normalize": values[EVEN],
        "reject": [_rejection(*pair) for pair in zip(_names(values), _limits(values), strict=True)],
    }


def _rejection(name: str, limit: tuple[float | None, float]) -> dict[str, Any]:
    over, _, estimator = name.rpartition("_")
    lower = limit[0] if estimator == "k1" else None
    return {"estimator": estimator, "over": OVERS[over], "upper": limit[1], "lower": lower}


def _names(values: Values) -> list[str]:
    """The estimates of `rollout_rs`, each once."""
    return [] if values[REJECT] is None else [*dict.fromkeys(name.strip() for name in values[REJECT].split(","))]


def _limits(values: Values) -> list[tuple[float | None, float]]:
    """The bound of each of them, one standing for all."""
    given = values[LIMITS]
    found = [] if given is None else [bounds(one.strip()) for one in str(given).split(",")]
    limits = [one for one in found if one is not None]
    return limits * len(_names(values)) if len(limits) == 1 else limits


def objective_faults(values: Values) -> Iterator[Fault]:
    """Keys of the objective that need or forbid another."""
    beta = OWN["dro"]["beta"]
    if values[MODE] == "dro" and values[beta] is None:
        yield values.fault(beta, "dro needs it", f"give a number above 0: {beta}=0.1")
    if (values[LOW] or 0) >= 1 and values[MODE] not in ("geo_mean", "dppo_tv", "dppo_kl"):
        yield values.fault(LOW, "must be less than 1: ratios are above 0", f"such as {LOW}=0.2")
    yield from _bypass_faults(values)
    limits, names = _limits(values), _names(values)
    if names and len(limits) != len(names):
        problem = f"there must be a bound for each of {values.told(REJECT)}, or one for all"
        yield values.fault(LIMITS, problem, f"give {len(names)}, joined by commas")
    for name, (lower, _) in zip(names, limits, strict=False):
        if lower is not None and not name.endswith("k1"):
            problem = f"{name} has an upper bound alone"
            yield values.fault(LIMITS, problem, "give one number for it")
    parts, weights = values[PARTS] or [], values[WEIGHTS]
    if values["algorithm.adv_estimator"] == "gdpo" and weights is not None and len(weights) != len(parts):
        problem = f"there must be a weight for each of {values.told(PARTS)}"
        yield values.fault(WEIGHTS, problem, f"give {len(parts)}, or leave it out")


def _bypass_faults(values: Values) -> Iterator[Fault]:
    if not bypasses(values):
        if values[MODE] == "bypass_mode":
            yield values.fault(MODE, f"comes with {BYPASS}", f"set {BYPASS}=true, or {MODE}=vanilla")
        return
    if values[MODE] not in ("vanilla", "bypass_mode"):
        problem = f"is not read: {values.told(BYPASS)} takes the loss of {values.told(KIND)}"
        yield values.fault(MODE, problem, f"leave it out, or set {BYPASS}=false")
    if values[REJECT] is not None:
        problem = f"verl then judges by the policy as it is being updated, which isn't done here: {values.told(BYPASS)}"
        yield values.fault(REJECT, problem, f"set {BYPASS}=false, or {REJECT}=null")
    if values[KIND] == "reinforce" and values[LEVEL] is not None:
        problem = f"weights that change as the policy is updated aren't had here: {values.told(KIND)}"
        yield values.fault(LEVEL, problem, f"set {LEVEL}=null, or {KIND}=ppo_clip")


def express_objective(foreign: Foreign) -> None:
    """The same in verl's words."""
    algorithm = foreign.experiment.algorithm
    _express_loss(foreign)
    if hasattr(algorithm.advantage, "normalize_by_std"):
        foreign.put(NORM, algorithm.advantage.normalize_by_std)
    if isinstance(algorithm.advantage, GdpoConfig) and algorithm.advantage.weights:
        weights = algorithm.advantage.weights
        foreign.put(PARTS, list(weights))
        foreign.put(WEIGHTS, None if set(weights.values()) == {1.0} else list(weights.values()))
    rounds = algorithm.filter.refill_rounds
    if rounds:
        foreign.put(FILTERED, True)
        foreign.put(ROUNDS, rounds + 1 if rounds < WITHOUT_END else 0)
    _express_gap(foreign)


def _express_loss(foreign: Foreign) -> None:
    loss = foreign.experiment.algorithm.loss
    express_choice(foreign, LOSS, MODE, {"vanilla": "ppo", "geo_mean": "gmpo", "gpg": "reinforce"})
    low = option_of(loss, "clip_low", 0.2)
    foreign.put(CLIP, low)
    foreign.put(LOW, low)
    foreign.put(HIGH, option_of(loss, "clip_high", low))
    dual = option_of(loss, "clip_dual", None)
    foreign.put(DUAL, option_of(loss, "max_ratio", 3.0) if dual is None else dual)
    for option, key in OWN.get(loss.name, {}).items():
        foreign.put(key, getattr(loss, option))


def _express_gap(foreign: Foreign) -> None:
    """The engine's log-probs in place of the learner's, or weights and rejections beside them."""
    run = foreign.experiment
    correction, loss = run.algorithm.correction, run.algorithm.loss.name
    bypassed = not run.rollout.recompute_logprobs and correction is None and loss in ("ppo", "reinforce")
    if bypassed:
        foreign.put(BYPASS, True)
        foreign.put(MODE, "vanilla")
        foreign.put(KIND, "ppo_clip" if loss == "ppo" else "reinforce")
    if bypassed or correction:
        foreign.put(f"{ROLLOUT}.calculate_log_probs", True)
    if correction:
        foreign.put(LEVEL, correction.level)
        foreign.put(BOUND, _written(correction))
        foreign.put(EVEN, correction.normalize)
        foreign.put(REJECT, ",".join(map(_name, correction.reject)) or None)
        written = [_written(one) for one in correction.reject]
        foreign.put(LIMITS, written[0] if len(written) == 1 else ",".join(map(str, written)) or None)


def _written(bound: CorrectionConfig | RejectionConfig) -> float | str:
    return bound.upper if bound.lower is None else f"{bound.lower}_{bound.upper}"


def _name(rejection: RejectionConfig) -> str:
    over = next(theirs for theirs, ours in OVERS.items() if ours == rejection.over)
    return f"{over}_{rejection.estimator}"
