"""If these fail, a file of RAGEN's releases of 2026, or of April 2025, runs as something else than what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import natively
from test_ragen_agents import GRPO, NORMALIZED, TWO, load, only, write

from quintet.config.capabilities import Capability
from quintet.config.compose import load_experiment
from quintet.config.dialects.composition.foreign_config import compose_config, config_from_tree
from quintet.config.dialects.loader import ConversionResult, convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.release_tables import load_release_tables
from quintet.config.dotted import unflatten
from quintet.config.native.envs import ENV_UNION
from quintet.config.translate import translate
from quintet.errors import ConfigError

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
STRATEGY, VALUE = f"{ROLLOUT}.rollout_filter_strategy", f"{ROLLOUT}.rollout_filter_value"
WITHOUT_EFFECT: dict[str, str] = {
    f"{ROLLOUT}.gradient_analysis_num_buckets": "3",
    f"{ROLLOUT}.gradient_analysis_bucket_mode": "fixed",
    f"{ROLLOUT}.val_kwargs.logprobs": "20",
    f"{ROLLOUT}.enable_kv_cache": "false",
    f"{ROLLOUT}.lora": "{rank: 64}",
    f"{ACTOR}.lora": "{rank: 64}",
    "use_critic": "false",
    "agent_proxy.batch_adjust_mode": "delete",
    "trainer.wandb_id": "abc",
    "trainer.log_group_rv_table": "true",
    "trainer.gradient_analysis_every": "5",
    "trainer.gradient_analysis_env_groups": "5",
    "trainer.gradient_analysis_group_size": "5",
    "trainer.gradient_analysis_log_prefilter": "true",
    "collapse_detection": "{compute_freq: 3}",
    "output": "{format: pkl}",
    "lora.local_temp_dir": "lora",
    "critic.model.lora_alpha": "32",
    "critic.model.target_modules": "all-linear",
    "custom_envs.SimpleSokoban.parallel_friendly": "true",
    "custom_envs.SimpleSokoban.max_workers": "5",
}
WAITING: dict[str, tuple[str, Capability]] = {
    f"{ROLLOUT}.rollout_filter_metric": ("entropy", Capability.GROUP_FILTERS),
    "agent_proxy.context_window_mode": ("single_turn", Capability.CONTEXT_FORMS),
    "trainer.gradient_analysis_mode": ("true", Capability.GRADIENT_ANALYSIS),
    "trainer.gradient_analysis_only": ("true", Capability.GRADIENT_ANALYSIS),
    "trainer.exit_after_gradient_analysis": ("true", Capability.GRADIENT_ANALYSIS),
    "critic.lora": ("{enabled: true}", Capability.LORA_OPTIONS),
    "critic.model.lora_rank": ("8", Capability.LORA_OPTIONS),
    "custom_envs.SimpleSokoban.env_config.action_lookup": ("{1: North}", Capability.GRID_SYMBOLS),
}


def converted(directory: Path, *overrides: str, tree: dict[str, Any] | None = None) -> ConversionResult:
    return convert(compose_config(write(directory, tree), overrides), DIALECTS["ragen"], to_plan=True)


@pytest.mark.proves("ragen", STRATEGY, VALUE)
@pytest.mark.parametrize(
    ("strategy", "amount", "share"),
    [("top_k", "0.45", 0.375), ("top_k", "0.01", 0.125), ("top_k_abs", "5", 0.625), ("top_p", "1.0", 1.0)],
)
def test_the_filter_of_2026_keeps_the_groups_that_it_says(
    tmp_path: Path, strategy: str, amount: str, share: float
) -> None:
    """By hand, of 8 groups: 0.45 × 8 rounded down is 3, a share below one group keeps one, 5 are 5 of 8."""
    newer = (f"{STRATEGY}={strategy}", f"{VALUE}={amount}", "ppo_mini_batch_size=16")
    run = load(tmp_path, *newer, f"{ROLLOUT}.rollout_filter_type=smallest").experiment
    assert (run.algorithm.filter.keep_share, run.algorithm.filter.keep_by) == (share, "least_deviation")


FILTER = {
    VALUE: ("0.9", "top_p", 0.9),
    f"{ROLLOUT}.rollout_filter_include_zero": ("false", "drop_zero", True),
    f"{ROLLOUT}.rollout_filter_top_p_prob_mode": ("softmax", "top_p_softmax", True),
    f"{ROLLOUT}.rollout_filter_selection_eps": ("0.1", "top_p_tolerance", 0.1),
    f"{ROLLOUT}.rollout_filter_empty_stop_steps": ("3", "stop_after_empty_steps", 3),
    f"{ROLLOUT}.rollout_filter_metric": ("reward", "keep_by", "mean"),
    f"{ACTOR}.filter_loss_scaling": ("sqrt", "scale_advantages", "sqrt"),
}


@pytest.mark.proves("ragen", *FILTER)
def test_each_option_of_the_filter_of_2026_reaches_the_run(tmp_path: Path) -> None:
    newer = (f"{STRATEGY}=top_p", f"{ROLLOUT}.rollout_filter_type=largest")
    plain = load(tmp_path, *newer).experiment.algorithm.filter.model_dump()
    assert (plain["top_p"], plain["top_p_tolerance"], plain["stop_after_empty_steps"]) == (1.0, 0.01, 5)
    changed = load(tmp_path, *newer, *(f"{key}={text}" for key, (text, _, _) in FILTER.items()))
    expected = {native: value for _, native, value in FILTER.values()}
    assert changed.experiment.algorithm.filter.model_dump() == plain | expected


def test_groups_near_the_best_are_kept_and_a_share_above_one_is_refused(tmp_path: Path) -> None:
    found = load(tmp_path, f"{STRATEGY}=min_p", f"{VALUE}=0.5").experiment.algorithm.filter
    assert (found.min_p, found.top_p, found.keep_share) == (0.5, 1.0, 1.0)
    with pytest.raises(ConfigError, match="rollout_filter_value"):
        load(tmp_path, f"{STRATEGY}=min_p", f"{VALUE}=1.5")


def test_the_ratio_of_2025_has_no_effect_beside_the_value_of_2026(tmp_path: Path) -> None:
    found = load(tmp_path, f"{VALUE}=1.0", f"{ROLLOUT}.rollout_filter_ratio=0.25")
    assert found.experiment.algorithm.filter.keep_share == 1.0
    assert any("rollout_filter_ratio" in remark and "has no effect" in remark for remark in found.remarks)


@pytest.mark.parametrize("strategy", ["{top_p: 0.9, top_p_tolerance: 0.1, keep_by: least_mean}", "{min_p: 0.5}"])
def test_a_filter_by_shares_of_scores_is_translated(strategy: str) -> None:
    ours = load_experiment(None, ["env.name=countdown", "warm_start=null", f"algorithm.filter={strategy}"])
    lost = translate(ours, DIALECTS["ragen"]).lost
    assert not [key for key in lost if key.startswith("algorithm.filter.")]


@pytest.mark.proves("ragen", "algorithm.zero_task_advantage", "algorithm.soft_advantage_reweight")
def test_advantages_are_weighted_or_removed(tmp_path: Path) -> None:
    soft = "algorithm.soft_advantage_reweight=true"
    weighted: Any = load(tmp_path, *GRPO, soft).experiment.algorithm.advantage
    assert (weighted.name, weighted.deviation_weight) == ("grpo", True)
    assert load(tmp_path, "algorithm.zero_task_advantage=true").experiment.algorithm.zero_advantages
    assert any("only has an effect with grpo" in remark for remark in load(tmp_path, soft).remarks)
    (problem,) = converted(tmp_path, *GRPO, soft, "agent_proxy.reward_normalization.method=asym_clip").unsupported
    assert problem.key == "algorithm.soft_advantage_reweight"


@pytest.mark.proves("ragen", "algorithm.norm_adv_by_std_in_grpo")
def test_grpo_compares_groups_since_2026(tmp_path: Path) -> None:
    newer = (*GRPO, f"{VALUE}=1.0")
    advantages: list[Any] = [
        load(tmp_path, *newer, f"algorithm.norm_adv_by_std_in_grpo={setting}").experiment.algorithm.advantage
        for setting in ("true", "false")
    ]
    assert [(one.name, one.normalize_by_std) for one in advantages] == [("grpo", True), ("grpo", False)]


def test_the_mode_of_the_context_decides_about_its_window(tmp_path: Path) -> None:
    window = "agent_proxy.max_context_window=3"
    runs = [
        load(tmp_path, window, f"agent_proxy.context_window_mode={mode}") for mode in ("full", "limited_multi_turn")
    ]
    assert [run.experiment.rollout.window_size for run in runs] == [None, 3]


@pytest.mark.proves("ragen", "custom_envs.SimpleSokoban.env_config.success_rate")
def test_slippery_ice_has_the_odds_and_the_holes_of_its_release(tmp_path: Path) -> None:
    newer: Any = load(tmp_path, *only("Lake"), "custom_envs.Lake.env_config.success_rate=0.8").experiment.env
    older: Any = load(tmp_path, *only("Lake")).experiment.env
    assert (newer.success_rate, newer.floor_density) == (0.8, 0.9)
    assert (round(older.success_rate, 6), older.floor_density) == (0.333333, 0.8)


@pytest.mark.proves("ragen", "lora.enabled")
def test_adapters_that_are_off_are_not_trained(tmp_path: Path) -> None:
    assert load(tmp_path, "lora.rank=64", "lora.enabled=false").experiment.policy.lora is None


@pytest.mark.proves("ragen", *WITHOUT_EFFECT)
def test_keys_of_releases_without_an_effect_change_nothing(tmp_path: Path) -> None:
    words = [f"{key}={text}" for key, text in WITHOUT_EFFECT.items()]
    assert load(tmp_path, *words).experiment == load(tmp_path, words[0]).experiment


def test_what_does_not_exist_here_waits_by_its_name(tmp_path: Path) -> None:
    overrides = [f"{key}={text}" for key, (text, _) in WAITING.items()]
    problems = {problem.key: problem.message for problem in converted(tmp_path, *overrides).unsupported}
    for key, (_, capability) in WAITING.items():
        assert str(capability) in problems[key], key


def test_names_of_arms_are_drawn_from_the_split(tmp_path: Path) -> None:
    runs: list[Any] = [
        load(tmp_path, *only("Bandit"), f"custom_envs.Bandit.env_config.split={split}").experiment.env
        for split in ("train", "test", "null")
    ]
    assert [env.arms for env in runs] == ["train", "test", "named"]


@pytest.mark.proves("ragen", "custom_envs.SimpleSokoban.env_config.observation_format")
@pytest.mark.parametrize("tag", ["SimpleSokoban", "Lake"])
@pytest.mark.parametrize(
    ("form", "native"), [("grid", "grid"), ("coord", "coordinates"), ("grid_coord", "grid_coordinates")]
)
def test_states_have_the_form_of_the_file(tmp_path: Path, tag: str, form: str, native: str) -> None:
    words = (
        *only(tag),
        f"custom_envs.{tag}.env_config.observation_format={form}",
        f"custom_envs.{tag}.env_instruction=Go",
    )
    env: Any = load(tmp_path, *words).experiment.env
    assert env.observation == native
    assert ("(row, column)" in env.instruction) == (form == "coord")
    assert ("Symbols: # wall" in env.instruction) == (form != "coord" and tag == "SimpleSokoban")


@pytest.mark.parametrize(
    "env",
    [
        "{name: sokoban, observation: coordinates}",
        "{name: frozenlake, observation: grid_coordinates}",
        "{name: bandit, arms: test}",
    ],
)
def test_forms_of_states_and_arms_are_translated(env: str) -> None:
    ours = load_experiment(None, [f"env={env}", "warm_start=null", "rollout.think=true"])
    lost = translate(ours, DIALECTS["ragen"]).lost
    assert not [key for key in lost if key in ("env.observation", "env.arms")]


def test_an_environment_that_does_not_exist_here_waits_and_one_that_is_not_used_does_not(tmp_path: Path) -> None:
    proofs = {"custom_envs": {"Proofs": {"env_type": "lean", "env_config": {"timeout": 1}}}}
    assert converted(tmp_path, tree=proofs).unsupported == ()
    (problem,) = converted(tmp_path, *only("Proofs"), tree=proofs).unsupported
    assert (problem.key, str(Capability.TEXT_ENVS) in problem.message) == ("custom_envs.Proofs.env_type", True)


PUZZLES: dict[str, dict[str, tuple[Any, str, Any]]] = {
    "search": {
        "train_path": ("mine.parquet", "path", "mine.parquet"),
        "max_instances": (9, "max_rows", 9),
        "retrieval_server_url": ("http://10.0.0.7:9", "url", "http://10.0.0.7:9"),
        "retrieval_timeout": (5, "timeout_seconds", 5.0),
        "max_search_results": (3, "passages", 3),
        "max_total_chars": (900, "max_characters", 900),
        "max_steps": (4, "max_steps", 4),
        "correct_reward": (2, "correct_reward", 2.0),
        "incorrect_reward": (-1, "wrong_reward", -1.0),
        "f1_threshold": (0.5, "min_f1", 0.5),
    },
    "sudoku": {
        "grid_size": (4, "size", 4),
        "difficulty": ("hard", "difficulty", "hard"),
        "render_format": ("simple", "observation", "plain"),
        "show_valid_numbers": (False, "list_candidates", False),
        "max_steps": (30, "max_steps", 30),
        "correct_placement_score": (2, "correct_reward", 2.0),
        "invalid_action_score": (-1, "invalid_reward", -1.0),
        "completion_bonus": (5, "solved_reward", 5.0),
    },
    "game_2048": {
        "size": (5, "size", 5),
        "two_prob": (0.5, "two_probability", 0.5),
        "use_log_reward": (False, "log_reward", False),
    },
    "rubikscube": {"scramble_depth": (2, "scramble_depth", 2), "max_steps": (9, "max_steps", 9)},
}
PUZZLE_DEFAULTS: dict[str, dict[str, Any]] = {"sudoku": {"observation": "marked"}, "search": {"max_rows": 20000}}
UNREAD: dict[str, dict[str, Any]] = {
    "sudoku": {"show_conflicts": False, "show_candidates": True},
    "search": {"dataset_name": "other", "mock_mode": False},
}
OPTION = "custom_envs.SimpleSokoban.env_config"


@pytest.mark.proves("ragen", *(f"{OPTION}.{option}" for options in PUZZLES.values() for option in options))
@pytest.mark.proves("ragen", *(f"{OPTION}.{option}" for options in UNREAD.values() for option in options))
@pytest.mark.parametrize("kind", PUZZLES)
def test_the_puzzles_have_the_options_of_the_file(tmp_path: Path, kind: str) -> None:
    options = {option: written for option, (written, _, _) in PUZZLES[kind].items()}

    def env(options: dict[str, Any]) -> dict[str, Any]:
        tree = {"custom_envs": {"Puzzle": {"env_type": kind, "max_actions_per_traj": 7, "env_config": options}}}
        found = converted(tmp_path, *only("Puzzle"), tree=tree)
        assert found.unsupported == ()
        return found.composed.experiment.env.model_dump()

    plain = env({})
    defaults = ENV_UNION.config_class(kind)(max_actions=7, **PUZZLE_DEFAULTS.get(kind, {})).model_dump()
    assert plain == defaults
    assert env(options | UNREAD.get(kind, {})) == plain | {
        native: expected for _, native, expected in PUZZLES[kind].values()
    }


def test_the_actions_of_the_cube_follow_the_users_text(tmp_path: Path) -> None:
    cube = {"env_type": "rubikscube", "env_instruction": "Solve it.", "max_tokens": 96}
    found = converted(tmp_path, *only("Cube"), tree={"custom_envs": {"Cube": cube}})
    instruction = str(found.composed.experiment.env.instruction)  # type: ignore[attr-defined]
    assert instruction.startswith("Solve it.\nActions: U, U', D, D', L, L', R, R', F, F', B, B'; up to")


def test_made_up_passages_wait(tmp_path: Path) -> None:
    search = {"env_type": "search", "env_config": {"mock_mode": True}}
    (problem,) = converted(tmp_path, *only("Search"), tree={"custom_envs": {"Search": search}}).unsupported
    assert problem.key == "custom_envs.Search.env_config.mock_mode"


@pytest.mark.parametrize("name", ["sudoku", "game_2048", "rubikscube", "search"])
def test_a_puzzle_is_translated(name: str) -> None:
    lost = translate(load_experiment(None, [f"env.name={name}", "warm_start=null"]), DIALECTS["ragen"]).lost
    # RAGEN has a limit of its own for both
    assert not [key for key in lost if key.startswith("env.") and key not in ("env.max_actions", "env.max_rows")]


def test_more_visible_gpus_than_a_node_has_are_no_contradiction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load(tmp_path, "system.CUDA_VISIBLE_DEVICES='2,3'").experiment
    assert run.placement.visible_devices == (2,)


def test_a_whole_file_of_before_filters_has_none_and_one_clip_ratio() -> None:
    """By hand from base.yaml of a69f8a5, 2025-04-14: 128 episodes in mini-batches of 32, all trained on."""
    tables = load_release_tables("ragen")
    assert tables is not None
    config = config_from_tree(unflatten(tables.table("base", "2025-04-14")), "base.yaml:1")
    found = convert(config, DIALECTS["ragen"], to_plan=True)
    run = found.composed.experiment
    assert found.composed.release.startswith("ragen 2025-04-14: the file is a copy of its own")
    assert (run.algorithm.filter.keep_share, run.training.mini_batches) == (1.0, 4)
    assert [natively(found, f"algorithm.loss.clip_{side}") for side in ("low", "high")] == [0.2, 0.2]
    assert run.algorithm.kl is not None, "until 2025-04-29, KL is in the rewards unless it is in the loss"
    assert (run.algorithm.kl.apply_to, run.algorithm.kl.coefficient) == ("reward", 0.001)


def test_null_in_place_of_a_size_that_follows_another_is_that_one(tmp_path: Path) -> None:
    sizes = ("actor_rollout_ref.actor.ppo_mini_batch_size=null", "critic.ppo_mini_batch_size=null")
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null"
    run = load(tmp_path, "ppo_mini_batch_size=16", "micro_batch_size_per_gpu=2", micro, *sizes).experiment
    assert (run.training.mini_batches, run.actor.budget.sequences) == (8, 2)


def test_a_filter_keeps_one_group_if_that_fills_a_mini_batch(tmp_path: Path) -> None:
    """As RAGEN's WebShop of 2025-04, with one episode in a step and a filter of 0.25."""
    sizes = [
        f"es_manager.{side}.{key}" for side in ("train", "val") for key in ("env_groups=1", "env_configs.n_groups=[1]")
    ]
    found = load(tmp_path, "es_manager.train.group_size=1", "ppo_mini_batch_size=1", *sizes)
    assert (found.experiment.algorithm.filter.keep_share, found.experiment.training.mini_batches) == (1.0, 1)
    assert any("one is kept" in remark for remark in found.remarks)


def test_too_few_visible_gpus_are_no_contradiction_before_ragen_compared_them(tmp_path: Path) -> None:
    april = {"ctx_manager": {"generation": {"gen_config": {"top_k": -1}}}, "system": {"CUDA_VISIBLE_DEVICES": "0"}}
    found = converted(tmp_path, "~model_path", "trainer.n_gpus_per_node=4", tree=april).composed
    assert found.experiment.placement.visible_devices is None
    assert any("all devices are visible" in remark for remark in found.remarks)


def test_rewards_compared_by_environment_wait_if_there_are_several(tmp_path: Path) -> None:
    groups = "es_manager.train.env_configs.n_groups=[4,4]"
    inductive = (NORMALIZED, "agent_proxy.reward_normalization.grouping=inductive")
    (problem,) = converted(tmp_path, TWO, groups, *inductive).unsupported
    assert (problem.key, "by tag" in problem.message) == ("agent_proxy.reward_normalization.grouping", True)
    assert converted(tmp_path, *inductive).unsupported == ()
