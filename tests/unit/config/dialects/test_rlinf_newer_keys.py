"""If these fail, what an RLinf user's own file says beyond RLinf's reference isn't what is learnt from, or how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet.config.dialects.ledger import load_keys
from quintet.config.native.algorithm import KlConfig, RewardKlConfig
from quintet.errors import ConfigError

MATH: dict[str, Any] = {"runner": {"task_type": "math"}, "rollout": {"model": {"model_path": "some/model"}}}
GAE: dict[str, Any] = {"algorithm.adv_type": "gae", "critic.use_critic_model": True}
REINPP, FILTERED = {"algorithm.adv_type": "reinpp"}, {"algorithm.filter_rewards": True}
FIXED = {"algorithm.importance_sampling_fix": True}

Reached = tuple[str, Any, Any, str, Any] | tuple[str, Any, Any, str, Any, dict[str, Any]]

REACHED: list[Reached] = [
    ("algorithm.gamma", 0.9, 2, "algorithm.advantage.gamma", 0.9, GAE),
    ("algorithm.gamma", 0.9, -1, "algorithm.advantage.gamma", 0.9, REINPP),
    ("algorithm.gae_lambda", 0.5, 2, "algorithm.advantage.lam", 0.5, GAE),
    ("algorithm.clip_ratio_low", 0.1, 1, "algorithm.loss.clip_low", 0.1),
    ("algorithm.clip_ratio_high", 0.28, 0, "algorithm.loss.clip_high", 0.28),
    ("algorithm.value_clip", 0.5, 0, "critic.value_clip", 0.5, GAE),
    ("algorithm.value_clip", None, 0, "critic.value_clip", None, GAE),
    ("algorithm.use_reinpp_baseline", True, 1, "algorithm.advantage.name", "reinforce_plus_plus_baseline", REINPP),
    ("algorithm.reinpp_kl_beta", 0.001, -1, "algorithm.kl.coefficient", 0.001, REINPP),
    ("algorithm.filter_rewards", True, 1, "algorithm.filter.min_mean", 0.1, {"algorithm.rewards_lower_bound": 0.1}),
    ("algorithm.rewards_lower_bound", 0.1, "x", "algorithm.filter.min_mean", 0.1, FILTERED),
    ("algorithm.rewards_upper_bound", 4, "x", "algorithm.filter.max_mean", 4.0, FILTERED),
    ("algorithm.importance_sampling_fix", True, 1, "algorithm.correction.level", "token"),
    ("algorithm.importance_sampling_clip", 2.0, 0, "algorithm.correction.upper", 2.0, FIXED),
    ("algorithm.sampling_params.stop", ["</answer>"], 5, "rollout.stop", ("</answer>",)),
    ("data.answer_key", "solutions", 5, "data.truth_key", "solutions"),
    ("data.apply_chat_template", True, 1, "data.template", None),
    ("data.apply_chat_template", False, 1, "data.template", "none"),
    ("data.filter_prompt_by_length", True, 1, "data.filter_long_prompts", True),
    ("data.data_size", 100, 0, "data.train_rows", 100),
    ("data.data_size", 100, -2, "data.validation_rows", 100),
    ("data.data_size", -1, "all", "data.train_rows", None),
    ("reward.model.model_path", "some/judge", 5, "reward.model.path", "some/judge", {"reward.use_reward_model": True}),
]
"""Key, a legal value, an illegal one, the native key, what that becomes, and what else is written."""


@pytest.mark.proves("rlinf", *(case[0] for case in REACHED))
@pytest.mark.parametrize("reached", REACHED, ids=[f"{row[0]}-{row[4]}" for row in REACHED])
def test_a_key_reaches_the_run(tmp_path: Path, reached: Reached) -> None:
    key, value, illegal, native, expected, *rest = reached
    others: dict[str, Any] = rest[0] if rest else {}
    found = converted(tmp_path, "rlinf", changed(MATH, {**others, key: value}))
    assert natively(found, native) == expected
    assert f"{key}: given.yaml:1" in found.composed.provenance[native]
    assert translated(found, "rlinf").lost == {}
    with pytest.raises(ConfigError, match=f"{key} = "):
        converted(tmp_path, "rlinf", changed(MATH, {**others, key: illegal}))


def test_each_key_has_a_row_in_that_table() -> None:
    assert {row[0] for row in REACHED} == {row.key for row in load_keys("rlinf", "rlinf_newer") if row.native}


def test_a_bound_that_is_null_is_the_one_for_both(tmp_path: Path) -> None:
    both = {"algorithm.ratio_clip_eps": 0.3, "algorithm.clip_ratio_low": 0.1, "algorithm.clip_ratio_high": None}
    found = converted(tmp_path, "rlinf", changed(MATH, both))
    assert (natively(found, "algorithm.loss.clip_low"), natively(found, "algorithm.loss.clip_high")) == (0.1, 0.3)


def test_the_critics_clip_has_two_names(tmp_path: Path) -> None:
    found = converted(tmp_path, "rlinf", changed(MATH, {**GAE, "algorithm.value_cliprange": 0.5}))
    assert natively(found, "critic.value_clip") == 0.5


@pytest.mark.parametrize("how", [{"algorithm.use_reinpp_baseline": True}, {"algorithm.adv_type": "reinpp_baseline"}])
def test_a_penalty_comes_off_after_the_groups_mean(tmp_path: Path, how: dict[str, Any]) -> None:
    """RLinf compares rewards, takes the penalty off each token, then sums up."""
    changes = {**REINPP, **how, "algorithm.reinpp_kl_beta": 0.01, "algorithm.kl_penalty_type": "mse"}
    found = converted(tmp_path, "rlinf", changed(MATH, changes))
    algorithm = found.composed.experiment.algorithm
    assert (algorithm.advantage.name, algorithm.shaping.center) == ("reinforce_plus_plus", "group")
    assert algorithm.kl is not None
    assert (algorithm.kl.apply_to, algorithm.kl.estimator, algorithm.kl.coefficient) == ("reward", "k2", 0.01)
    assert translated(found, "rlinf").lost == {}


def test_a_penalty_beside_a_term_of_the_loss_has_its_own_coefficient(tmp_path: Path) -> None:
    changes = {"algorithm.reinpp_kl_beta": 0.01, "algorithm.kl_beta": 0.1, "algorithm.kl_penalty_type": "mse"}
    found = converted(tmp_path, "rlinf", changed(MATH, {**REINPP, **changes}))
    algorithm = found.composed.experiment.algorithm
    assert algorithm.kl == KlConfig(apply_to="loss", estimator="k2", coefficient=0.1)
    assert algorithm.reward_kl == RewardKlConfig(estimator="k2", coefficient=0.01)
    assert translated(found, "rlinf").lost == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward.use_reward_model": True}, ("use_reward_model = true", "needs reward.model.model_path")),
        ({**FIXED, "rollout.recompute_logprobs": False}, ("importance_sampling_fix", "recompute_logprobs = false")),
        (
            {**REINPP, "algorithm.use_reinpp_baseline": True, "algorithm.group_size": 1},
            ("use_reinpp_baseline", "group_size = 1", "group_size=2"),
        ),
    ],
)
def test_what_cant_be_done_is_told(tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "rlinf", changed(MATH, changes))
    assert [word for word in words if word not in str(error.value)] == []
