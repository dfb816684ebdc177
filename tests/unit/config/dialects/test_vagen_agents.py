"""If these fail, a run with VAGEN's lists of environments is another one than its files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.config.capabilities import Capability
from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.loader import ConversionResult, convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dotted import flatten
from quintet.config.plan.batch_arithmetic import compute_batch_arithmetic
from quintet.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LAKE: dict[str, Any] = {
    "name": "FrozenLake",
    "n_envs": 640,
    "data_source": "lake",
    "seed": [1, 640, 1],
    "max_turns": 4,
    "response_length_per_turn": 200,
    "config": {"render_mode": "text", "size": 5},
}
ROOM = LAKE | {"name": "Sokoban", "data_source": "room", "config": {"render_mode": "text"}}
SERVED = LAKE | {
    "name": "RemoteEnv",
    "config": {"base_urls": "http://localhost:8000", "timeout": 9, "prompt_format": "eval_mode"},
}
BASE = ["data.max_prompt_length=600", "data.max_response_length=1800", f"{ROLLOUT}.name=hf"]
BASE += ["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16", "trainer.n_gpus_per_node=1"]


def converted(directory: Path, *overrides: str, train: Any = (LAKE,), val: Any = None) -> ConversionResult:
    """What lists of environments and overrides ask for."""
    words = list(BASE)
    for side, envs in (("train", train), ("val", train if val is None else val)):
        path = directory / f"{side}.yaml"
        path.write_text(json.dumps({"envs": list(envs)}))
        words.append(f"data.{side}_files={path}")
    return convert(compose_config(None, [*words, *overrides]), DIALECTS["vagen"], to_plan=True)


def natively(directory: Path, *overrides: str, **lists: Any) -> dict[str, Any]:
    return flatten(converted(directory, *overrides, **lists).composed.experiment.model_dump())


def waiting(found: ConversionResult) -> dict[str, str]:
    return {problem.key: problem.message for problem in found.unsupported}


OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("FrozenLake", {}, {"env.name": "frozenlake", "env.size": 4, "env.floor_density": 0.8, "env.observation": "grid"}),
    ("FrozenLake", {"size": 6, "p": 0.9}, {"env.size": 6, "env.floor_density": 0.9}),
    ("FrozenLake", {"is_slippery": True}, {"env.slippery": True, "env.success_rate": 1 / 3}),
    ("FrozenLake", {"slip_prob": 0.25}, {"env.slippery": True, "env.success_rate": 0.75}),
    ("FrozenLake", {"slip_prob": 0.0}, {"env.slippery": False}),
    ("FrozenLake", {"success_reward": 2}, {"env.goal_reward": 2.0}),
    ("FrozenLake", {}, {"rollout.format_reward": 0.02, "rollout.thoughts": None, "rollout.max_actions_per_turn": 5}),
    ("FrozenLake", {"prompt_format": "wm"}, {"rollout.thoughts": "wm", "rollout.think": True}),
    ("FrozenLake", {"render_mode": "vision"}, {"env.render": "vision"}),
    ("FrozenLake", {"action_sep": "|"}, {"rollout.action_separator": "|"}),
    ("FrozenLake", {"max_actions_per_step": 2}, {"rollout.max_actions_per_turn": 2, "env.max_steps": 8}),
    ("FrozenLake", {"format_reward": 0.5}, {"rollout.format_reward": 0.5}),
    ("Sokoban", {}, {"env.name": "sokoban", "rollout.thoughts": "wm", "rollout.format_reward": 0.1, "env.boxes": 1}),
    ("Sokoban", {}, {"env.solved_reward": 1.0, "env.step_reward": 0.0, "env.box_reward": 0.0, "env.height": 6}),
    ("Sokoban", {"dim_room": [7, 8]}, {"env.height": 7, "env.width": 8}),
    ("Sokoban", {"num_boxes": 2}, {"env.boxes": 2}),
    ("Sokoban", {"min_solution_steps": [2, 5]}, {"env.min_solution_steps": 2, "env.max_solution_steps": 5}),
    ("Sokoban", {"prompt_format": "free_wm"}, {"rollout.thoughts": "free_wm"}),
    ("Sokoban", {"prompt_format": "free_think"}, {"rollout.thoughts": None, "rollout.think": True}),
    ("Sokoban", {"success_reward": 3.0}, {"env.solved_reward": 3.0}),
    # what VAGEN's environment does not read either: only turns end an episode
    ("Sokoban", {"max_steps": 3}, {"env.max_steps": 12}),
]


@pytest.mark.proves(
    "vagen",
    "train_envs.env1.name",
    *(
        f"train_envs.env1.config.{option}"
        for option in (
            *("render_mode", "prompt_format", "max_actions_per_step", "action_sep", "success_reward", "size", "p"),
            *("is_slippery", "slip_prob", "dim_room", "num_boxes", "max_steps", "min_solution_steps"),
        )
    ),
)
@pytest.mark.parametrize(("name", "options", "expected"), OPTIONS)
def test_options_reach_the_environment_and_the_parser(
    tmp_path: Path, name: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = natively(tmp_path, train=[LAKE | {"name": name, "config": options}])
    assert {key: found[key] for key in expected} == expected


@pytest.mark.proves(
    "vagen",
    "data.train_files",
    "data.val_files",
    "train_envs.env1.n_envs",
    "train_envs.env1.max_turns",
    "train_envs.env1.response_length_per_turn",
)
def test_lists_set_numbers_and_limits(tmp_path: Path) -> None:
    """By hand: a response of 200 of the 600 + 1800 tokens leaves 2200 for the context; 10 steps of 64 use the list."""
    found = natively(tmp_path, "trainer.total_epochs=3", val=[LAKE | {"n_envs": 24, "seed": [1000, 1100]}])
    assert (found["rollout.max_turns"], found["rollout.max_response_tokens"]) == (4, 200)
    assert found["rollout.max_prompt_tokens"] == 2200
    assert (found["training.start_states"], found["training.steps"]) == (640, 30)
    assert found["validation.episodes"] == 24
    assert (found["training.groups_per_step"], found["training.mini_batches"]) == (64, 4)


def test_a_limit_of_a_turn_beyond_that_of_the_episode_is_that_of_the_episode(tmp_path: Path) -> None:
    for own in ({"response_length_per_turn": 5000}, {"response_length_per_turn": None}):
        assert natively(tmp_path, train=[LAKE | own])["rollout.max_response_tokens"] == 1800


@pytest.mark.proves("vagen", "trainer.total_epochs")
@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ((), 300),  # 30 passes of 10 steps
        (("trainer.total_epochs=2",), 20),
        (("trainer.total_training_steps=7",), 7),
        (("trainer.total_training_steps=999",), 300),  # the passes end first
    ],
)
def test_a_run_ends_with_its_steps_or_with_its_passes(tmp_path: Path, words: tuple[str, ...], steps: int) -> None:
    assert natively(tmp_path, *words)["training.steps"] == steps


SEEDS: list[tuple[dict[str, Any], int]] = [
    ({"n_envs": 640, "seed": [1, 640, 1]}, 640),
    ({"n_envs": 640, "seed": [0, 30]}, 31),
    ({"n_envs": 640, "seed": [7, 7]}, 1),
    ({"n_envs": 640, "seed": [1, 320, 2]}, 320),
    ({"n_envs": 64, "seed_list": [4, 4, *range(63)]}, 63),  # 4, 4, 0, …, 61: of the first 64 two are equal twice
    ({"n_envs": 64, "seed": 9}, 64),
]


@pytest.mark.proves("vagen", "train_envs.env1.seed", "train_envs.env1.seed_list")
@pytest.mark.parametrize(("entry", "states"), SEEDS)
def test_start_states_are_as_many_as_there_are_seeds(tmp_path: Path, entry: dict[str, Any], states: int) -> None:
    expected = len(set(entry["seed_list"][:64])) if "seed_list" in entry else states
    assert natively(tmp_path, train=[LAKE | entry])["training.start_states"] == expected


@pytest.mark.proves("vagen", "data.base_seed")
def test_the_base_seed_decides_how_often_seeds_repeat(tmp_path: Path) -> None:
    """640 draws out of 640 seeds leave about a third of them out, depending on the draws."""
    entry = LAKE | {"seed": [1, 640]}
    found = {natively(tmp_path, f"data.base_seed={seed}", train=[entry])["training.start_states"] for seed in range(4)}
    assert len(found) > 1
    assert all(370 < states < 440 for states in found)


@pytest.mark.proves("vagen", "train_envs.env1.data_source")
def test_several_environments_have_shares_and_names_and_only_equal_ones_are_one(tmp_path: Path) -> None:
    room = ROOM | {"n_envs": 320, "seed": [1, 320, 1], "config": {"prompt_format": "free_think", "format_reward": 0.02}}
    harder = room | {"n_envs": 8, "config": room["config"] | {"num_boxes": 2}}
    held_out = [LAKE | {"n_envs": 16, "data_source": "other"}, harder]
    run = converted(tmp_path, train=[LAKE, room], val=held_out).composed.experiment
    found = {
        name: (env.env.name, env.share, env.start_states, env.validation_episodes) for name, env in run.envs.items()
    }
    assert found == {
        "lake": ("frozenlake", 640.0, 640, 16),
        "room": ("sokoban", 320.0, 320, 0),
        "room_validation": ("sokoban", 0.0, None, 8),
    }
    # five and three actions of a response
    assert [env.max_actions_per_turn for env in run.envs.values()] == [5, 3, 3]
    assert run.validation.episodes == 24


def test_names_of_sources_and_of_entries_may_be_any(tmp_path: Path) -> None:
    train = [LAKE | {"data_source": "lake v1.0"}, LAKE | {"data_source": "lake v1.0", "config": {"size": 6}}]
    assert list(converted(tmp_path, train=train).composed.experiment.envs) == ["lake_v1_0", "lake_v1_0_2"]
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"train_envs": {"mine": LAKE}, "val_envs": {"other": LAKE}}))
    found = convert(compose_config(path, [f"{ACTOR}.ppo_mini_batch_size=32"]), DIALECTS["vagen"], to_plan=True)
    assert found.composed.experiment.training.start_states == 640


def test_rewards_and_episodes_are_those_of_vagens_code(tmp_path: Path) -> None:
    run = converted(tmp_path).composed.experiment
    assert (run.algorithm.turn_rewards, run.algorithm.advantage_over_response_tokens) == (False, True)
    rollout = run.rollout
    assert (rollout.format_reward_for, rollout.format_penalty, rollout.response_format) == ("executed", 0.0, "anywhere")
    assert (rollout.window_size, rollout.unknown_actions, rollout.strip_special_tokens) == (None, "stop", True)


@pytest.mark.proves("vagen", "algorithm.adv_estimator", "algorithm.gamma", "algorithm.lam")
def test_the_estimator_is_that_of_verl_and_of_turns(tmp_path: Path) -> None:
    plain = natively(tmp_path, "algorithm.gamma=0.9", "algorithm.lam=0.8")
    assert [plain[f"algorithm.advantage.{name}"] for name in ("name", "gamma", "lam")] == ["gae", 0.9, 0.8]
    grpo = natively(tmp_path, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8")
    assert (grpo["algorithm.advantage.name"], grpo["training.samples_per_group"]) == ("grpo", 8)


TURNS = ("trainer.concat_multi_turn=false", "critic.enable=true")


@pytest.mark.proves("vagen", "trainer.concat_multi_turn")
@pytest.mark.parametrize(
    ("name", "value"),
    [("no_concat_gae", "first"), ("no_concat_gae_first", "first"), ("no_concat_gae_last", "last")],
)
def test_without_concatenation_turns_are_trained_on(tmp_path: Path, name: str, value: str) -> None:
    """verl counts samples, which turns are then: an update has 16 × 2 of them, and 64 × 2 episodes of 4 turns make at
    most 16 updates."""
    composed = converted(tmp_path, *TURNS, f"algorithm.adv_estimator={name}", f"{ROLLOUT}.n=2").composed
    run: Any = composed.experiment
    advantage = run.algorithm.advantage
    assert (advantage.name, advantage.turn_value, advantage.whiten_over) == ("turn_wise_gae", value, "tokens")
    assert (advantage.gamma, advantage.lam, advantage.whiten) == (1.0, 1.0, True)
    assert (run.rollout.window_size, run.algorithm.turn_rewards, run.training.mini_batch_sequences) == (1, True, 32)
    assert compute_batch_arithmetic(composed).optimizer_steps == 300 * 16
    noted = [remark for remark in composed.remarks if "placeholder -100" in remark]
    assert len(noted) == (name == "no_concat_gae")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"), "algorithm.adv_estimator"),
        (("algorithm.adv_estimator=no_concat_gae", "algorithm.use_kl_in_reward=true"), "algorithm.use_kl_in_reward"),
    ],
)
def test_other_credit_of_single_turns_waits(tmp_path: Path, words: tuple[str, ...], key: str) -> None:
    assert str(Capability.TURN_ESTIMATORS) in waiting(converted(tmp_path, *TURNS, *words))[key]


@pytest.mark.parametrize(("response", "ends"), [(200, True), (201, False)])
def test_a_response_that_fills_the_episode_is_its_last_one(tmp_path: Path, response: int, ends: bool) -> None:
    """The longest response has 200 tokens."""
    found = natively(tmp_path, f"data.max_response_length={response}")
    assert found["rollout.truncation_ends_episode"] is ends


@pytest.mark.proves("vagen", "data.seed")
def test_the_seed_of_the_order_is_that_of_the_run(tmp_path: Path) -> None:
    assert natively(tmp_path, "data.seed=17")["seed"] == 17


def test_keys_of_data_about_the_policy_still_count(tmp_path: Path) -> None:
    found = natively(tmp_path, "data.trust_remote_code=false", "data.tokenizer=other/model")
    assert (found["policy.trust_tokenizer_code"], found["policy.tokenizer"]) == (False, "other/model")
    oversampled = converted(tmp_path, "data.gen_batch_size=96")
    assert str(Capability.OVERSAMPLING) in waiting(oversampled)["data.gen_batch_size"]


@pytest.mark.proves("vagen", "env_registry")
def test_a_name_stands_for_its_class(tmp_path: Path) -> None:
    registered = "env_registry.Ice=vagen.envs.frozenlake.frozenlake_env.FrozenLake"
    assert natively(tmp_path, registered, train=[LAKE | {"name": "Ice"}])["env.name"] == "frozenlake"
    own = converted(tmp_path, "env_registry.Mine=my.envs.Mine", train=[SERVED | {"name": "Mine"}])
    assert str(Capability.TEXT_ENVS) in waiting(own)["train_envs.env1.name"]


def test_the_command_line_changes_an_entry_of_a_list(tmp_path: Path) -> None:
    found = natively(tmp_path, "train_envs.env1.config.size=7", "val_envs.env1.config.size=7", "val_envs.env1.n_envs=3")
    assert (found["env.size"], found["env.floor_density"], found["validation.episodes"]) == (7, 0.8, 3)


WAITING: list[tuple[tuple[str, ...], dict[str, Any], str, Capability]] = [
    (
        ("filter.enable=true", *TURNS, "algorithm.adv_estimator=no_concat_gae"),
        {},
        "filter.enable",
        Capability.GROUP_FILTERS,
    ),
    (("huggingface_hub.hf_save_freq=200",), {}, "huggingface_hub.hf_save_freq", Capability.HUB_UPLOADS),
    (("data.custom_cls.path=mine.py",), {}, "data.custom_cls.path", Capability.SAMPLERS),
    ((f"{ROLLOUT}.agent.agent_loop_config_path=mine.yaml",), {}, f"{ROLLOUT}.agent.agent_loop_config_path",
     Capability.AGENT_LOOPS),
    ((), {"config": {"slip_prob": 0.1, "is_slippery": True}}, "train_envs.env1.config.slip_prob",
     Capability.ENV_VARIANTS),
    ((), {"config": {"desc": ["SF", "FG"]}}, "train_envs.env1.config.desc", Capability.ENV_VARIANTS),
    ((), SERVED, "train_envs.env1.name", Capability.REMOTE_ENVS),
    ((), SERVED | {"name": "SpatialGym"}, "train_envs.env1.name", Capability.TEXT_ENVS),
    ((), SERVED | {"name": "PrimitiveSkill"}, "train_envs.env1.name", Capability.TEXT_ENVS),
    (("custom_reward_function.path=reward.py",), {}, "custom_reward_function.path", Capability.PROMPTS),
]  # fmt: skip


@pytest.mark.parametrize(("words", "entry", "key", "capability"), WAITING)
def test_what_does_not_exist_here_waits_by_its_name(
    tmp_path: Path, words: tuple[str, ...], entry: dict[str, Any], key: str, capability: Capability
) -> None:
    assert str(capability) in waiting(converted(tmp_path, *words, train=[LAKE | entry]))[key]


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"max_turns": 9}, "max_turns"),
        ({"response_length_per_turn": 100}, "response_length_per_turn"),
        ({"name": "Sokoban", "config": {}}, "config.prompt_format"),
    ],
)
def test_limits_that_differ_between_environments_wait(tmp_path: Path, other: dict[str, Any], key: str) -> None:
    found = waiting(converted(tmp_path, train=[LAKE, LAKE | other]))
    assert str(Capability.ENV_SETTINGS) in found[f"train_envs.env1.{key}"]


FILTERS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    ((), {"top_p": 0.9, "drop_zero": False, "keep_all_if_empty": True, "scale_advantages": "sqrt", "ddof": 0}),
    (("filter.filter_kwargs.top_p=0.5",), {"top_p": 0.5, "keep_share": 1.0}),
    (("filter.filter_kwargs.top_p=1.0", "+filter.filter_kwargs.ddof=1"), {"top_p": 1.0, "drop_zero": True, "ddof": 1}),
    (("filter.name=reward_variance",), {"keep_share": 0.2, "top_p": 1.0, "scale_advantages": "none"}),
    (("filter.name=reward_variance", "filter.filter_kwargs.topk=0.5"), {"keep_share": 0.5, "keep_all_if_empty": False}),
]


@pytest.mark.proves(
    "vagen",
    *("filter.enable", "filter.name"),
    *(f"filter.filter_kwargs.{name}" for name in ("top_p", "topk", "ddof")),
)
@pytest.mark.parametrize(("words", "expected"), FILTERS)
def test_groups_are_filtered_by_their_variance(
    tmp_path: Path, words: tuple[str, ...], expected: dict[str, Any]
) -> None:
    found = natively(tmp_path, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", "filter.enable=true", *words)
    common = {"keep_by": "variance", "after_advantages": True}
    assert {name: found[f"algorithm.filter.{name}"] for name in common | expected} == common | expected


WITHOUT_EFFECT = [
    *("trainer.log_image.enable=true", "trainer.log_image.max_pending=4", "trainer.log_image.png_compress_level=6"),
    *("trainer.skip_pad_tokens=false", "trainer.replace_image_tokens_for_logging=false", "data.shuffle=false"),
    *("trainer.skip_special_tokens_train=false", "trainer.skip_special_tokens_val=false"),
    *(
        "algorithm.reward_scaling=1",
        "algorithm.reward_bias=0",
        "algorithm.reward_clip=5",
        "algorithm.reward_norm=false",
    ),
    *("algorithm.reward_mean_level=batch", "algorithm.reward_std_level=batch"),
    *("huggingface_hub.repo_id=a/b", "huggingface_hub.private=true", "huggingface_hub.upload_contents=[model]"),
    *("filter.name=reward_variance", "filter.filter_kwargs.topk=0.5", "filter.filter_kwargs.top_p=0.5"),
    *("filter.filter_kwargs.ddof=1", f"{ROLLOUT}.multi_turn.enable=false", "data.return_raw_chat=true"),
    *("train_envs.env1.config.image_placeholder=img", "train_envs.env1.config.use_example_in_sys_prompt=false"),
    *("data.truncation=left", "data.image_key=pictures", "data.prompt_key=question", "data.train_max_samples=5"),
]


@pytest.mark.proves(
    "vagen",
    *(f"trainer.log_image.{name}" for name in ("enable", "max_pending", "png_compress_level")),
    *("trainer.skip_pad_tokens", "trainer.replace_image_tokens_for_logging", "data.shuffle"),
    *("trainer.skip_special_tokens_train", "trainer.skip_special_tokens_val"),
    *(f"algorithm.reward_{name}" for name in ("scaling", "bias", "clip", "norm", "mean_level", "std_level")),
    *(f"huggingface_hub.{name}" for name in ("repo_id", "private", "upload_contents")),
    f"{ROLLOUT}.multi_turn.enable",
    "train_envs.env1.config.image_placeholder",
    "train_envs.env1.config.use_example_in_sys_prompt",
)
def test_keys_without_an_effect_change_nothing(tmp_path: Path) -> None:
    # some are of 26.2.5, which keeps all checkpoints and has another filter
    kept = [f"trainer.max_{learner}_ckpt_to_keep=1" for learner in ("actor", "critic")]
    assert natively(tmp_path, *WITHOUT_EFFECT, *kept) == natively(tmp_path)


@pytest.mark.proves(
    "vagen", "train_envs.env1.config.reset_seed_max_tries", "train_envs.env1.config.min_solution_bfs_max_depth"
)
def test_limits_of_the_search_for_puzzles_change_nothing(tmp_path: Path) -> None:
    words = [f"{side}_envs.env1.config.{key}=9" for side in ("train", "val")
             for key in ("reset_seed_max_tries", "min_solution_bfs_max_depth")]  # fmt: skip
    assert natively(tmp_path, *words, train=[ROOM]) == natively(tmp_path, train=[ROOM])


REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    ((), {"name": "Frozenlake"}, "env_registry has no Frozenlake"),
    ((), {"seed": [5, 3]}, "the last seed of the range is before the first one"),
    ((), {"seed": [1, 99, 2]}, "a range of 99 seeds, each at most 2 times, is too small for 640"),
    ((), {"seed": [1, 2, 3, 4]}, "one, two or three numbers"),
    ((), {"seed_list": [1, 2, 3]}, "must have more than n_envs = 640 seeds"),
    ((), {"config": {"num_boxes": 2}}, "FrozenLake has no such option"),
    ((), {"config": {"prompt_format": "free_wm"}}, "FrozenLake has no such format"),
    ((), {"name": "Sokoban", "config": {"min_solution_steps": [5, 2]}}, "the maximum is below the minimum"),
    (("algorithm.adv_estimator=no_concat_gae",), {}, "needs turns without earlier ones"),
    (("algorithm.adv_estimator=no_concat_gae", TURNS[0]), {}, "needs a critic, which verl only trains if this is true"),
    ((f"{ROLLOUT}.agent.agent_loop_config_path=agent_no_concat.yaml",), {}, "is the agent loop of other runs"),
    ((f"{ACTOR}.ppo_mini_batch_size=10",), {}, "must divide the 64 environments"),
    (("data.val_files=missing.yaml",), {}, "missing.yaml does not exist"),
    (("data.val_files=null",), {}, "names no list of environments"),
    (("trainer.concat_multi_turns=false",), {}, "did you mean trainer.concat_multi_turn"),
    (("train_envs.env1.config.sizes=4",), {}, "did you mean train_envs.env1.config.size"),
]


@pytest.mark.parametrize(("words", "entry", "message"), REFUSED)
def test_mistakes_are_named(tmp_path: Path, words: tuple[str, ...], entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        converted(tmp_path, *words, train=[LAKE | entry])


@pytest.mark.parametrize("text", ["envs: 3", "name: FrozenLake", "envs: [lake]"])
def test_a_file_without_a_list_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"wrong\.yaml has no list envs"):
        converted(tmp_path, f"data.val_files={path}")


def test_a_list_that_is_too_short_for_a_step_is_named_and_makes_no_step(tmp_path: Path) -> None:
    """As in VAGEN's scripts of SpatialGym with a critic, which have 50 environments and steps of 128."""
    found = converted(tmp_path, train=[LAKE | {"n_envs": 32, "seed": [1, 32]}])
    assert "more environments than the 32 of the training list" in waiting(found)["data.train_batch_size"]
    assert found.composed.experiment.training.steps == 0


def test_files_of_vagen_that_are_no_run_are_named(tmp_path: Path) -> None:
    path = tmp_path / "env_registry.yaml"
    path.write_text("env_registry: {Ice: my.Ice}\n")
    with pytest.raises(ConfigError, match=r"env_registry\.yaml names no lists of environments: it is no run"):
        convert(compose_config(path, []), DIALECTS["vagen"], to_plan=True)


def test_values_of_vagens_own_file_are_defaults(tmp_path: Path) -> None:
    """Of `vagen_multiturn.yaml`; of verl's, such as 8 GPUs of a node, nothing changes."""
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"train_envs": {"env1": LAKE}, "val_envs": {"env1": LAKE}}))
    words = [f"{ACTOR}.ppo_mini_batch_size=32"]
    run = convert(compose_config(path, words), DIALECTS["vagen"], to_plan=True).composed.experiment
    assert (run.training.groups_per_step, run.rollout.engine, run.checkpoint.keep) == (128, "sglang", 1)
    assert run.rollout.max_prompt_tokens == 9000 + 8000 - 200
    assert (run.rollout.template_thinking, run.placement.devices_per_node) == (False, 8)
