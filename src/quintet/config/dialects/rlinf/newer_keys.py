"""Keys of RLinf's runs on text that its own files hold and its reference leaves out."""

from __future__ import annotations

from typing import Any

from quintet.config.dialects.ledger import Row, row
from quintet.config.dialects.takes import (
    BOOLEAN,
    NUMBER,
    POSITIVE_NUMBER,
    SHARE,
    TEXT,
    TEXTS,
    Takes,
    choice,
    either,
    integer,
    number,
    optional,
)

__all__ = ["RLINF_NEWER_KEYS"]

PROOF = "tests/unit/config/dialects/test_rlinf_newer_keys.py::test_a_key_reaches_the_run"
_CLIPPED = ("algorithm.loss_type", choice("ppo", "actor", "actor_critic", "decoupled_actor_critic", "opd"))
_REINPP = ("algorithm.adv_type", choice("reinpp", "reinpp_baseline"))
_ROWS = either(integer(least=1), choice(-1))


def _key(key: str, takes: Takes, default: Any, effect: str, *native: str, **options: Any) -> Row:
    return row(key, takes, default, effect, native=native, proof=PROOF, **{"computed": True, **options})


RLINF_NEWER_KEYS: tuple[Row, ...] = (
    _key("algorithm.gamma", SHARE, 1.0, "Discount a token, in gae and reinpp.", "algorithm.advantage.gamma"),
    _key("algorithm.gae_lambda", SHARE, 1.0, "Weight of longer returns (λ), in gae.", "algorithm.advantage.lam"),
    _key(
        "algorithm.clip_ratio_low",
        optional(number(above=0, below=1)),
        None,
        "The probability ratio is clipped this far below 1; null takes algorithm.ratio_clip_eps.",
        "algorithm.loss.clip_low",
        only_if=_CLIPPED,
    ),
    _key(
        "algorithm.clip_ratio_high",
        optional(POSITIVE_NUMBER),
        None,
        "The probability ratio is clipped this far above 1; null takes algorithm.ratio_clip_eps.",
        "algorithm.loss.clip_high",
        only_if=_CLIPPED,
    ),
    _key(
        "algorithm.value_clip",
        optional(POSITIVE_NUMBER),
        0.2,
        "New values stay within this distance of the old ones in the critic's loss; null doesn't clip.",
        "critic.value_clip",
        aliases=("algorithm.value_cliprange",),
        only_if=("algorithm.adv_type", "gae"),
    ),
    _key(
        "algorithm.use_reinpp_baseline",
        BOOLEAN,
        False,
        "The group's mean comes off the rewards of reinpp, as in reinpp_baseline.",
        "algorithm.advantage.name",
        only_if=("algorithm.adv_type", "reinpp"),
    ),
    _key(
        "algorithm.reinpp_kl_beta",
        number(least=0),
        0.0,
        "Weight of the KL distance to the reference policy that comes off each token's reward, in reinpp.",
        "algorithm.kl.coefficient",
        only_if=_REINPP,
    ),
    _key(
        "algorithm.filter_rewards",
        BOOLEAN,
        False,
        "Groups whose mean reward is out of bounds aren't learnt from.",
        "algorithm.filter.min_mean",
        "algorithm.filter.max_mean",
    ),
    _key(
        "algorithm.rewards_lower_bound",
        optional(NUMBER),
        None,
        "Least mean reward of a group that is learnt from; null for no bound.",
        "algorithm.filter.min_mean",
        only_if=("algorithm.filter_rewards", True),
    ),
    _key(
        "algorithm.rewards_upper_bound",
        optional(NUMBER),
        None,
        "Largest mean reward of a group that is learnt from; null for no bound.",
        "algorithm.filter.max_mean",
        only_if=("algorithm.filter_rewards", True),
    ),
    _key(
        "algorithm.importance_sampling_fix",
        BOOLEAN,
        False,
        "Advantages are weighted by how much likelier the learner holds a token than the engine that wrote it.",
        "algorithm.correction.level",
    ),
    _key(
        "algorithm.importance_sampling_clip",
        POSITIVE_NUMBER,
        1.0,
        "Larger weights of that kind are cut to this.",
        "algorithm.correction.upper",
        only_if=("algorithm.importance_sampling_fix", True),
    ),
    _key(
        "algorithm.sampling_params.stop",
        TEXTS,
        [],
        "Texts that end a reply, as its last words.",
        "rollout.stop",
        computed=False,
        aliases=("rollout.sampling_params.stop",),
    ),
    _key(
        "data.answer_key",
        optional(TEXT),
        None,
        "Field of a row that holds the right answer; null looks for solutions, answer and the like.",
        "data.truth_key",
    ),
    _key(
        "data.apply_chat_template",
        BOOLEAN,
        False,
        "Prompts are chat messages in the tokenizer's template; false takes their text as it is.",
        "data.template",
    ),
    _key(
        "data.filter_prompt_by_length",
        BOOLEAN,
        False,
        "Rows whose prompt has more than data.max_prompt_length tokens are left out.",
        "data.filter_long_prompts",
        computed=False,
    ),
    _key(
        "data.data_size",
        optional(_ROWS),
        None,
        "Rows that are used: of the training files so many drawn by the seed, where RLinf takes the first; of the "
        "others the first. null and -1 take all.",
        "data.train_rows",
        "data.validation_rows",
        unit="rows",
    ),
    _key(
        "reward.model.model_path",
        optional(TEXT),
        None,
        "Directory of the model that judges replies, a sequence classifier.",
        "reward.model.path",
        only_if=("reward.use_reward_model", True),
    ),
)
