"""Conversion of verl's policy loss, group filter and rollout correction, and of options of the estimator."""

from collections.abc import Iterator, Sequence
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.algorithm_choice import ADVANTAGE, LOSS, choose, export_name, option_value, set_options
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, inverted
from quintet.config.dialects.verl.key_values import REJECTION_LEVELS, parse_bounds
from quintet.config.native.algorithm import CorrectionConfig, RejectionConfig
from quintet.config.problems import ConfigProblem

MAX_RATIO_LOSSES = ("dppo_tv", "dppo_kl")
"""Losses whose bound on the ratio is verl's dual clip."""
MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
CLIP = "actor_rollout_ref.actor.clip_ratio"
LOW = "actor_rollout_ref.actor.clip_ratio_low"
HIGH = "actor_rollout_ref.actor.clip_ratio_high"
DUAL = "actor_rollout_ref.actor.clip_ratio_c"
DRO_BETA = "actor_rollout_ref.actor.policy_loss.dro_beta"
REWARD_PARTS = "algorithm.gdpo_reward_keys"
REWARD_WEIGHTS = "algorithm.gdpo_reward_weights"
FILTER = "algorithm.filter_groups.enable"
METRIC = "algorithm.filter_groups.metric"
MAX_ROUNDS = "algorithm.filter_groups.max_num_gen_batches"
NO_SIDE = (None, -1)
"""Values of a side of the clip range for which `clip_ratio` counts: -1 is the default of forks."""
METRICS = (None, "reward", "score", "seq_reward", "seq_final_reward", "acc")
"""Metrics of groups by their rewards; a user's reward function may have others."""
UNLIMITED_ROUNDS = 10**6
BYPASS = "algorithm.rollout_correction.bypass_mode"
BYPASS_LOSS = "algorithm.rollout_correction.loss_type"
LEVEL = "algorithm.rollout_correction.rollout_is"
BOUND = "algorithm.rollout_correction.rollout_is_threshold"
NORMALIZE_WEIGHTS = "algorithm.rollout_correction.rollout_is_batch_normalize"
REJECTIONS = "algorithm.rollout_correction.rollout_rs"
REJECTION_BOUNDS = "algorithm.rollout_correction.rollout_rs_threshold"
OLDER_BOUND = "actor_rollout_ref.actor.tis_imp_ratio_cap"
"""Maximum weight of a token, in releases of 2025-08 to 2025-10."""
AGGREGATIONS = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}


def _bypasses(values: ForeignValues) -> bool:
    """Whether the engine's log-probs are used in place of the learner's."""
    return values[BYPASS] is True


def _rejection_names(text: str | None) -> list[str]:
    """Return the names of rejections; the levels of earlier releases wait for a capability."""
    if text is None or text in REJECTION_LEVELS:
        return []
    return [*dict.fromkeys(name.strip() for name in text.split(","))]


def _rejection_bounds(text: object, names: Sequence[str]) -> list[tuple[float | None, float]]:
    """Return the bounds of each rejection; a single bound holds for all."""
    parsed = [] if text is None else [parse_bounds(part.strip()) for part in str(text).split(",")]
    bounds = [pair for pair in parsed if pair is not None]
    return bounds * len(names) if len(bounds) == 1 else bounds


def _format_bounds(bounds: CorrectionConfig | RejectionConfig) -> float | str:
    return bounds.upper if bounds.lower is None else f"{bounds.lower}_{bounds.upper}"


def _native_correction(
    level: str | None, bound: object, normalize: bool, rejections: str | None, rejection_bounds: object
) -> dict[str, Any] | None:
    names = _rejection_names(rejections)
    level = None if level == "geometric" else level  # it waits
    if level is None and not names:
        return None
    lower, upper = parse_bounds(bound) or (None, 2.0)
    pairs = zip(names, _rejection_bounds(rejection_bounds, names), strict=True)
    reject = [_native_rejection(name, *bounds) for name, bounds in pairs]
    correction = {"level": level, "upper": upper, "lower": lower, "normalize": normalize, "reject": reject}
    return correction | ({"reject_before_advantages": True} if reject else {})


def _native_rejection(name: str, lower: float | None, upper: float) -> dict[str, Any]:
    aggregation, _, estimator = name.rpartition("_")
    lower = lower if estimator == "k1" else None
    return {"estimator": estimator, "over": AGGREGATIONS[aggregation], "upper": upper, "lower": lower}


def _foreign_correction(correction: CorrectionConfig) -> tuple[Any, ...]:
    aggregations = inverted(AGGREGATIONS)
    names = [f"{aggregations[rejection.over]}_{rejection.estimator}" for rejection in correction.reject]
    bounds = [_format_bounds(rejection) for rejection in correction.reject]
    rejection_bounds = bounds[0] if len(bounds) == 1 else ",".join(map(str, bounds)) or None
    upper = _format_bounds(correction)
    return correction.level, upper, correction.normalize, ",".join(names) or None, rejection_bounds


def _native_weights(parts: list[str] | None, weights: list[float] | None) -> dict[str, float]:
    """Return the weight of each reward component, by default 1."""
    names = parts or []
    return dict(zip(names, map(float, weights or [1.0] * len(names)), strict=True))


CORRECTION = Derived(
    "algorithm.correction",
    (LEVEL, BOUND, NORMALIZE_WEIGHTS, REJECTIONS, REJECTION_BOUNDS),
    _native_correction,
    _foreign_correction,
    export_none=False,
)
FILTER_ROUNDS = Derived(
    "algorithm.filter.refill_rounds",
    (MAX_ROUNDS, METRIC, FILTER),
    lambda rounds, metric, enabled: (rounds - 1 if rounds > 0 else UNLIMITED_ROUNDS) if enabled else None,
    lambda rounds: (rounds + 1 if rounds < UNLIMITED_ROUNDS else 0, None, True) if rounds else (),
    import_none=False,
)
GDPO_WEIGHTS = Derived(
    f"{ADVANTAGE}.weights",
    (REWARD_PARTS, REWARD_WEIGHTS),
    _native_weights,
    lambda weights: (list(weights), None if {*weights.values()} == {1.0} else [*weights.values()]) if weights else (),
)


def loss_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the policy loss. verl trains on groups with equal rewards, unless it filters and replaces them."""
    # verl's controller names the loss of a bypass, but its workers started with that of the file
    bypasses = _bypasses(values) and values[MODE] in ("vanilla", "bypass_mode")
    loss = values.native(MODE)
    if bypasses and values[BYPASS_LOSS] == "reinforce":
        loss = "reinforce"
    elif _bypasses(values) and not bypasses:
        native.remarks.append(f"{values.describe(BYPASS_LOSS)} has no effect, because of {values.describe(MODE)}")
    choose(native, LOSS, loss, MODE, *([BYPASS_LOSS, BYPASS] if bypasses else []))
    set_sides = [key for key in (LOW, HIGH) if values[key] not in (*NO_SIDE, values[CLIP])]
    clips = {key: (values[key], (key,)) if key in set_sides else (values[CLIP], (key, CLIP)) for key in (LOW, HIGH)}
    dual = "max_ratio" if loss in MAX_RATIO_LOSSES else "clip_dual"
    options = {"clip_low": clips[LOW], "clip_high": clips[HIGH], dual: (values[DUAL], (DUAL,))}
    set_options(native, LOSS, options)
    if len(set_sides) == len(clips) and values.is_set(CLIP):
        sides = values.describe(*set_sides)
        native.remarks.append(
            f"{values.describe(CLIP)} has no effect, because of {sides}, which count unless they are null"
        )
    native.set("algorithm.drop_groups_without_signal", bool(values[FILTER]), FILTER)


def objective_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set options of the estimator, the group filter and the rollout correction."""
    if native.get(f"{ADVANTAGE}.name") == "gdpo":
        GDPO_WEIGHTS.to_native(values, native)
    FILTER_ROUNDS.to_native(values, native)
    if values[FILTER] and values[METRIC] in ("acc", "seq_final_reward"):
        native.remarks.append(f"{values.describe(METRIC)}: groups are compared by the rewards of whole responses")
    if values[FILTER] and values[METRIC] not in METRICS:
        native.require(METRIC, Capability.GROUP_FILTERS)
    if values[LEVEL] == "geometric":
        native.require(LEVEL, Capability.CORRECTION_OPTIONS)
    native.set("rollout.recompute_logprobs", not _bypasses(values), BYPASS)
    if _bypasses(values):
        native.set("algorithm.correction", None, *CORRECTION.foreign)
        if values[REJECTIONS] is not None:
            native.require(REJECTIONS, Capability.CORRECTION_OPTIONS)
        if values[BYPASS_LOSS] == "reinforce" and values[LEVEL] is not None:
            native.require(LEVEL, Capability.CORRECTION_OPTIONS)
    else:
        CORRECTION.to_native(values, native)
        if values[OLDER_BOUND] > 0:
            weights = {"level": "token", "upper": float(values[OLDER_BOUND])}
            native.set("algorithm.correction", weights, OLDER_BOUND)
        if values[REJECTIONS] in REJECTION_LEVELS:
            native.require(REJECTIONS, Capability.CORRECTION_OPTIONS)


def objective_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of the loss, the rollout correction and the reward weights."""
    if values[MODE] == "dro" and values[DRO_BETA] is None:
        yield values.problem(DRO_BETA, "the loss dro needs it", f"set it to a number above 0: {DRO_BETA}=0.1")
    yield from _bypass_problems(values)
    if values[LEVEL] is not None and values[BOUND] is None:
        yield values.problem(BOUND, f"{values.describe(LEVEL)} needs it", f"for example {BOUND}=2.0, or {LEVEL}=null")
    names = _rejection_names(values[REJECTIONS])
    bounds = _rejection_bounds(values[REJECTION_BOUNDS], names)
    if names and len(bounds) != len(names):
        problem = f"must have one bound for each of {values.describe(REJECTIONS)}, or one for all"
        bound = next((upper for _, upper in bounds), 2.0)
        yield values.problem(REJECTION_BOUNDS, problem, f"for example, for all: {REJECTION_BOUNDS}={bound:g}")
    for name, (lower, upper) in zip(names, bounds, strict=False):
        if lower is None and upper < 1 and name.endswith("k1"):
            lower_bound = f"{1 / upper:g}"
            problem = f"the lower bound of {name}, 1 / {upper:g}, is above the upper one: no token would be left"
            hint = f"write {REJECTION_BOUNDS}={lower_bound}, or both bounds: {REJECTION_BOUNDS}={upper:g}_{lower_bound}"
            yield values.problem(REJECTION_BOUNDS, problem, hint)
        if lower is not None and not name.endswith("k1"):
            hint = f"for example, for all: {REJECTION_BOUNDS}={bounds[0][1]:g}"
            yield values.problem(REJECTION_BOUNDS, f"{name} has only an upper bound", hint)
    parts, weights = values[REWARD_PARTS] or [], values[REWARD_WEIGHTS]
    if values["algorithm.adv_estimator"] == "gdpo" and weights is not None and len(weights) != len(parts):
        problem = f"must have one weight for each of {values.describe(REWARD_PARTS)}"
        hint = f"leave it out, or {REWARD_WEIGHTS}={[*weights, *[1.0] * len(parts)][: len(parts)]}"
        yield values.problem(REWARD_WEIGHTS, problem, hint)


def _bypass_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    if values[MODE] == "bypass_mode" and not _bypasses(values):
        yield values.problem(MODE, f"needs {BYPASS}", f"set {BYPASS}=true, or {MODE}=vanilla")


def objective_from_native(foreign: ForeignBuilder) -> None:
    """Set verl's keys of loss, group filter and rollout correction, and options of the estimator."""
    _loss_from_native(foreign)
    foreign.apply((GDPO_WEIGHTS, FILTER_ROUNDS, CORRECTION))
    _bypass_from_native(foreign)


def _loss_from_native(foreign: ForeignBuilder) -> None:
    section = f"{LOSS}.task" if foreign.experiment.algorithm.loss.name == "distillation" else LOSS
    if foreign.native_value(section) is None:
        return
    export_name(foreign, section, MODE)
    if foreign.native_value(section).name == "reinforce":
        foreign.set(MODE, "gpg")
    low = option_value(foreign, section, "clip_low", 0.2)
    foreign.set(CLIP, low)
    foreign.set(LOW, low)
    foreign.set(HIGH, option_value(foreign, section, "clip_high", low))
    dual = option_value(foreign, section, "max_ratio", option_value(foreign, section, "clip_dual"))
    if dual is not None:
        foreign.set(DUAL, dual)


def _bypass_from_native(foreign: ForeignBuilder) -> None:
    run = foreign.experiment
    correction, loss = run.algorithm.correction, run.algorithm.loss.name
    bypasses = not run.rollout.recompute_logprobs and correction is None and loss in ("ppo", "reinforce")
    if bypasses:
        foreign.set(BYPASS, True)
        foreign.set(MODE, "vanilla")
        foreign.set(BYPASS_LOSS, "ppo_clip" if loss == "ppo" else "reinforce")
    if bypasses or correction:
        foreign.set("actor_rollout_ref.rollout.calculate_log_probs", True)
