"""If these fail, an agentic file of ROLL's plays other environments, other groups or other episodes than it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively

from quintet.config.capabilities import Capability
from quintet.config.dialects.ledger import load_keys
from quintet.config.dialects.loader import ConversionResult
from quintet.errors import ConfigError

PATTERN, THINKING = "<answer>(.*?)</answer>", r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
STEPWISE = "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"
FILE: dict[str, Any] = {
    "rollout_batch_size": 64,
    "val_batch_size": 24,
    "sequence_length": 1024,
    "adv_estimator": "grpo",
    "tokens": 32,
    "custom_env": {
        "Lake": {
            "env_type": "frozen_lake",
            "max_steps": 10,
            "max_tokens_per_step": "${tokens}",
            "env_config": {
                "action_pattern": PATTERN,
                "max_steps": 10,
                "format_penalty": -0.01,
                "is_slippery": False,
            },
        },
        "Boxes": {
            "env_type": "sokoban",
            "max_steps": 10,
            "max_tokens_per_step": "${tokens}",
            "env_config": {"max_steps": 8, "format_penalty": -0.15, "dim_room": [6, 7], "num_boxes": 1},
        },
    },
    "custom_envs": {"FrozenLake": "${custom_env.Lake}", "Boxes": "${custom_env.Boxes}"},
    "train_env_manager": {
        "num_env_groups": 8,
        "group_size": 4,
        "tags": ["FrozenLake", "Boxes"],
        "num_groups_partition": [6, 2],
    },
    "val_env_manager": {"num_env_groups": 12, "group_size": 2, "tags": ["Boxes"], "num_groups_partition": [12]},
    "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
    "actor_train": {
        "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        "device_mapping": "list(range(0,4))",
    },
    "actor_infer": {
        "generating_args": {"max_new_tokens": 128, "temperature": 0.9, "top_p": 0.99, "top_k": 100},
        "device_mapping": "list(range(0,4))",
    },
}
ONE = {
    "train_env_manager.tags": ["FrozenLake"],
    "train_env_manager.num_groups_partition": [8],
    "val_env_manager.tags": ["FrozenLake"],
}
LAKE, BOXES = "custom_envs.FrozenLake.", "custom_envs.Boxes."
CONFIG = "custom_env.Lake.env_config."
BOX_CONFIG = "custom_env.Boxes.env_config."
NORM = "reward_normalization."
ADVANTAGE, SHAPING = "algorithm.advantage.", "algorithm.shaping."

HONOURED: list[tuple[str, str, Any, str, Any, dict[str, Any]]] = [
    ("val_batch_size", "val_batch_size", 48, "validation.episodes", 24, ONE),
    (f"{LAKE}env_type", "custom_env.Lake.env_type", "frozen_lake", "env.name", "frozenlake", ONE),
    (f"{LAKE}max_steps", "custom_env.Lake.max_steps", 5, "rollout.max_turns", 5, ONE),
    (f"{LAKE}max_tokens_per_step", "tokens", 48, "rollout.max_response_tokens", 48, ONE),
    (f"{LAKE}env_manager_cls", "custom_env.Lake.env_manager_cls", STEPWISE, "rollout.window_size", 1, ONE),
    (
        *(f"{LAKE}history_length", "custom_env.Lake.history_length", 5, "rollout.window_size", 5),
        {**ONE, "custom_env.Lake.env_manager_cls": STEPWISE},
    ),
    (f"{LAKE}env_config.size", f"{CONFIG}size", 6, "env.size", 6, ONE),
    (f"{LAKE}env_config.p", f"{CONFIG}p", 0.9, "env.floor_density", 0.9, ONE),
    (f"{LAKE}env_config.is_slippery", f"{CONFIG}is_slippery", True, "env.slippery", True, ONE),
    (f"{LAKE}env_config.max_steps", f"{CONFIG}max_steps", 7, "env.max_steps", 7, ONE),
    (f"{LAKE}env_config.format_penalty", f"{CONFIG}format_penalty", -0.5, "rollout.format_penalty", -0.5, ONE),
    (f"{LAKE}env_config.action_pattern", f"{CONFIG}action_pattern", THINKING, "rollout.think", True, ONE),
    (f"{LAKE}env_config.action_pattern", f"{CONFIG}action_pattern", PATTERN, "rollout.response_format", "answer", ONE),
    (f"{LAKE}env_config.render_mode", f"{CONFIG}render_mode", "rgb_array", "env.render", "vision", ONE),
    (
        *(f"{LAKE}env_config.special_token_list", f"{CONFIG}special_token_list", []),
        *("rollout.strip_special_tokens", False, ONE),
    ),
    (f"{NORM}grouping", f"{NORM}grouping", "batch", f"{SHAPING}center", "batch", ONE),
    (f"{NORM}grouping", f"{NORM}grouping", "tags", f"{SHAPING}divide", "batch", ONE),
    (f"{NORM}method", f"{NORM}method", "mean", f"{ADVANTAGE}normalize_by_std", False, ONE),
    (f"{NORM}method", f"{NORM}method", "identity", f"{ADVANTAGE}name", "reinforce", ONE),
    (f"{NORM}norm_mean_type", f"{NORM}norm_mean_type", "batch", f"{SHAPING}center", "batch", ONE),
    (f"{NORM}norm_std_type", f"{NORM}norm_std_type", "batch", f"{SHAPING}divide", "batch", ONE),
]
"""Key, the key that is written, its value, the native key, what that becomes, and what else is written."""
GROUP_KEYS = tuple(
    f"train_env_manager.{name}" for name in ("num_env_groups", "group_size", "tags", "num_groups_partition")
)
BOX_KEYS = tuple(f"{LAKE}env_config.{name}" for name in ("dim_room", "num_boxes", "search_depth"))

WITHOUT_EFFECT: dict[str, Any] = {
    "custom_env.Unused": {"env_type": "x"},
    "env_monitor": {"enable": False},
    "dirty_data_mask": True,
    "open_feedback_turn": True,
    "use_token_reward": True,
    "batch_adjust_mode": "delete",
    "partial_gpu_mode": False,
    "parse_tool_call_parameter_to_dict": True,
    "skip_mock_system_prompt": True,
    "reward_system_config": {"skip_special_tokens": True},
    f"{NORM}global_scale_factor": 2.0,
    f"{NORM}global_shift_value": 1.0,
    **dict.fromkeys(("enable_response_mask", "enable_think", "use_turn_scores"), True),
    "custom_env.Lake.max_tokens": 100,
    "custom_env.Lake.env_instruction": "You are solving the FrozenLake puzzle.",
    "custom_env.Lake.grid_vocab": False,
    "custom_env.Lake.reward_template": "Reward: {reward}",
    "action_sep": "|",
    "train_env_manager.env_groups": 3,
    "train_env_manager.n_groups": [3],
    "train_env_manager.max_traj_per_env": 4,
    "train_env_manager.format_penalty": -0.5,
    "train_env_manager.max_env_num_per_worker": 16,
    "train_env_manager.llm_proxy.proxy_config": {"a": 1},
    "custom_env.Lake.use_thread_lock": True,
    "custom_env.Lake.max_env_step_concurrent": 5,
    "custom_env.Lake.agent_system_template": "",
    "custom_env.Lake.agent_template": "{observation}",
    "custom_env.Lake.pre_step_template": "Turn",
    "custom_env.Lake.user_prompt_format": "Answer",
    "custom_env.Lake.added_text": "Decide",
    "custom_env.Lake.next_step_template": "Decide",
    f"{CONFIG}map_seed": 7,
    f"{CONFIG}grid_vocab": {"P": "player"},
    f"{CONFIG}map_lookup": {"a": 1},
    f"{CONFIG}env_instruction": "Cross the lake.",
    "frozen_format_penalty": -0.3,
    "all_response_pattern": "^(.*)$",
}
"""Legal values of keys without effect here, together in one file."""
_DOCUMENTED = {"custom_env.Unused": "custom_env"}

WAITING: list[tuple[str, Any, str, Capability]] = [
    ("custom_env.Lake.env_type", "webshop", f"{LAKE}env_type", Capability.TEXT_ENVS),
    ("custom_env.Lake.env_manager_cls", "mine.ProxyEnvManager", f"{LAKE}env_manager_cls", Capability.TEXT_ENVS),
    (f"{CONFIG}grid_lookup", {"0": "W"}, f"{LAKE}env_config.grid_lookup", Capability.GRID_SYMBOLS),
    (f"{CONFIG}action_pattern", "^(.*)$", f"{LAKE}env_config.action_pattern", Capability.RESPONSE_PATTERNS),
    ("train_env_manager.group_size_redundancy", 1, "group_size_redundancy", Capability.SPARE_EPISODES),
    ("ratio_type", "segment", "ratio_type", Capability.TURN_RATIOS),
    ("custom_env.Boxes.max_steps", 20, f"{BOXES}max_steps", Capability.ENV_SETTINGS),
    (f"{NORM}grouping", "tags", f"{NORM}grouping", Capability.TURN_ESTIMATORS),
    ("train_env_manager.group_filter_cls", "mine.Filter", "group_filter_cls", Capability.ROLL_CLASSES),
]


def agentic(tmp_path: Path, changes: dict[str, Any]) -> ConversionResult:
    """An agentic file with two environments, and other values for these keys."""
    return converted(tmp_path, "roll", changed(FILE, changes))


@pytest.mark.proves("roll", *GROUP_KEYS, *BOX_KEYS)
def test_groups_and_tags_are_those_of_the_file(tmp_path: Path) -> None:
    """64 episodes in groups of 4; 6 and 2 of 8 groups; 24 validation episodes, 2 of each start state. An optimizer step
    has 2 × 4 × 4 devices = 32 episodes."""
    run = agentic(tmp_path, {f"{BOX_CONFIG}search_depth": 40}).composed.experiment
    assert (run.training.groups_per_step, run.training.samples_per_group, run.training.mini_batches) == (16, 4, 2)
    assert {name: (env.share, env.validation_episodes) for name, env in run.envs.items()} == {
        "FrozenLake": (6.0, 0),
        "Boxes": (2.0, 12),
    }
    assert (run.validation.episodes, run.validation.sampling.samples) == (12, 2)
    lake: Any = run.envs["FrozenLake"].env
    boxes: Any = run.envs["Boxes"].env
    assert (lake.size, lake.floor_density, lake.slippery, lake.max_steps, lake.observation) == (
        4,
        0.8,
        False,
        10,
        "grid",
    )
    assert (boxes.height, boxes.width, boxes.boxes, boxes.pull_steps, boxes.max_steps) == (6, 7, 1, 40, 8)
    assert [env.format_penalty for env in run.envs.values()] == [-0.01, -0.15]
    assert (run.rollout.max_turns, run.rollout.window_size, run.rollout.think) == (10, None, False)
    assert (run.rollout.max_response_tokens, run.rollout.max_prompt_tokens) == (32, 1024 - 32)
    assert (run.rollout.temperature, run.rollout.top_k, run.validation.sampling.temperature) == (0.9, 100, 0.9)
    assert (run.algorithm.advantage.name, run.data, run.warm_start) == ("grpo", None, None)


@pytest.mark.proves("roll", *(case[0] for case in HONOURED))
@pytest.mark.parametrize("case", HONOURED, ids=lambda case: f"{case[0]}-{case[3]}-{case[4]}")
def test_a_key_of_an_agentic_file_reaches_the_run(
    tmp_path: Path, case: tuple[str, str, Any, str, Any, dict[str, Any]]
) -> None:
    key, written, value, native, expected, others = case
    found = agentic(tmp_path, {**others, written: value})
    assert natively(found, native) == expected
    assert f"{key}: given.yaml:1" in found.composed.provenance[native]


@pytest.mark.proves(
    "roll",
    *(
        _DOCUMENTED.get(key, key).replace("custom_env.Lake.", "custom_envs.FrozenLake.")
        for key in WITHOUT_EFFECT
        if key not in ("frozen_format_penalty", "all_response_pattern")
    ),
)
def test_keys_without_effect_are_read_and_change_nothing(tmp_path: Path) -> None:
    plain, other = agentic(tmp_path, {}), agentic(tmp_path, WITHOUT_EFFECT)
    assert other.composed.experiment == plain.composed.experiment


@pytest.mark.parametrize(("key", "value", "told", "capability"), WAITING, ids=[case[2] for case in WAITING])
def test_what_does_not_exist_here_waits_by_its_name(
    tmp_path: Path, key: str, value: Any, told: str, capability: Capability
) -> None:
    messages = [problem.message for problem in agentic(tmp_path, {key: value}).unsupported]
    assert any(told in message and str(capability) in message for message in messages), messages


def test_an_environment_that_does_not_exist_here_is_no_other_one(tmp_path: Path) -> None:
    webshop = {"custom_env.Lake": {"env_type": "webshop", "max_steps": 10, "env_config": {"observation_mode": "text"}}}
    env: Any = agentic(tmp_path, {**ONE, **webshop}).composed.experiment.env
    assert (env.name, env.path) == ("custom", "webshop")


def test_where_each_turn_is_a_sequence_an_optimizer_step_has_fewer_episodes(tmp_path: Path) -> None:
    """64 episodes of at most 10 turns are 640 sequences, 20 optimizer steps of 32; of the divisors of 64, 16 is
    nearest."""
    stepwise = {f"custom_env.{name}.env_manager_cls": STEPWISE for name in ("Lake", "Boxes")}
    found = agentic(tmp_path, {"adv_estimator": "gigpo", "step_reward_gamma": 0.9, **stepwise})
    run = found.composed.experiment
    advantage: Any = run.algorithm.advantage
    assert (advantage.name, advantage.turn_gamma, advantage.normalize_by_std) == ("gigpo", 0.9, True)
    assert (run.training.mini_batches, run.rollout.window_size, run.algorithm.turn_rewards) == (16, 1, True)
    assert any("16 of 4 episodes" in remark for remark in found.composed.remarks)


@pytest.mark.parametrize(
    ("grouping", "method", "scopes"),
    [
        ("traj_group_id", "mean_std", ("group", "group")),
        ("traj_group_id", "mean", ("group", "none")),
        ("batch", "mean_std", ("batch", "batch")),
        ("batch", "identity", ("none", "none")),
    ],
)
def test_returns_of_turns_are_compared_as_the_file_says(
    tmp_path: Path, grouping: str, method: str, scopes: tuple[str, str]
) -> None:
    stepwise = {f"custom_env.{name}.env_manager_cls": STEPWISE for name in ("Lake", "Boxes")}
    compared = {f"{NORM}grouping": grouping, f"{NORM}method": method, "step_reward_gamma": 0.9}
    found = agentic(tmp_path, {"adv_estimator": "step_reinforce", **compared, **stepwise})
    advantage: Any = found.composed.experiment.algorithm.advantage
    assert (advantage.name, advantage.turn_gamma) == ("step_reinforce", 0.9)
    assert (advantage.center, advantage.divide) == scopes
    assert found.composed.experiment.algorithm.turn_rewards
    assert not any("adv_estimator" in problem.message for problem in found.unsupported)
    clipped = agentic(tmp_path, {"adv_estimator": "step_reinforce", "reward_clip": 5.0, **compared, **stepwise})
    assert any("reward_clip" in problem.message for problem in clipped.unsupported)


def test_whole_episodes_are_discounted_by_turns(tmp_path: Path) -> None:
    changes = {"adv_estimator": "agentic_reinforce", "gamma": 0.9}
    run = agentic(tmp_path, changes).composed.experiment
    advantage: Any = run.algorithm.advantage
    assert (advantage.name, advantage.gamma) == ("agentic_reinforce", 0.9)
    assert (run.algorithm.shaping.center, run.algorithm.shaping.divide) == ("group", "group")
    penalized = agentic(tmp_path, {**changes, "add_token_level_kl": True})
    assert any("add_token_level_kl" in problem.message for problem in penalized.unsupported)


def test_managers_sample_by_their_own_settings_where_the_engine_has_none(tmp_path: Path) -> None:
    tree = changed(FILE, {"train_env_manager.generating_args": {"temperature": 0.7, "max_new_tokens": 16}})
    tree["val_env_manager"]["generating_args"] = {"temperature": 0.2, "max_new_tokens": 16}
    del tree["actor_infer"]["generating_args"]
    run = converted(tmp_path, "roll", tree).composed.experiment
    assert (run.rollout.temperature, run.validation.sampling.temperature) == (0.7, 0.2)
    assert run.rollout.max_response_tokens == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_env_manager.num_groups_partition": [6, 3]}, ("has 9 groups in total", "num_env_groups=9")),
        ({"train_env_manager.num_groups_partition": [8]}, ("one number for each of the 2 tags", "[4, 4]")),
        ({"rollout_batch_size": 66}, ("rollout_batch_size = 66", "4 episodes of a group", "rollout_batch_size=6")),
        ({"val_batch_size": 20}, ("multiple of the 24 validation environments", "val_batch_size=24")),
        ({"train_env_manager.tags": ["Lake", "Boxes"]}, ("custom_envs does not define Lake", "Boxes, FrozenLake")),
        ({"train_env_manager.num_env_group": 8}, ("did you mean train_env_manager.num_env_groups?",)),
        ({"sequence_length": None}, ("sequence_length = null", "maximum length of an episode")),
    ],
)
def test_groups_that_roll_refuses_are_refused_with_a_way_out(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        agentic(tmp_path, changes)
    assert [word for word in words if word not in str(error.value)] == []


def test_every_key_of_agentic_files_is_among_these() -> None:
    rows = {spec.key for name in ("roll_agentic", "roll_env") for spec in load_keys("roll", name) if not spec.requires}
    written = {key.replace("custom_env.Lake.", "custom_envs.FrozenLake.") for key in WITHOUT_EFFECT}
    rooms = {f"{LAKE}env_config.{name}" for name in ("grid_lookup", "dim_x", "dim_y")}
    rooms |= {f"{LAKE}{name}" for name in ("max_actions_per_traj", "max_steps_per_traj")}  # test_roll_earlier.py
    assert rows - written - rooms - {case[0] for case in HONOURED} - {*GROUP_KEYS, *BOX_KEYS, "custom_env"} == set()


@pytest.mark.proves("roll", f"{LAKE}env_config.grid_lookup")
def test_symbols_of_sokoban_are_those_of_the_file(tmp_path: Path) -> None:
    lookup = {str(number): symbol for number, symbol in enumerate("W.GCBA@")}
    boxes: Any = agentic(tmp_path, {f"{BOX_CONFIG}grid_lookup": lookup}).composed.experiment.envs["Boxes"].env
    assert boxes.symbols == "W.GCBA@"


def test_an_environment_that_no_tag_names_may_have_any_keys(tmp_path: Path) -> None:
    unused = {"env_type": "webshop", "env_config": {"goals": 3}}
    assert agentic(tmp_path, {"custom_envs.Shop": unused}).unsupported == agentic(tmp_path, {}).unsupported


@pytest.mark.proves("roll", f"{LAKE}env_config.dim_x", f"{LAKE}env_config.dim_y")
def test_sides_of_a_room_in_files_of_2025_count(tmp_path: Path) -> None:
    sides = {f"{BOX_CONFIG}dim_x": 8, f"{BOX_CONFIG}dim_y": 9}
    boxes: Any = agentic(tmp_path, sides).composed.experiment.envs["Boxes"].env
    assert (boxes.height, boxes.width) == (8, 9)


@pytest.mark.parametrize("env_type", ["frozenlake", "Frozen-Lake", "frozen_lke"])
def test_a_misspelt_environment_is_refused_with_the_right_name(tmp_path: Path, env_type: str) -> None:
    with pytest.raises(ConfigError, match=r"custom_envs\.FrozenLake\.env_type = .*did you mean frozen_lake\?"):
        converted(tmp_path, "roll", changed(FILE, {"custom_env.Lake.env_type": env_type}))


@pytest.mark.parametrize(
    "env_type", ["svg", "prompts", "simulator", "custom", "webshop", "sokoban_mcp", "x y/z", "a.py:B"]
)
def test_another_environment_waits(tmp_path: Path, env_type: str) -> None:
    found = converted(tmp_path, "roll", changed(FILE, {"custom_env.Lake.env_type": env_type}))
    assert f"{LAKE}env_type" in {problem.key for problem in found.unsupported}


def test_a_file_of_the_rollout_pipeline_is_refused_because_it_only_generates(tmp_path: Path) -> None:
    """It has neither a learner nor environments of validation, whose defaults contradict each other."""
    rollouts = {name: value for name, value in FILE.items() if name not in ("actor_train", "val_env_manager")}
    with pytest.raises(ConfigError) as refused:
        converted(tmp_path, "roll", rollouts)
    assert refused.value.key == "actor_train.device_mapping"
    assert "ROLL's rollout pipeline, which only generates" in str(refused.value)
    assert "val_env_manager" not in str(refused.value)
