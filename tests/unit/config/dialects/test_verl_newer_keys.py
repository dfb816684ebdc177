"""If these fail, a file of a newer verl is refused, or trains by another objective than it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated
from hypothesis import given
from hypothesis import strategies as st

from quintet.config.capabilities import Capability
from quintet.config.dialects.ledger import load_keys
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.verl.key_values import parse_bounds
from quintet.config.schema import keys
from quintet.errors import ConfigError

PPO = {"actor_rollout_ref": {"model": {"path": "some/model"}}}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS, GROUPS, GAP = f"{ACTOR}.policy_loss", "algorithm.filter_groups", "algorithm.rollout_correction"
MODE = f"{LOSS}.loss_mode"
BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"
GRPO = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 8}
GDPO = {**GRPO, "algorithm.adv_estimator": "gdpo"}
PARTS = {**GDPO, "algorithm.gdpo_reward_keys": ["right", "short"]}
FILTERED = {**GRPO, f"{GROUPS}.enable": True}
WEIGHED = {f"{GAP}.rollout_is": "token"}
BYPASSED = {f"{GAP}.bypass_mode": True}
REJECTED = {f"{GAP}.rollout_rs": "seq_mean_k1", f"{GAP}.rollout_rs_threshold": 2.0}
DAPO = {"reward_model.reward_manager": "dapo"}
OVERLONG = {**DAPO, f"{BUFFER}.enable": True, f"{BUFFER}.len": 64}
AHEAD = {"async_training.staleness_threshold": 1}
OWN = {"custom_reward_function.path": "rules.py"}

Case = tuple[str, Any, Any, str, Any, dict[str, Any]]

CASES: list[Case] = [
    (MODE, "gspo", "up", "algorithm.loss.name", "gspo", {}),
    (f"{ACTOR}.clip_ratio_low", 0.1, 0, "algorithm.loss.clip_low", 0.1, {}),
    (f"{ACTOR}.clip_ratio_high", 0.28, 0, "algorithm.loss.clip_high", 0.28, {}),
    (f"{ACTOR}.clip_ratio_c", 10.0, 1.0, "algorithm.loss.clip_dual", 10.0, {}),
    (f"{ACTOR}.tau_pos", 2.0, 0, "algorithm.loss.temperature_positive", 2.0, {MODE: "sapo"}),
    (f"{ACTOR}.tau_neg", 2.0, 0, "algorithm.loss.temperature_negative", 2.0, {MODE: "sapo"}),
    (f"{LOSS}.dro_beta", 0.05, 0, "algorithm.loss.beta", 0.05, {MODE: "dro"}),
    (f"{LOSS}.clip_cov_ratio", 0.01, 2, "algorithm.loss.share", 0.01, {MODE: "clip_cov"}),
    (f"{LOSS}.clip_cov_lb", 0.5, "low", "algorithm.loss.min_covariance", 0.5, {MODE: "clip_cov"}),
    (f"{LOSS}.clip_cov_ub", 9.0, "high", "algorithm.loss.max_covariance", 9.0, {MODE: "clip_cov"}),
    (f"{LOSS}.kl_cov_ratio", 0.01, -1, "algorithm.loss.share", 0.01, {MODE: "kl_cov"}),
    (f"{LOSS}.ppo_kl_coef", 1.0, -1, "algorithm.loss.coefficient", 1.0, {MODE: "kl_cov"}),
    (f"{ACTOR}.loss_agg_mode", "token-sum", "token-median", "algorithm.aggregation", "token-sum", {}),
    (
        f"{ACTOR}.loss_scale_factor",
        2048,
        0,
        "algorithm.aggregation_scale",
        2048,
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
    ),
    ("algorithm.norm_adv_by_std_in_grpo", False, 0, "algorithm.advantage.normalize_by_std", False, GRPO),
    ("algorithm.gdpo_reward_keys", ["right"], "right", "algorithm.advantage.weights.right", 1.0, GDPO),
    ("algorithm.gdpo_reward_weights", [1.0, 0.5], [1.0], "algorithm.advantage.weights.short", 0.5, PARTS),
    (f"{GROUPS}.enable", True, 1, "algorithm.drop_groups_without_signal", True, GRPO),
    (f"{GROUPS}.metric", "seq_reward", 5, "algorithm.filter.refill_rounds", 999_999 + 1, FILTERED),
    (f"{GROUPS}.max_num_gen_batches", 10, 0.5, "algorithm.filter.refill_rounds", 9, FILTERED),
    (f"{GAP}.bypass_mode", True, 1, "rollout.recompute_logprobs", False, {}),
    (f"{GAP}.loss_type", "reinforce", "ppo", "algorithm.loss.name", "reinforce", BYPASSED),
    (f"{GAP}.rollout_is", "sequence", "batch", "algorithm.correction.level", "sequence", {}),
    (f"{GAP}.rollout_is_threshold", "0.5_5.0", "5.0_0.5", "algorithm.correction.lower", 0.5, WEIGHED),
    (f"{GAP}.rollout_is_batch_normalize", True, 1, "algorithm.correction.normalize", True, WEIGHED),
    (
        f"{GAP}.rollout_rs",
        "token_k1, seq_max_k3",
        "seq_max_k1",
        "algorithm.correction.reject",
        (
            {"estimator": "k1", "over": "token", "upper": 2.0, "lower": None},
            {"estimator": "k3", "over": "sequence_max", "upper": 2.0, "lower": None},
        ),
        {f"{GAP}.rollout_rs_threshold": 2.0},
    ),
    (
        f"{GAP}.rollout_rs_threshold",
        "0.999_1.001",
        "tight",
        "algorithm.correction.reject",
        ({"estimator": "k1", "over": "sequence_mean", "upper": 1.001, "lower": 0.999},),
        {f"{GAP}.rollout_rs": "seq_mean_k1"},
    ),
    (f"{BUFFER}.enable", True, 1, "reward.manager", "dapo", {**DAPO, f"{BUFFER}.len": 64}),
    (f"{BUFFER}.len", 128, 0, "reward.overlong.buffer", 128, {**DAPO, f"{BUFFER}.enable": True}),
    (f"{BUFFER}.penalty_factor", 0.5, -1, "reward.overlong.penalty", 0.5, OVERLONG),
    (
        "reward_model.reward_kwargs.max_resp_len",
        512,
        1024,
        "reward.overlong.buffer",
        64,
        {**OVERLONG, "data.max_response_length": 512},
    ),
    ("custom_reward_function.reward_kwargs", {"easy": True}, 1, "reward.function_arguments.easy", True, OWN),
    ("data.train_max_samples", 100, 0, "data.train_rows", 100, {}),
    ("data.val_max_samples", 50, -2, "data.validation_rows", 50, {}),
    ("data.val_batch_size", 16, 0, "data.validation_batch", 16, {}),
    ("data.seed", 7, -1, "data.seed", 7, {}),
    ("data.validation_shuffle", True, 1, "data.validation_shuffle", True, {}),
    ("data.reward_fn_key", "origin", 1, "data.source_key", "origin", {}),
    ("trainer.val_only", True, 1, "validation.only", True, {}),
    (f"{ROLLOUT}.min_p", 0.05, 2, "rollout.min_p", 0.05, {}),
    (f"{ROLLOUT}.repetition_penalty", 1.1, 0, "rollout.repetition_penalty", 1.1, {}),
    (f"{ROLLOUT}.min_tokens", 4, -1, "rollout.min_response_tokens", 4, {}),
    (f"{ROLLOUT}.stop", ["</answer>"], 7, "rollout.stop", ("</answer>",), {}),
    (f"{ROLLOUT}.enable_chunked_prefill", False, 0, "rollout.engine_options.chunked_prefill", False, {}),
    (f"{ROLLOUT}.max_model_len", 2048, 0, "rollout.engine_options.max_model_tokens", 2048, {}),
    ("async_training.staleness_threshold", 0.5, -1, "rollout.async_ratio", 0.5, {}),
    ("async_training.partial_rollout", False, 0, "rollout.partial", False, AHEAD),
]
TAKEN: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("algorithm.use_pf_ppo", False, 1, {}),
    (f"{ROLLOUT}.calculate_log_probs", True, 1, {}),
    (f"{BUFFER}.log", True, 1, OVERLONG),
]
"""Keys that change nothing: what they ask for is so either way."""


def told(tmp_path: Path, changes: dict[str, Any]) -> str:
    """What is said against such a file."""
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "verl", changed(PPO, changes))
    return str(error.value)


@pytest.mark.proves("verl", *(case[0] for case in (*CASES, *TAKEN)))
@pytest.mark.parametrize(
    ("key", "value", "illegal", "native", "expected", "others"), CASES, ids=[one[0] for one in CASES]
)
def test_a_newer_key_reaches_the_run(
    tmp_path: Path, key: str, value: Any, illegal: Any, native: str, expected: Any, others: dict[str, Any]
) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {**others, key: value}))
    assert natively(found, native) == expected
    assert not [remark for remark in found.composed.remarks if "has no effect" in remark]
    assert {fault.key for fault in found.unsupported} == set()
    assert key in "".join(
        place for name, place in found.composed.provenance.items() if name.startswith(native.rpartition(".")[0])
    )
    assert translated(found, "verl").lost == {}
    assert key.rpartition(".")[2] in told(tmp_path, {**others, key: illegal})


@pytest.mark.parametrize(("key", "value", "illegal", "others"), TAKEN, ids=[one[0] for one in TAKEN])
def test_what_is_so_either_way_is_taken(
    tmp_path: Path, key: str, value: Any, illegal: Any, others: dict[str, Any]
) -> None:
    with_it = converted(tmp_path, "verl", changed(PPO, {**others, key: value}))
    assert with_it.composed.experiment == converted(tmp_path, "verl", changed(PPO, others)).composed.experiment
    assert key in told(tmp_path, {**others, key: illegal})


def test_every_newer_key_is_here_and_none_of_the_reference() -> None:
    older = Capability.CORRECTION_OPTIONS
    rows = [row for row in load_keys("verl", "verl_newer") if row.native or row.requires is not older]
    assert {row.key for row in rows} == {one[0] for one in (*CASES, *TAKEN)}
    documented = DIALECTS["verl"].specs()
    assert not {row.key for row in load_keys("verl", "verl_newer")} & documented.keys()
    known = {key.name for key in keys()}
    for row in load_keys("verl", "verl_newer"):
        assert set(row.native) <= known
        assert 20 <= len(row.effect) <= 260


@pytest.mark.parametrize(
    "row", [row for row in load_keys("verl", "verl_newer") if row.aliases], ids=lambda row: row.key
)
def test_places_of_other_releases_are_read_as_the_same_key(tmp_path: Path, row: Any) -> None:
    value, others = next((one[1], one[-1]) for one in (*CASES, *TAKEN) if one[0] == row.key)
    plain = converted(tmp_path, "verl", changed(PPO, {**others, row.key: value}))
    for alias in row.aliases:
        without = {key: one for key, one in others.items() if key != row.key}
        found = converted(tmp_path, "verl", changed(PPO, {**without, alias: value}))
        assert found.composed.experiment == plain.composed.experiment
        assert any(remark.startswith(f"{alias} (") for remark in found.composed.remarks)


CLIPS = {"clip_low": 0.1, "clip_high": 0.3}
OF_LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {"name": "ppo", **CLIPS, "clip_dual": 5.0},
    "gspo": {"name": "gspo", **CLIPS},
    "geo_mean": {"name": "gmpo", **CLIPS},
    "cispo": {"name": "cispo", **CLIPS},
    "sapo": {"name": "sapo", "temperature_positive": 1.0, "temperature_negative": 1.05},
    "dppo_tv": {"name": "dppo_tv", **CLIPS, "max_ratio": 5.0},
    "dppo_kl": {"name": "dppo_kl", **CLIPS, "max_ratio": 5.0},
    "dro": {"name": "dro", "beta": 0.1},
    "clip_cov": {"name": "clip_cov", **CLIPS, "share": 2e-4, "min_covariance": 1.0, "max_covariance": 5.0},
    "kl_cov": {"name": "kl_cov", "share": 2e-4, "coefficient": 0.1},
    "gpg": {"name": "gpg"},
    "bypass_mode": {"name": "ppo", **CLIPS, "clip_dual": 5.0},
    "mine.py:loss": {"name": "custom", "function": "mine.py:loss", "options": {**CLIPS, "clip_dual": 5.0}},
}


@pytest.mark.parametrize("written", OF_LOSSES)
def test_every_loss_of_verl_is_chosen_by_its_name_with_its_own_options(tmp_path: Path, written: str) -> None:
    others = {f"{LOSS}.dro_beta": 0.1} if written == "dro" else {}
    others |= BYPASSED if written == "bypass_mode" else {}
    clips = {f"{ACTOR}.clip_ratio_low": 0.1, f"{ACTOR}.clip_ratio_high": 0.3, f"{ACTOR}.clip_ratio_c": 5.0}
    found = converted(tmp_path, "verl", changed(PPO, {MODE: written, **clips, **others}))
    assert found.composed.experiment.algorithm.loss.model_dump() == OF_LOSSES[written]
    idle = {remark.split(" = ")[0] for remark in found.composed.remarks if "has no effect" in remark}
    has = OF_LOSSES[written].get("options", OF_LOSSES[written])
    reads = {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high"}
    assert idle == {f"{ACTOR}.{key}" for key, option in reads.items() if option not in has} | (
        {f"{ACTOR}.clip_ratio_c"} - {f"{ACTOR}.clip_ratio_c" for option in ("clip_dual", "max_ratio") if option in has}
    )
    assert translated(found, "verl").lost == {}
    mode = next(spec for spec in load_keys("verl", "verl_newer") if spec.key == MODE)
    assert {*mode.value_type.choices, "mine.py:loss"} == set(OF_LOSSES)


@pytest.mark.parametrize("side", [None, -1])
def test_sides_of_the_clip_without_a_value_do_not_follow_it(tmp_path: Path, side: int | None) -> None:
    """The code of rllm, a fork, takes `clip_ratio` for a side of -1, as verl for null."""
    sides = {f"{ACTOR}.clip_ratio_low": side, f"{ACTOR}.clip_ratio_high": side}
    found = converted(tmp_path, "verl", changed(PPO, {f"{ACTOR}.clip_ratio": 0.3, **sides}))
    assert natively(found, "algorithm.loss.clip_low") == natively(found, "algorithm.loss.clip_high") == 0.3


def test_a_clip_without_a_lower_bound_is_refused(tmp_path: Path) -> None:
    """Clip-Cov's scripts set both sides to 1: the ratio is between 0 and 2."""
    found = converted(tmp_path, "verl", changed(PPO, {f"{ACTOR}.clip_ratio_low": 1, f"{ACTOR}.clip_ratio_high": 1}))
    assert natively(found, "algorithm.loss.clip_low") == natively(found, "algorithm.loss.clip_high") == 1


@pytest.mark.parametrize("is_written", [True, False], ids=["in the file", "in the release"])
def test_sides_hide_the_clip_and_the_plan_says_so(tmp_path: Path, is_written: bool) -> None:
    """verl's own file sets both sides to 0.2, also for a file that leaves them out."""
    sides = {f"{ACTOR}.clip_ratio_low": 0.2, f"{ACTOR}.clip_ratio_high": 0.2} if is_written else {}
    found = converted(tmp_path, "verl", changed(PPO, {f"{ACTOR}.clip_ratio": 0.3, **sides}))
    assert natively(found, "algorithm.loss.clip_high") == 0.2
    assert any("clip_ratio = 0.3" in remark and "no effect" in remark for remark in found.composed.remarks)


FAULTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({MODE: "dro"}, ("dro_beta = null", "dro_beta=0.1")),
    ({MODE: "bypass_mode"}, ("loss_mode = 'bypass_mode'", "rollout_correction.bypass_mode=true")),
    ({f"{GAP}.rollout_rs": "token_k2"}, ("rollout_rs_threshold = null", "token_k2")),
    ({**REJECTED, f"{GAP}.rollout_rs_threshold": "1,2"}, ("rollout_rs_threshold = '1,2'", "rollout_rs_threshold=1")),
    ({f"{GAP}.rollout_rs": "token_k2", f"{GAP}.rollout_rs_threshold": "0.5_2"}, ("token_k2 has only an upper bound",)),
    ({**DAPO, f"{BUFFER}.enable": True}, ("overlong_buffer_cfg.len = null",)),
    ({**OVERLONG, f"{BUFFER}.len": 1000}, ("overlong_buffer_cfg.len = 1000", "len=512")),
    ({f"{ACTOR}.clip_ratio_low": -0.5}, ("clip_ratio_low = -0.5", "actor.clip_ratio_low: ")),
]


@pytest.mark.parametrize(("changes", "words"), FAULTS, ids=range(len(FAULTS)))
def test_newer_keys_that_contradict_others_are_told(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    message = told(tmp_path, changes)
    assert [word for word in words if word not in message] == [], message


CORRECTIONS: list[tuple[dict[str, Any], str]] = [
    ({**BYPASSED, **REJECTED}, f"{GAP}.rollout_rs"),
    ({**BYPASSED, **WEIGHED, f"{GAP}.loss_type": "reinforce"}, f"{GAP}.rollout_is"),
    ({f"{GAP}.rollout_is": "geometric"}, f"{GAP}.rollout_is"),
    ({f"{GAP}.rollout_rs": "geometric", f"{GAP}.rollout_rs_threshold": 1.001}, f"{GAP}.rollout_rs"),
]


@pytest.mark.parametrize(("changes", "key"), CORRECTIONS, ids=range(len(CORRECTIONS)))
def test_a_correction_that_this_version_lacks_is_named_and_not_applied(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    found = converted(tmp_path, "verl", changed(PPO, changes))
    assert [(one.key, str(Capability.CORRECTION_OPTIONS) in one.message) for one in found.unsupported] == [(key, True)]
    assert found.composed.experiment.algorithm.correction is None


def test_a_bypass_keeps_a_loss_that_the_file_names(tmp_path: Path) -> None:
    """As verl's example of DPPO, whose workers started with it."""
    found = converted(tmp_path, "verl", changed(PPO, {**BYPASSED, MODE: "gspo"}))
    assert natively(found, "algorithm.loss.name") == "gspo"
    assert any("loss_type = 'ppo_clip'" in remark for remark in found.composed.remarks)


def test_a_metric_of_a_reward_function_waits(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {**FILTERED, f"{GROUPS}.metric": "response_filter"}))
    assert [str(Capability.GROUP_FILTERS) in problem.message for problem in found.unsupported] == [True]


def test_cispo_may_have_no_lower_bound(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {MODE: "cispo", f"{ACTOR}.clip_ratio_low": 10}))
    assert natively(found, "algorithm.loss.clip_low") == 10


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_single_response_to_a_prompt_has_its_reward_as_advantage(tmp_path: Path, estimator: str) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {"algorithm.adv_estimator": estimator, f"{ROLLOUT}.n": 1}))
    assert natively(found, "algorithm.advantage.name") == "arpo"
    assert any("nothing to compare" in remark for remark in found.composed.remarks)


def test_sharding_groups_within_those_of_a_sequence_wait(tmp_path: Path) -> None:
    sizes = {f"{ACTOR}.fsdp_config.fsdp_size": 2, f"{ACTOR}.ulysses_sequence_parallel_size": 4}
    others = {
        "actor_rollout_ref.model.use_remove_padding": True,
        "trainer.n_gpus_per_node": 8,
        f"{ACTOR}.use_dynamic_bsz": True,
    }
    found = converted(tmp_path, "verl", changed(PPO, sizes | others))
    assert natively(found, "actor.sharding.group_size") is None
    assert str(Capability.SHARDING_GROUPS) in str(found.unsupported)


def test_the_manager_of_dapo_without_its_penalty_judges_as_the_naive_one(tmp_path: Path) -> None:
    assert natively(converted(tmp_path, "verl", changed(PPO, DAPO)), "reward.manager") == "naive"


def test_a_filter_by_another_metric_says_what_it_compares(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {**FILTERED, f"{GROUPS}.metric": "acc"}))
    assert any(
        "metric = 'acc'" in remark and "rewards of whole responses" in remark for remark in found.composed.remarks
    )


def test_without_newer_keys_the_run_is_that_of_the_reference(tmp_path: Path) -> None:
    algorithm = converted(tmp_path, "verl", PPO).composed.experiment.algorithm
    assert algorithm.loss.model_dump() == {"name": "ppo", "clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0}
    assert algorithm.correction is None
    assert algorithm.filter.refill_rounds == 0
    assert not algorithm.drop_groups_without_signal


def test_verl_rejects_tokens_before_it_computes_advantages(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(PPO, REJECTED))
    assert natively(found, "algorithm.correction.reject_before_advantages") is True
    assert translated(found, "verl").lost == {}
    tree = changed(PPO, {f"{GAP}.rollout_rs": "token_k1", f"{GAP}.rollout_rs_threshold": 0.5})
    message = r"rollout_rs_threshold = 0.5 .*: the lower bound of token_k1, 1 / 0.5, is above the upper one"
    with pytest.raises(ConfigError, match=message):
        converted(tmp_path, "verl", tree)


def test_vagen_takes_those_that_concern_the_objective_and_data_wait_there(tmp_path: Path) -> None:
    tree = {"env1": {"env_name": "sokoban"}, "rollout_manager": {"n_trajectory": 8}}
    found = converted(tmp_path, "vagen", changed(tree, {MODE: "gspo", f"{ACTOR}.clip_ratio_high": 0.28, **REJECTED}))
    assert natively(found, "algorithm.loss.name") == "gspo"
    assert natively(found, "algorithm.loss.clip_high") == 0.28
    assert natively(found, "algorithm.correction.reject")[0]["over"] == "sequence_mean"
    assert translated(found, "vagen").lost == {}
    waiting = converted(tmp_path, "vagen", changed(tree, {"data.val_max_samples": 5}))
    assert {fault.key for fault in waiting.unsupported} == {"data.val_max_samples"}


def test_megatrons_files_have_them_too() -> None:
    tree = {"actor_rollout_ref": {"actor": {"strategy": "megatron"}}}
    assert MODE in DIALECTS["verl"].narrowed(tree).specs()


@given(st.one_of(st.text(max_size=12), st.floats(), st.integers(), st.booleans(), st.none()))
def test_bounds_are_two_positive_numbers_in_order_or_nothing(given: object) -> None:
    found = parse_bounds(given)
    if found is not None:
        lower, upper = found
        assert upper > 0
        assert lower is None or 0 < lower <= upper
