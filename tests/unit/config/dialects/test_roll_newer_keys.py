"""If these fail, a ROLL user's algorithm is another one than their file chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet.config.dialects.ledger import load_keys
from quintet.errors import ConfigError

PLAIN: dict[str, Any] = {"actor_train": {"data_args": {"file_name": "train.json"}}}
VARIANT = "actor_train.pg_variant"
WEIGHT, FILTERS = "train_infer_correction.is_weight.", "train_infer_correction.filters"
LOSS, KL, ADVANTAGE = "algorithm.loss.", "algorithm.kl.", "algorithm.advantage."
GIGPO, REINFORCE = {"adv_estimator": "gigpo"}, {"adv_estimator": "reinforce"}
PENALTY, TERM, RANGE = {"add_token_level_kl": True}, {"use_kl_loss": True}, {"use_pg_clip_range": True}
WEIGHTED = {f"{WEIGHT}enabled": True}

Reached = tuple[str, Any, Any, str, Any] | tuple[str, Any, Any, str, Any, dict[str, Any]]

REACHED: list[Reached] = [
    ("adv_estimator", "gae", "rloo", f"{ADVANTAGE}name", "gae"),
    ("adv_estimator", "reinforce", "step_reinforce", f"{ADVANTAGE}name", "reinforce"),
    ("adv_estimator", "grpo", "agentic_reinforce", f"{ADVANTAGE}name", "grpo"),
    ("adv_estimator", "gigpo", None, f"{ADVANTAGE}name", "gigpo"),
    ("adv_estimator", "mine.py:mine", "mine.py:", f"{ADVANTAGE}function", "mine.py:mine"),
    ("gamma", 0.9, 1.1, f"{ADVANTAGE}gamma", 0.9, {"adv_estimator": "gae"}),
    ("gamma", 0.9, -1, f"{ADVANTAGE}gamma", 0.9, REINFORCE),
    ("gamma", 0.9, "x", f"{ADVANTAGE}options.gamma", 0.9, {"adv_estimator": "mine.py:mine"}),
    ("lambd", 1, 2, f"{ADVANTAGE}lam", 1.0, {"adv_estimator": "gae"}),
    ("whiten_advantages", True, 1, f"{ADVANTAGE}whiten", True),
    ("step_reward_gamma", 0.8, 2, f"{ADVANTAGE}turn_gamma", 0.8, GIGPO),
    ("episode_reward_weight", 0.5, "x", f"{ADVANTAGE}episode_weight", 0.5, GIGPO),
    ("step_reward_weight", 2, "x", f"{ADVANTAGE}turn_weight", 2.0, GIGPO),
    ("norm_mean_type", "batch", "running", "algorithm.shaping.center", "batch", REINFORCE),
    ("norm_std_type", "group", "running", "algorithm.shaping.divide", "group", REINFORCE),
    ("reward_clip", 10, 0, "algorithm.shaping.clip", 10.0),
    ("ppo_epochs", 2, 0, "training.epochs", 2),
    ("pg_clip", 0.1, 1, f"{LOSS}clip_low", 0.1),
    ("pg_clip", 0.1, 0, f"{LOSS}clip_high", 0.1),
    ("use_pg_clip_range", True, 1, f"{LOSS}clip_low", 0.2, {"pg_clip": 0.3}),
    ("pg_clip_low", 0.1, 1, f"{LOSS}clip_low", 0.1, RANGE),
    ("pg_clip_high", 0.28, 0, f"{LOSS}clip_high", 0.28, RANGE),
    ("dual_clip_loss", True, 1, f"{LOSS}clip_dual", 1.4),
    ("pg_clip", 0.25, 1, f"{LOSS}clip_dual", 1.5, {"dual_clip_loss": True}),
    ("importance_sampling", "seq", "sequence", f"{LOSS}name", "gspo"),
    ("importance_sampling", "token", True, f"{LOSS}name", "ppo"),
    ("loss_agg_mode", "seq-mean-token-sum-norm", "mean", "algorithm.aggregation", "seq-mean-token-sum-norm"),
    ("entropy_loss_coef", 0.01, -1, "algorithm.entropy_coefficient", 0.01),
    ("value_clip", 0.5, 0, "critic.value_clip", 0.5),
    ("critic_warmup", 3, -1, "critic.warmup_steps", 3),
    (
        "actor_train.worker_cls",
        "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",
        "mine.Worker",
        f"{LOSS}name",
        "topr",
        {VARIANT: "topr"},
    ),
    (VARIANT, "vanilla", "plain", f"{LOSS}name", "reinforce"),
    (VARIANT, "ppo", "PPO", f"{LOSS}name", "ppo"),
    (VARIANT, "tis", 1, f"{LOSS}name", "cispo"),
    (VARIANT, "topr", 1, f"{LOSS}name", "topr"),
    (VARIANT, "cispo", 1, f"{LOSS}name", "cispo"),
    (VARIANT, "kimi15", "kimi", f"{LOSS}name", "kimi"),
    ("actor_train.tis_lower_bound", 0.5, 1, f"{LOSS}clip_low", 0.5, {VARIANT: "tis"}),
    ("actor_train.tis_upper_bound", 1.5, 0.9, f"{LOSS}clip_high", 0.5, {VARIANT: "tis"}),
    ("actor_train.cispo_epsilon_low", 0.3, 1, f"{LOSS}clip_low", 0.3, {VARIANT: "cispo"}),
    ("actor_train.cispo_epsilon_high", 4, 0, f"{LOSS}clip_high", 4.0, {VARIANT: "cispo"}),
    ("actor_train.topr_positive_weight", 2, -1, f"{LOSS}positive_weight", 2.0, {VARIANT: "topr"}),
    ("actor_train.topr_negative_weight", 0.5, -1, f"{LOSS}negative_weight", 0.5, {VARIANT: "topr"}),
    ("actor_train.kimi15_tau", 0.2, 0, f"{LOSS}tau", 0.2, {VARIANT: "kimi15"}),
    ("add_token_level_kl", True, 1, f"{KL}coefficient", 0.2),
    ("init_kl_coef", 0.1, -1, f"{KL}coefficient", 0.1, PENALTY),
    ("kl_penalty", "mse", "full", f"{KL}estimator", "k2", PENALTY),
    ("target_kl", 0.05, 0, f"{KL}target", 0.05, PENALTY),
    ("kl_horizon", 500, 0, f"{KL}horizon", 500, {**PENALTY, "target_kl": 0.05}),
    ("use_kl_loss", True, 1, f"{KL}apply_to", "loss"),
    ("kl_loss_coef", 0.01, -1, f"{KL}coefficient", 0.01, TERM),
    (f"{WEIGHT}enabled", True, 1, "algorithm.correction.level", "token"),
    (f"{WEIGHT}weight_type", "sequence", "segment", "algorithm.correction.level", "sequence", WEIGHTED),
    (f"{WEIGHT}upper_bound", 2, None, "algorithm.correction.upper", 2.0, WEIGHTED),
    (f"{WEIGHT}detach", True, False, "algorithm.correction.level", "token", WEIGHTED),
    (FILTERS, [{"enabled": True, "ratio_low": 0.5}], [{"ratio_low": 0}], "algorithm.correction.level", None),
    ("actor_infer.generating_args.top_p", 0.99, 0, "rollout.top_p", 0.99),
    ("actor_infer.generating_args.top_k", -1, -2, "rollout.top_k", 0),
]
"""Key, a legal value, an illegal one, the native key, what that becomes, and what else is written."""


def named(row: Reached) -> str:
    return f"{row[0]}-{row[4]}"


@pytest.mark.proves("roll", *(case[0] for case in REACHED))
@pytest.mark.parametrize("reached", REACHED, ids=map(named, REACHED))
def test_a_key_reaches_the_run(tmp_path: Path, reached: Reached) -> None:
    key, value, illegal, native, expected, *rest = reached
    others: dict[str, Any] = rest[0] if rest else {}
    found = converted(tmp_path, "roll", changed(PLAIN, {**others, key: value}))
    assert natively(found, native) == expected
    assert f"{key}: given.yaml:1" in found.composed.provenance[native]
    assert translated(found, "roll").lost == {}
    with pytest.raises(ConfigError, match=f"{key} = "):
        converted(tmp_path, "roll", changed(PLAIN, {**others, key: illegal}))


def test_each_key_has_a_row_in_that_table() -> None:
    assert {row[0] for row in REACHED} == {row.key for row in load_keys("roll", "roll_algorithm")}


def test_the_estimator_that_is_named_decides_whether_a_critic_learns(tmp_path: Path) -> None:
    assert converted(tmp_path, "roll", changed(PLAIN, {"adv_estimator": "gae"})).composed.experiment.needs_critic
    idle = {"adv_estimator": "reinforce", "critic.infer_batch_size": 2}
    found = converted(tmp_path, "roll", changed(PLAIN, idle)).composed
    assert not found.experiment.needs_critic
    assert "adv_estimator" in "".join(found.remarks)
    own = converted(tmp_path, "roll", changed(PLAIN, {**idle, "adv_estimator": "mine.py:mine"}))
    assert own.composed.experiment.needs_critic
    assert translated(own, "roll").lost == {}


@pytest.mark.parametrize("also", [{"gamma": 0.9}, {"reward_clip": 2.0}, PENALTY])
def test_rewards_compared_in_groups_are_summed_by_token_where_that_differs(
    tmp_path: Path, also: dict[str, Any]
) -> None:
    """ROLL's `grpo` normalises rewards by group, clips them, takes the penalty off and discounts, in this order."""
    found = converted(tmp_path, "roll", changed(PLAIN, {"adv_estimator": "grpo", **also}))
    run = found.composed.experiment
    shaping = run.algorithm.shaping
    assert (run.algorithm.advantage.name, shaping.center, shaping.divide) == ("reinforce", "group", "group")
    assert translated(found, "roll").lost == {}


def test_grpo_takes_groups_whatever_the_norm_types_say(tmp_path: Path) -> None:
    found = converted(tmp_path, "roll", changed(PLAIN, {"adv_estimator": "grpo", "norm_mean_type": "batch"}))
    run = found.composed.experiment
    assert (run.algorithm.advantage.name, run.algorithm.shaping.center) == ("grpo", "none")


def test_a_filter_of_words_bounds_learner_over_engine(tmp_path: Path) -> None:
    filters = [
        {"enabled": True, "agg_type": "geometric", "ratio_low": 0.5, "ratio_high": 4.0},
        {"enabled": False, "agg_type": "token"},
    ]
    found = converted(tmp_path, "roll", changed(PLAIN, {FILTERS: filters}))
    correction = found.composed.experiment.algorithm.correction
    assert correction is not None
    (reject,) = correction.reject
    assert (reject.estimator, reject.over, reject.upper, reject.lower) == ("k1", "sequence_mean", 2.0, 0.25)
    assert translated(found, "roll").lost == {}


def test_truncated_weights_are_between_0_and_1(tmp_path: Path) -> None:
    loss: Any = converted(tmp_path, "roll", changed(PLAIN, {VARIANT: "tis"})).composed.experiment.algorithm.loss
    assert 1.0 - loss.clip_low == pytest.approx(0.0, abs=1e-11)
    assert 1.0 + loss.clip_high == pytest.approx(1.0, abs=1e-11)


def test_a_penalty_makes_a_reference_without_a_section_for_one(tmp_path: Path) -> None:
    kl = converted(tmp_path, "roll", changed(PLAIN, PENALTY)).composed.experiment.algorithm.kl
    assert kl is not None
    assert (kl.apply_to, kl.estimator, kl.coefficient) == ("reward", "k1", 0.2)
    kl = converted(tmp_path, "roll", changed(PLAIN, {**TERM, "kl_loss_coef": 0.1})).composed.experiment.algorithm.kl
    assert kl is not None
    assert (kl.apply_to, kl.estimator, kl.coefficient) == ("loss", "k3", 0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({**PENALTY, **TERM}, ("use_kl_loss = true", "add_token_level_kl = true", "keep one")),
        ({"importance_sampling": "seq", "dual_clip_loss": True}, ("dual_clip_loss = true", "importance_sampling")),
        ({"importance_sampling": "seq", VARIANT: "cispo"}, (f"{VARIANT} = 'cispo'", "importance_sampling = 'seq'")),
        (
            {"actor_train.worker_cls": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"},
            ("worker_cls", f"set {VARIANT}=vanilla"),
        ),
        ({"critic.pg_variant": "topr"}, ("critic.pg_variant = 'topr'", "only the policy")),
        ({FILTERS: [{"enabled": True, "diff_enabled": True}]}, (FILTERS, "ratio_low")),
        ({"advantage_clip": 2.0}, ("unknown key advantage_clip",)),
    ],
)
def test_what_cant_be_done_together_or_at_all_is_told(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "roll", changed(PLAIN, changes))
    assert [word for word in words if word not in str(error.value)] == []
