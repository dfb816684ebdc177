"""Conversion of RLinf's advantage estimators, losses, KL penalty, filters and rollout correction.

The reference omits some keys that RLinf's own files contain. If `reinpp` subtracts the group mean from rewards and a KL
penalty from each token, it becomes `reinforce_plus_plus` of centred rewards: RLinf compares rewards before the penalty.
"""

from collections.abc import Iterator

from quintet.config.dialects.algorithm_choice import (
    ADVANTAGE,
    LOSS,
    AlgorithmOptions,
    choose,
    export_name,
    option_value,
    set_options,
)
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, OptionalSection, Same
from quintet.config.dialects.ledger import is_effective
from quintet.config.dialects.value_types import is_function_address
from quintet.config.problems import ConfigProblem

TASK = "runner.task_type"
ESTIMATOR, LOSS_TYPE, GROUP = "algorithm.adv_type", "algorithm.loss_type", "algorithm.group_size"
CLIP, DUAL_CLIP, HAS_CRITIC = "algorithm.ratio_clip_eps", "algorithm.clip_ratio_c", "critic.use_critic_model"
KL_COEFFICIENT, KL_TYPE = "algorithm.kl_beta", "algorithm.kl_penalty_type"
BASELINE, KL_REWARD_COEFFICIENT = "algorithm.use_reinpp_baseline", "algorithm.reinpp_kl_beta"
CORRECTION, CORRECTION_BOUND = "algorithm.importance_sampling_fix", "algorithm.importance_sampling_clip"
FILTER, RECOMPUTE = "algorithm.filter_rewards", "rollout.recompute_logprobs"
ENTROPY = Derived(
    "algorithm.entropy_coefficient",
    ("algorithm.entropy_bonus", "algorithm.calculate_entropy"),
    lambda bonus, enabled: float(bonus) if enabled else 0.0,
    lambda coefficient: (coefficient, coefficient > 0),
)
KL = OptionalSection(
    "algorithm.kl",
    KL_COEFFICIENT,
    (
        Same("algorithm.kl.coefficient", KL_COEFFICIENT, to_value=float),
        Same("algorithm.kl.estimator", KL_TYPE, export_none=False),
    ),
    off_value=0.0,
)
FILTER_RULES = tuple(
    Derived(
        f"algorithm.filter.{native}",
        (f"algorithm.{foreign}", FILTER),
        lambda bound, enabled: bound if enabled else None,
        lambda bound: (bound,),
    )
    for native, foreign in {"min_mean": "rewards_lower_bound", "max_mean": "rewards_upper_bound"}.items()
)
DISCOUNTS = AlgorithmOptions(ADVANTAGE, {"gamma": "algorithm.gamma", "lam": "algorithm.gae_lambda"})
CLIP_BOUNDS = AlgorithmOptions(LOSS, {"clip_low": "algorithm.clip_ratio_low", "clip_high": "algorithm.clip_ratio_high"})


def is_embodied(values: ForeignValues) -> bool:
    """Whether the configuration is of a run on simulators."""
    return values.dialect.references[0].name == "rlinf_embodied"


def only_evaluates(values: ForeignValues) -> bool:
    """Whether the run trains nothing."""
    return values[TASK].endswith("_eval") or (is_embodied(values) and bool(values["runner.only_eval"]))


def algorithm_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the native algorithm from the keys that all runs have."""
    if values.native(LOSS_TYPE) == "distillation" and values.native(ESTIMATOR) == "none":
        native.set(ADVANTAGE, {"name": "raw"}, ESTIMATOR, LOSS_TYPE)
    else:
        choose(native, ADVANTAGE, values.native(ESTIMATOR), ESTIMATOR)
    if values[TASK].endswith("_eval") and values[GROUP] == 1:
        # a run that only evaluates compares no responses
        native.set(ADVANTAGE, {"name": "raw"}, TASK, GROUP)
    set_options(native, ADVANTAGE, {"lam": (1.0, ())})
    if is_function_address(values[ESTIMATOR]):
        native.set(f"{ADVANTAGE}.needs_critic", values[HAS_CRITIC], HAS_CRITIC)
    choose(native, LOSS, values.native(LOSS_TYPE), LOSS_TYPE)
    specs = values.dialect.specs()
    dual = values[DUAL_CLIP] if is_effective(specs[DUAL_CLIP], specs, values.__getitem__) else None
    bounds = {CLIP: values[CLIP], DUAL_CLIP: dual}
    keys = {"clip_low": CLIP, "clip_high": CLIP, "clip_dual": DUAL_CLIP}
    set_options(native, LOSS, {option: (bounds[key], (key,)) for option, key in keys.items()})


def algorithm_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of the algorithm that all runs have."""
    export_name(foreign, ADVANTAGE, ESTIMATOR)
    export_name(foreign, LOSS, LOSS_TYPE)
    foreign.set(CLIP, option_value(foreign, LOSS, "clip_low", 0.2))
    foreign.set(DUAL_CLIP, option_value(foreign, LOSS, "clip_dual"))


def _centers_rewards(values: ForeignValues) -> bool:
    return values[ESTIMATOR] == "reinpp" and bool(values[BASELINE])


def _penalizes_rewards(values: ForeignValues) -> bool:
    return values[ESTIMATOR] in ("reinpp", "reinpp_baseline") and bool(values[KL_REWARD_COEFFICIENT])


def newer_algorithm_to_native(native: NativeBuilder) -> None:
    """Set discounts, clip bounds and filters."""
    native.apply((DISCOUNTS, CLIP_BOUNDS, *FILTER_RULES))


def newer_algorithm_from_native(foreign: ForeignBuilder) -> None:
    """Set keys of discounts, clip bounds and filters."""
    foreign.apply((DISCOUNTS, *FILTER_RULES))
    low, high = (option_value(foreign, LOSS, f"clip_{side}") for side in ("low", "high"))
    foreign.set(CLIP_BOUNDS.keys["clip_high"], None if low == high else high)
    bounds = foreign.experiment.algorithm.filter
    foreign.set(FILTER, (bounds.min_mean, bounds.max_mean) != (None, None))


def text_algorithm_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of keys of the algorithm that only runs on text have."""
    if values[CORRECTION] and not values[RECOMPUTE]:
        problem = f"needs the learner's log-probs, and {values.describe(RECOMPUTE)}"
        yield values.problem(CORRECTION, problem, f"set {RECOMPUTE}=true")
    if _centers_rewards(values) and values[GROUP] < 2:
        problem = f"compares the responses to a prompt, and {values.describe(GROUP)}"
        yield values.problem(BASELINE, problem, f"nearest valid value: {GROUP}=2")


def text_algorithm_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the native algorithm from keys that only runs on text have."""
    if values[ESTIMATOR] == "gae" and not values[HAS_CRITIC]:
        native.set(ADVANTAGE, {"name": "raw"}, ESTIMATOR, HAS_CRITIC)
        native.remarks.append(f"{values.describe(ESTIMATOR, HAS_CRITIC)}: advantages are the rewards, as in RLinf")
    penalizes = _penalizes_rewards(values)
    if _centers_rewards(values) or (penalizes and values[ESTIMATOR] == "reinpp_baseline"):
        name = "reinforce_plus_plus" if penalizes else "reinforce_plus_plus_baseline"
        native.set(ADVANTAGE, {"name": name}, ESTIMATOR, BASELINE)
        if penalizes:
            native.set("algorithm.shaping.center", "group", ESTIMATOR, BASELINE, KL_REWARD_COEFFICIENT)
    newer_algorithm_to_native(native)
    native.apply((ENTROPY, KL))
    if values[KL_COEFFICIENT]:
        native.set("algorithm.kl.apply_to", "loss")
    if penalizes:
        section = "algorithm.reward_kl"
        if not values[KL_COEFFICIENT]:
            section = "algorithm.kl"
            native.set(section, {"apply_to": "reward"}, KL_REWARD_COEFFICIENT)
        native.set(f"{section}.coefficient", float(values[KL_REWARD_COEFFICIENT]), KL_REWARD_COEFFICIENT)
        native.set(f"{section}.estimator", values.native(KL_TYPE), KL_TYPE)
    if values[CORRECTION]:
        native.set("algorithm.correction.level", "token", CORRECTION)
        native.set("algorithm.correction.upper", float(values[CORRECTION_BOUND]), CORRECTION_BOUND)


def text_algorithm_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of the algorithm that only runs on text have."""
    algorithm = foreign.experiment.algorithm
    newer_algorithm_from_native(foreign)
    foreign.apply((ENTROPY, KL))
    if (penalty := algorithm.kl_in_reward) is not None:
        foreign.set(KL_COEFFICIENT, algorithm.kl_in_loss.coefficient if algorithm.kl_in_loss else 0.0)
        foreign.set(KL_REWARD_COEFFICIENT, penalty.coefficient)
        is_plus_plus = algorithm.advantage.name == "reinforce_plus_plus"
        foreign.set(BASELINE, is_plus_plus and algorithm.shaping.center == "group")
    foreign.set(CORRECTION, foreign.native_value("algorithm.correction.level") == "token")
    foreign.set(CORRECTION_BOUND, foreign.native_value("algorithm.correction.upper"))
