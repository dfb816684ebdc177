"""Runs on text by keys that RLinf's own files hold and its reference leaves out.

Where `reinpp` takes the group's mean off rewards and a penalty off each token, that is `reinforce_plus_plus` of
centred rewards here: RLinf compares rewards before the penalty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quintet.config.dialects.chosen import give_options, option_of
from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.rlinf.words import KL
from quintet.config.faults import Fault
from quintet.config.native import DataConfig

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["convert_newer", "express_newer", "newer_rules"]

ESTIMATOR, BASELINE, BETA = "algorithm.adv_type", "algorithm.use_reinpp_baseline", "algorithm.reinpp_kl_beta"
FIX, CLIP, FILTER = (
    "algorithm.importance_sampling_fix",
    "algorithm.importance_sampling_clip",
    "algorithm.filter_rewards",
)
ANSWER, TEMPLATE, SIZE = "data.answer_key", "data.apply_chat_template", "data.data_size"
JUDGE, JUDGES_PATH = "reward.use_reward_model", "reward.model.model_path"
BARE = "none"
"""The native template that takes prompts as they are."""
TRUTH: str = DataConfig.model_fields["truth_key"].default


def newer_rules(values: Values) -> Iterator[Fault]:
    """What holds for these keys."""
    if values[JUDGE] and values[JUDGES_PATH] is None:
        problem = "RLinf itself has no learned judge of texts, and the policy can't be one"
        yield values.fault(
            JUDGE, problem, f"set {JUDGES_PATH} to the directory of a sequence classifier, or it to false"
        )
    recompute = "rollout.recompute_logprobs"
    if values[FIX] and not values[recompute]:
        problem = f"there is nothing to compare the engine with: {values.told(recompute)}"
        yield values.fault(FIX, problem, f"set {recompute}=true")
    if _penalises(values) and values["algorithm.kl_beta"]:
        problem = f"the distance is a term of the loss already: {values.told('algorithm.kl_beta')}"
        yield values.fault(BETA, problem, "keep one of them")
    if _by_group(values) and values["algorithm.group_size"] < 2:
        problem = f"has nothing to compare: {values.told('algorithm.group_size')}"
        yield values.fault(BASELINE, problem, "nearest: algorithm.group_size=2")


def _by_group(values: Values) -> bool:
    return values[ESTIMATOR] == "reinpp" and bool(values[BASELINE])


def _penalises(values: Values) -> bool:
    return values[ESTIMATOR] in ("reinpp", "reinpp_baseline") and bool(values[BETA])


def convert_newer(values: Values, native: Native) -> None:
    """What they add to a run on text."""
    _algorithm(values, native)
    for ours, key in {"min_mean": "algorithm.rewards_lower_bound", "max_mean": "algorithm.rewards_upper_bound"}.items():
        native.put(f"algorithm.filter.{ours}", values[key] if values[FILTER] else None, key, FILTER)
    if values[FIX]:
        native.put("algorithm.correction.level", "token", FIX)
        native.put("algorithm.correction.upper", float(values[CLIP]), CLIP)
    native.put("data.truth_key", values[ANSWER] or TRUTH, ANSWER)
    native.put("data.template", None if values[TEMPLATE] else BARE, TEMPLATE)
    rows = None if values[SIZE] in (None, -1) else values[SIZE]
    native.put("data.train_rows", rows, SIZE)
    native.put("data.validation_rows", rows, SIZE)
    native.put("reward.model", {"path": values[JUDGES_PATH]} if values[JUDGE] else None, JUDGE, JUDGES_PATH)


def _algorithm(values: Values, native: Native) -> None:
    whiten = "algorithm.normalize_advantages"
    if _by_group(values) or (_penalises(values) and values[ESTIMATOR] == "reinpp_baseline"):
        name = "reinforce_plus_plus" if _penalises(values) else "reinforce_plus_plus_baseline"
        native.put("algorithm.advantage", {"name": name, "whiten": values[whiten]}, ESTIMATOR, BASELINE)
        native.put("algorithm.advantage.whiten", values[whiten], whiten)
        if _penalises(values):
            native.put("algorithm.shaping.center", "group", ESTIMATOR, BASELINE, BETA)
    told = {"gamma": "algorithm.gamma", "lam": "algorithm.gae_lambda"}
    options = {option: (float(values[key]), (key,)) for option, key in told.items() if values[key] is not None}
    give_options(native, "algorithm.advantage", options)
    bounds = {"clip_low": "algorithm.clip_ratio_low", "clip_high": "algorithm.clip_ratio_high"}
    given = {option: (float(values[key]), (key,)) for option, key in bounds.items() if values[key] is not None}
    give_options(native, "algorithm.loss", given)
    if _penalises(values):
        estimator = "algorithm.kl_penalty_type"
        native.put("algorithm.kl", {"place": "reward", "coefficient": float(values[BETA])}, BETA)
        native.put("algorithm.kl.estimator", KL[values[estimator]], estimator)


def express_newer(foreign: Foreign) -> None:
    """The same in RLinf's words."""
    run = foreign.experiment
    algorithm, data = run.algorithm, run.data
    for key, option in {"algorithm.gamma": "gamma", "algorithm.gae_lambda": "lam"}.items():
        if (value := option_of(algorithm.advantage, option, None)) is not None:
            foreign.put(key, value)
    low, high = (option_of(algorithm.loss, f"clip_{side}", None) for side in ("low", "high"))
    foreign.put("algorithm.clip_ratio_high", None if low == high else high)
    if run.needs_critic:
        foreign.put("algorithm.value_clip", run.critic.value_clip)
    _express_penalty(foreign)
    bounds = (algorithm.filter.min_mean, algorithm.filter.max_mean)
    foreign.put(FILTER, bounds != (None, None))
    foreign.put("algorithm.rewards_lower_bound", bounds[0])
    foreign.put("algorithm.rewards_upper_bound", bounds[1])
    correction = algorithm.correction
    foreign.put(FIX, correction is not None and correction.level == "token")
    if correction is not None:
        foreign.put(CLIP, correction.upper)
    if data is not None:
        foreign.put(ANSWER, None if data.truth_key == TRUTH else data.truth_key)
        foreign.put(TEMPLATE, data.template != BARE)
        foreign.put(SIZE, data.train_rows)
    if run.reward is not None and run.reward.model is not None:
        foreign.put(JUDGES_PATH, run.reward.model.path)


def _express_penalty(foreign: Foreign) -> None:
    algorithm = foreign.experiment.algorithm
    kl = algorithm.kl
    if kl is None or kl.place != "reward":
        return
    foreign.put("algorithm.kl_beta", 0.0)
    foreign.put(BETA, kl.coefficient)
    centred = algorithm.advantage.name == "reinforce_plus_plus" and algorithm.shaping.center == "group"
    foreign.put(BASELINE, centred)
