"""Keys that verl's newer releases (0.5 to 0.9.1) have in `ppo_trainer.yaml`: the reference leaves them out, and
users' files hold them. Those are here whose effect a run has in full; others stay known and unread."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from quintet.config.dialects.chosen import OUTSIDE, choosing
from quintet.config.dialects.ledger import Row, row
from quintet.config.dialects.takes import (
    BOOLEAN,
    COUNT,
    FREE,
    POSITIVE,
    POSITIVE_NUMBER,
    SHARE,
    TEXT,
    Takes,
    choice,
    either,
    integer,
    list_of,
    number,
    optional,
)
from quintet.config.dialects.verl.batches import ACTOR, ROLLOUT
from quintet.config.dialects.verl.newer_rollout_keys import VERL_NEWER_ROLLOUT_KEYS

__all__ = ["LOSSES", "NORMED", "VERL_NEWER_KEYS", "bounds"]

PROOF = "tests/unit/config/dialects/test_verl_newer_keys.py::test_a_newer_key_reaches_the_run"

LOSSES = (
    *("vanilla", "gspo", "geo_mean", "cispo", "sapo", "dppo_tv", "dppo_kl"),
    *("dro", "clip_cov", "kl_cov", "gpg", "bypass_mode"),
)
"""verl's names of its losses."""
NORMED = choice("grpo", "grpo_vectorized", "grpo_passk", "gdpo")
"""Estimators that may divide by a deviation."""
_LOSS, _GROUPS, _GAP = f"{ACTOR}.policy_loss", "algorithm.filter_groups", "algorithm.rollout_correction"
_BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"
_MODE = f"{_LOSS}.loss_mode"
_CLIPPED = either(
    choice("vanilla", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "clip_cov", "bypass_mode"), OUTSIDE
)
_DUAL = either(choice("vanilla", "dppo_tv", "dppo_kl", "bypass_mode"), OUTSIDE)
_DIVERGENCES = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
_NUMBER = re.compile(r"\d+(\.\d*)?([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?")


def bounds(given: object) -> tuple[float | None, float] | None:
    """`(lower, upper)` of a bound: a number is the upper one, `lower_upper` is both; None where it is neither.

    >>> bounds("0.5_2.0")
    (0.5, 2.0)
    """
    parts = str(given).split("_")
    if isinstance(given, bool) or len(parts) > 2 or not all(map(_NUMBER.fullmatch, parts)):
        return None
    *below, upper = map(float, parts)
    lower = below[0] if below else None
    if not 0 < upper < math.inf or (lower is not None and not 0 < lower <= upper):
        return None
    return lower, upper


def _is_bounds(given: object) -> bool:
    return isinstance(given, int | float | str) and bounds(given) is not None


def _all_in(given: object, legal: Sequence[str]) -> bool:
    return isinstance(given, str) and all(name.strip() in legal for name in given.split(","))


def _are_bounds(given: object) -> bool:
    return isinstance(given, int | float | str) and all(_is_bounds(one.strip()) for one in str(given).split(","))


_BOUNDS = Takes("a number > 0, or two as lower_upper", _is_bounds)
_BOUNDS_LISTED = Takes("numbers > 0, or two each as lower_upper, joined by commas", _are_bounds)
_REJECTIONS = Takes(
    f"one or more of {', '.join(_DIVERGENCES)}, joined by commas", lambda given: _all_in(given, _DIVERGENCES)
)
_OFF = Takes("false, as replies aren't drawn anew by preference (PF-PPO) here", lambda given: given is False)

_OF_LOSS: tuple[Row, ...] = (
    row(
        _MODE,
        choosing(*LOSSES),
        "vanilla",
        "Loss of the policy; `vanilla` is PPO's, `geo_mean` GMPO's. `bypass_mode` says what "
        "`algorithm.rollout_correction.bypass_mode` does, and needs it. A function of your own is handed the clips.",
        native="algorithm.loss.name",
        computed=True,
        proof=PROOF,
    ),
    row(
        f"{ACTOR}.clip_ratio_low",
        optional(POSITIVE_NUMBER),
        f"${{{ACTOR}.clip_ratio}}",
        "The probability ratio of the policy loss is clipped this far below 1; null takes `clip_ratio`, as does a file "
        "without it. verl's own file says 0.2, which there hides `clip_ratio`.",
        native="algorithm.loss.clip_low",
        computed=True,
        only_if=(_MODE, _CLIPPED),
        proof=PROOF,
    ),
    row(
        f"{ACTOR}.clip_ratio_high",
        optional(POSITIVE_NUMBER),
        f"${{{ACTOR}.clip_ratio}}",
        "The probability ratio of the policy loss is clipped this far above 1; null takes `clip_ratio`, as does a file "
        "without it. verl's own file says 0.2, which there hides `clip_ratio`.",
        native="algorithm.loss.clip_high",
        computed=True,
        only_if=(_MODE, _CLIPPED),
        proof=PROOF,
    ),
    row(
        f"{ACTOR}.clip_ratio_c",
        number(above=1),
        3.0,
        "Bound on ratio × advantage where the advantage is negative (dual clip), or on the ratio of `dppo_*`.",
        native=("algorithm.loss.clip_dual", "algorithm.loss.max_ratio"),
        computed=True,
        only_if=(_MODE, _DUAL),
        proof=PROOF,
    ),
    row(
        f"{ACTOR}.tau_pos",
        POSITIVE_NUMBER,
        1.0,
        "How fast SAPO's gate closes where the advantage is positive.",
        native="algorithm.loss.temperature_positive",
        computed=True,
        only_if=(_MODE, "sapo"),
        proof=PROOF,
    ),
    row(
        f"{ACTOR}.tau_neg",
        POSITIVE_NUMBER,
        1.05,
        "How fast SAPO's gate closes where the advantage is negative.",
        native="algorithm.loss.temperature_negative",
        computed=True,
        only_if=(_MODE, "sapo"),
        proof=PROOF,
    ),
    row(
        f"{_LOSS}.dro_beta",
        optional(POSITIVE_NUMBER),
        None,
        "Weight of DRO's quadratic pull towards the policy before the update; `dro` needs it.",
        native="algorithm.loss.beta",
        computed=True,
        only_if=(_MODE, "dro"),
        proof=PROOF,
    ),
    row(
        f"{_LOSS}.clip_cov_ratio",
        SHARE,
        0.0002,
        "Share of the tokens that `clip_cov` draws from those of high covariance and leaves out.",
        native="algorithm.loss.share",
        computed=True,
        only_if=(_MODE, "clip_cov"),
        proof=PROOF,
        unit="share",
    ),
    row(
        f"{_LOSS}.clip_cov_lb",
        number(),
        1.0,
        "`clip_cov` draws from tokens whose covariance of log-probability and advantage is larger than this.",
        native="algorithm.loss.min_covariance",
        computed=True,
        only_if=(_MODE, "clip_cov"),
        proof=PROOF,
    ),
    row(
        f"{_LOSS}.clip_cov_ub",
        number(),
        5.0,
        "`clip_cov` draws from tokens whose covariance of log-probability and advantage is smaller than this.",
        native="algorithm.loss.max_covariance",
        computed=True,
        only_if=(_MODE, "clip_cov"),
        proof=PROOF,
    ),
    row(
        f"{_LOSS}.kl_cov_ratio",
        SHARE,
        0.0002,
        "Share of the tokens, those of highest covariance, that `kl_cov` penalises.",
        native="algorithm.loss.share",
        computed=True,
        only_if=(_MODE, "kl_cov"),
        proof=PROOF,
        unit="share",
    ),
    row(
        f"{_LOSS}.ppo_kl_coef",
        number(least=0),
        0.1,
        "Weight of the penalty of `kl_cov`.",
        native="algorithm.loss.coefficient",
        computed=True,
        only_if=(_MODE, "kl_cov"),
        proof=PROOF,
    ),
    row(
        f"{ACTOR}.loss_agg_mode",
        choice("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
        "token-mean",
        "How token losses become one number, over the whole mini-batch; the critic's loss does the same.",
        native="algorithm.aggregation",
        proof=PROOF,
    ),
    row(
        f"{ACTOR}.loss_scale_factor",
        optional(POSITIVE_NUMBER),
        None,
        "By what `seq-mean-token-sum-norm` divides; null takes the longest reply, in tokens.",
        native="algorithm.aggregation_scale",
        only_if=(f"{ACTOR}.loss_agg_mode", "seq-mean-token-sum-norm"),
        proof=PROOF,
    ),
)

_OF_ALGORITHM: tuple[Row, ...] = (
    row(
        "algorithm.norm_adv_by_std_in_grpo",
        BOOLEAN,
        True,
        "Advantages of groups are divided by the deviation within the group; false gives Dr. GRPO.",
        native="algorithm.advantage.normalize_by_std",
        computed=True,
        only_if=("algorithm.adv_estimator", NORMED),
        proof=PROOF,
    ),
    row(
        "algorithm.gdpo_reward_keys",
        optional(list_of(TEXT)),
        None,
        "Parts of the reward that `gdpo` compares one by one, by the names that the reward function gives them; null "
        "takes all.",
        native="algorithm.advantage.weights",
        computed=True,
        only_if=("algorithm.adv_estimator", "gdpo"),
        proof=PROOF,
    ),
    row(
        "algorithm.gdpo_reward_weights",
        optional(list_of(number())),
        None,
        "Weight of each of `gdpo_reward_keys`, in their order; null gives all the same.",
        native="algorithm.advantage.weights",
        computed=True,
        only_if=("algorithm.adv_estimator", "gdpo"),
        proof=PROOF,
    ),
    row(
        "algorithm.use_pf_ppo",
        _OFF,
        False,
        "Replies are drawn anew by how good they are (PF-PPO), which this version doesn't do.",
        proof=PROOF,
    ),
    row(
        f"{_GROUPS}.enable",
        BOOLEAN,
        False,
        "Groups whose rewards are all the same are left out, and others generated in their place (DAPO).",
        native=("algorithm.filter.refill_rounds", "algorithm.drop_groups_without_signal"),
        computed=True,
        proof=PROOF,
    ),
    row(
        f"{_GROUPS}.metric",
        optional(choice("reward", "score", "seq_reward", "seq_final_reward", "acc")),
        None,
        "What must differ within a group: here the reward of whole replies, whichever of these it says.",
        native="algorithm.filter.refill_rounds",
        computed=True,
        only_if=(f"{_GROUPS}.enable", True),
        proof=PROOF,
    ),
    row(
        f"{_GROUPS}.max_num_gen_batches",
        integer(),
        0,
        "Rounds of generation in one step; 0 and less set no limit. Where they don't suffice, the step is smaller, "
        "where verl ends the run.",
        native="algorithm.filter.refill_rounds",
        computed=True,
        only_if=(f"{_GROUPS}.enable", True),
        proof=PROOF,
    ),
    row(
        f"{_GAP}.bypass_mode",
        BOOLEAN,
        False,
        "The engine's log-probabilities stand for those of the policy before the update, which aren't computed; the "
        "loss is then that of `loss_type`.",
        native="rollout.recompute_logprobs",
        computed=True,
        proof=PROOF,
    ),
    row(
        f"{_GAP}.loss_type",
        choice("ppo_clip", "reinforce"),
        "ppo_clip",
        "Loss under `bypass_mode`: PPO's, or the policy gradient without a ratio, which needs `rollout_is: null` here.",
        native="algorithm.loss.name",
        computed=True,
        only_if=(f"{_GAP}.bypass_mode", True),
        proof=PROOF,
    ),
    row(
        f"{_GAP}.rollout_is",
        optional(choice("token", "sequence")),
        None,
        "Importance weights for the gap between engine and learner, one a token or one a reply; null weighs nothing.",
        native="algorithm.correction.level",
        computed=True,
        only_if=(f"{_GAP}.bypass_mode", False),
        proof=PROOF,
    ),
    row(
        f"{_GAP}.rollout_is_threshold",
        _BOUNDS,
        2.0,
        "Larger weights are cut to this; with `lower_upper`, weights outside become 0.",
        native=("algorithm.correction.upper", "algorithm.correction.lower"),
        computed=True,
        only_if=(f"{_GAP}.rollout_is", TEXT),
        proof=PROOF,
    ),
    row(
        f"{_GAP}.rollout_is_batch_normalize",
        BOOLEAN,
        False,
        "Weights are brought to mean 1 over the batch.",
        native="algorithm.correction.normalize",
        computed=True,
        only_if=(f"{_GAP}.rollout_is", TEXT),
        proof=PROOF,
    ),
    row(
        f"{_GAP}.rollout_rs",
        optional(_REJECTIONS),
        None,
        "Tokens or replies on which engine and learner differ too much, by these estimates of their divergence, aren't "
        "learnt from; null rejects none.",
        native="algorithm.correction.reject",
        computed=True,
        proof=PROOF,
    ),
    row(
        f"{_GAP}.rollout_rs_threshold",
        optional(_BOUNDS_LISTED),
        None,
        "Bound of each of `rollout_rs`, in their order, or one for all; of `k1` on the ratio, `lower_upper` or the "
        "upper one and its reciprocal.",
        native="algorithm.correction.reject",
        computed=True,
        only_if=(f"{_GAP}.rollout_rs", TEXT),
        proof=PROOF,
    ),
    row(
        f"{ROLLOUT}.calculate_log_probs",
        BOOLEAN,
        False,
        "The engine's log-probabilities are kept; they are so either way.",
        proof=PROOF,
    ),
)


def _in_both(name: str) -> tuple[str, ...]:
    """Where releases had and have a key of DAPO's penalty."""
    return (f"reward.reward_kwargs.overlong_buffer_cfg.{name}", f"reward_model.overlong_buffer.{name}")


_OF_REWARD: tuple[Row, ...] = (
    row(
        f"{_BUFFER}.enable",
        BOOLEAN,
        False,
        "Replies that come near to the longest allowed lose reward; without it the manager `dapo` judges as `naive`.",
        native=("reward.overlong", "reward.manager"),
        computed=True,
        aliases=_in_both("enable"),
        only_if=("reward_model.reward_manager", "dapo"),
        proof=PROOF,
    ),
    row(
        f"{_BUFFER}.len",
        optional(POSITIVE),
        None,
        "Tokens before the longest reply over which the loss of reward grows.",
        native="reward.overlong.buffer",
        computed=True,
        aliases=_in_both("len"),
        only_if=(f"{_BUFFER}.enable", True),
        proof=PROOF,
        unit="tokens",
    ),
    row(
        f"{_BUFFER}.penalty_factor",
        number(least=0),
        1.0,
        "What the longest reply loses.",
        native="reward.overlong.penalty",
        computed=True,
        aliases=_in_both("penalty_factor"),
        only_if=(f"{_BUFFER}.enable", True),
        proof=PROOF,
    ),
    row(
        f"{_BUFFER}.log",
        optional(BOOLEAN),
        False,
        "The loss of reward is written down by itself; it is so either way.",
        native="reward.overlong",
        computed=True,
        aliases=_in_both("log"),
        only_if=(f"{_BUFFER}.enable", True),
        proof=PROOF,
    ),
    row(
        "reward_model.reward_kwargs.max_resp_len",
        optional(POSITIVE),
        "${data.max_response_length}",
        "Tokens of the longest reply, as the penalty on long ones counts them; must be `data.max_response_length`.",
        native="reward.overlong.buffer",
        computed=True,
        aliases=("reward.reward_kwargs.max_resp_len",),
        only_if=(f"{_BUFFER}.enable", True),
        proof=PROOF,
        unit="tokens",
    ),
    row(
        "custom_reward_function.reward_kwargs",
        FREE,
        {},
        "What your own reward function is given besides.",
        native="reward.function_arguments",
        computed=True,
        aliases=("reward.custom_reward_function.reward_kwargs",),
        only_if=("custom_reward_function.path", TEXT),
        proof=PROOF,
    ),
)

_OF_DATA: tuple[Row, ...] = (
    row(
        "data.train_max_samples",
        either(choice(-1), POSITIVE),
        -1,
        "Training prompts that are drawn once, and no others used; -1 takes all.",
        native="data.train_rows",
        words={-1: None},
        proof=PROOF,
        unit="prompts",
    ),
    row(
        "data.val_max_samples",
        either(choice(-1), POSITIVE),
        -1,
        "Prompts of validation, the first of the file; -1 takes all. verl draws them where `data.shuffle` says so.",
        native="data.validation_rows",
        words={-1: None},
        proof=PROOF,
        unit="prompts",
    ),
    row(
        "data.val_batch_size",
        optional(POSITIVE),
        None,
        "Prompts that validation answers at a time; null takes all at once.",
        native="data.validation_batch",
        proof=PROOF,
        unit="prompts",
    ),
    row(
        "data.seed",
        optional(COUNT),
        None,
        "Seed of the order of prompts; null takes the run's, where verl has a new order in each run.",
        native="data.seed",
        proof=PROOF,
    ),
    row(
        "data.validation_shuffle",
        BOOLEAN,
        False,
        "Prompts of validation come in random order.",
        native="data.validation_shuffle",
        proof=PROOF,
    ),
    row(
        "data.reward_fn_key",
        TEXT,
        "data_source",
        "Column that says which rules judge a reply.",
        native="data.source_key",
        proof=PROOF,
    ),
    row(
        "trainer.val_only",
        BOOLEAN,
        False,
        "The policy is validated as it is, and learns nothing.",
        native="validation.only",
        proof=PROOF,
    ),
)

VERL_NEWER_KEYS: tuple[Row, ...] = (*_OF_LOSS, *_OF_ALGORITHM, *_OF_REWARD, *_OF_DATA, *VERL_NEWER_ROLLOUT_KEYS)
