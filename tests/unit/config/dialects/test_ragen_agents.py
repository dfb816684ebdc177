"""If these fail, a configuration of RAGEN since May 2025 runs as something else than what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign import machine

from quintet.cli.config_source import read_config_source
from quintet.config.composed import ComposedConfig
from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.loader import convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dotted import flatten, set_value
from quintet.config.native.algorithm import KlConfig
from quintet.config.translate import translate
from quintet.errors import ConfigError

ENVS = {
    "custom_envs": {
        "SimpleSokoban": {
            "env_type": "sokoban",
            "max_actions_per_traj": 10,
            "env_instruction": "Push the boxes.",
            "max_tokens": 100,
            "env_config": {"dim_x": 6, "dim_y": 6, "num_boxes": 1, "max_steps": 100},
        },
        "Letters": {
            "env_type": "sokoban",
            "max_actions_per_traj": 10,
            "env_instruction": "Push the boxes.",
            "max_tokens": 100,
            "env_config": {
                "grid_lookup": {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"},
                "grid_vocab": {"W": "wall", ".": "empty", "G": "target", "A": "player"},
            },
        },
        "Lake": {"env_type": "frozen_lake", "max_actions_per_traj": 10, "env_instruction": None, "env_config": {}},
        "Bandit": {"env_type": "bandit", "max_actions_per_traj": 1, "env_instruction": "", "env_config": {}},
        "Countdown": {"env_type": "countdown", "max_actions_per_traj": 1, "env_config": {}},
        "Math": {"env_type": "metamathqa", "max_actions_per_traj": 1, "env_config": {}},
        "Shop": {"env_type": "webshop", "max_actions_per_traj": 9, "env_config": {"dataset": "small"}},
    }
}
BASE = {
    "defaults": ["ppo_trainer", "envs"],
    "model_path": "some/model",
    # a key of the releases until 2025-09
    "actor_rollout_ref": {"rollout": {"name": "hf", "use_fire_sampling": False}},
    "trainer": {"logger": ["console"]},
    "agent_proxy": {"max_turn": 5},
    "es_manager": {"train": {"env_groups": 8}},
}


def write(directory: Path, tree: dict[str, Any] | None = None) -> Path:
    """A configuration beside its envs.yaml and the text of a broken link, as in a checkout without submodules."""
    (directory / "envs.yaml").write_text(yaml.safe_dump(ENVS, sort_keys=False))
    (directory / "ppo_trainer.yaml").write_text("../verl/verl/trainer/config/ppo_trainer.yaml")
    (directory / "base.yaml").write_text(yaml.safe_dump(BASE))
    path = directory / "_2_sokoban.yaml"
    path.write_text(yaml.safe_dump({"defaults": ["base"], "trainer": {"experiment_name": "sokoban"}} | (tree or {})))
    return path


def load(directory: Path, *overrides: str) -> ComposedConfig:
    return convert(compose_config(write(directory), overrides), DIALECTS["ragen"], to_plan=True).composed


def value(composed: ComposedConfig, native: str) -> Any:
    return flatten(composed.experiment.model_dump())[native]


GRPO = ("algorithm.adv_estimator=grpo",)
IN_LOSS, IN_REWARD = ("actor_rollout_ref.actor.use_kl_loss=true",), ("algorithm.use_kl_in_reward=true",)
NORMALIZED = "agent_proxy.reward_normalization.method=mean_std"
ADAPTIVE = (*IN_REWARD, "algorithm.kl_ctrl.target_kl=0.2")
LORA = ("lora.rank=8",)
TWO = "es_manager.train.env_configs.tags=[SimpleSokoban,Lake]"
ACTOR, MODEL, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "ref", "rollout"))
REACHED: list[tuple[str, Any, Any, str, Any, tuple[str, ...]]] = [
    ("system.CUDA_VISIBLE_DEVICES", 3, "gpu", "placement.visible_devices", (3,), ()),
    ("seed.train", 7, -1, "seed", 7, ()),
    ("micro_batch_size_per_gpu", 2, 0, "actor.budget.sequences", 2, ()),
    ("log_prob_micro_batch_size_per_gpu", 4, 0, "actor.inference_budget.sequences", 4, ()),
    ("ppo_mini_batch_size", 16, 0, "training.mini_batches", 8, ()),
    ("model_path", "other/model", 1, "policy.path", "other/model", ()),
    ("enable_response_mask", False, 1, "algorithm.train_on_observations", True, ()),
    ("grpo_advantage_length_weight", True, 1, "algorithm.advantage.length_weight", True, GRPO),
    ("lora.rank", 8, -1, "policy.lora.rank", 8, ()),
    ("lora.alpha", 32, 0, "policy.lora.alpha", 32.0, LORA),
    ("lora.target_modules", ["q_proj"], 1, "policy.lora.target_modules", ("q_proj",), LORA),
    (f"{MODEL}.path", "other/model", 1, "policy.path", "other/model", ("critic.model.path=other/model",)),
    (f"{MODEL}.lora_rank", 8, -1, "policy.lora.rank", 8, ("critic.model.lora_rank=8",)),
    (f"{MODEL}.lora_alpha", 8, 0, "policy.lora.alpha", 8.0, LORA),
    (f"{MODEL}.target_modules", "q_proj", 1, "policy.lora.target_modules", ("q_proj",), LORA),
    (f"{MODEL}.enable_gradient_checkpointing", False, 1, "actor.gradient_checkpointing", False, ()),
    (f"{ACTOR}.ppo_mini_batch_size", 16, 0, "training.mini_batches", 8, ("critic.ppo_mini_batch_size=16",)),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 2, 0, "actor.budget.sequences", 2, ()),
    (f"{ACTOR}.use_ref", False, 1, "algorithm.kl", None, IN_LOSS),
    (f"{ACTOR}.entropy_coeff", 0.5, -1, "algorithm.entropy_coefficient", 0.5, ()),
    (f"{ACTOR}.use_kl_loss", True, 1, "algorithm.kl.apply_to", "loss", ()),
    (f"{ACTOR}.kl_loss_coef", 0.5, -1, "algorithm.kl.coefficient", 0.5, IN_LOSS),
    (f"{ACTOR}.kl_loss_type", "mse", "kll", "algorithm.kl.estimator", "k2", IN_LOSS),
    (f"{ACTOR}.clip_ratio_low", 0.1, 0, "algorithm.loss.clip_low", 0.1, ()),
    (f"{ACTOR}.clip_ratio_high", 0.3, 0, "algorithm.loss.clip_high", 0.3, ()),
    (f"{ACTOR}.optim.betas", [0.8, 0.9], 1, "actor.optimizer.betas", (0.8, 0.9), ()),
    (f"{REF}.log_prob_micro_batch_size_per_gpu", 2, 0, "reference.inference_budget.sequences", 2, IN_LOSS),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 2, 0, "actor.inference_budget.sequences", 2, ()),
    (f"{ROLLOUT}.max_model_len", 1000, 0, "rollout.max_prompt_tokens", 600, ()),
    (f"{ROLLOUT}.prompt_length", 300, 0, "rollout.max_prompt_tokens", 300, (f"{ROLLOUT}.max_model_len=null",)),
    (f"{ROLLOUT}.response_length", 100, 0, "rollout.max_response_tokens", 100, ()),
    (f"{ROLLOUT}.rollout_filter_ratio", 0.45, 0, "algorithm.filter.keep_share", 0.375, ()),
    (f"{ROLLOUT}.rollout_filter_type", "max_mean", "mean", "algorithm.filter.keep_by", "lead", ()),
    (f"{ROLLOUT}.val_kwargs.do_sample", False, 1, "validation.sampling.do_sample", False, ()),
    (f"{ROLLOUT}.val_kwargs.temperature", 0.1, -1, "validation.sampling.temperature", 0.1, ()),
    ("critic.ppo_micro_batch_size_per_gpu", 2, 0, "critic.budget.sequences", 2, ()),
    ("critic.model.path", "other/model", 1, "critic.path", "other/model", ()),
    ("critic.optim.betas", [0.8, 0.9], 1, "critic.optimizer.betas", (0.8, 0.9), ()),
    ("algorithm.gamma", 0.9, 2, "algorithm.advantage.gamma", 0.9, ()),
    ("algorithm.lam", 0.9, 2, "algorithm.advantage.lam", 0.9, ()),
    ("algorithm.high_level_gamma", 0.9, 2, "algorithm.advantage.turn_gamma", 0.9, ("algorithm.bi_level_gae=true",)),
    ("algorithm.adv_estimator", "rloo", "gea", "algorithm.advantage.name", "raw", ()),
    ("algorithm.bi_level_gae", True, 1, "algorithm.advantage.name", "bi_level_gae", ()),
    ("algorithm.use_kl_in_reward", True, 1, "algorithm.kl.apply_to", "reward", ()),
    ("algorithm.kl_penalty", "abs", "kll", "algorithm.kl.estimator", "abs", IN_REWARD),
    ("algorithm.kl_ctrl.type", "adaptive", "free", "algorithm.kl.target", 0.2, ADAPTIVE),
    ("algorithm.kl_ctrl.kl_coef", 0.5, -1, "algorithm.kl.coefficient", 0.5, IN_REWARD),
    ("trainer.project_name", "mine", 1, "tracking.project", "mine", ()),
    ("trainer.experiment_name", "mine", ["a"], "name", "mine", ()),
    ("trainer.total_training_steps", 7, -1, "training.steps", 7, ()),
    ("trainer.validation_steps", 3, 0, "validation.sampling.samples", 3, ()),
    ("trainer.val_before_train", False, 1, "validation.before_training", False, ()),
    ("trainer.test_freq", 0, -2, "validation.every_steps", -1, ()),
    ("trainer.generations_to_log_to_wandb.val", 3, -1, "tracking.validation_generations", 3, ()),
    ("trainer.logger", ["swanlab"], "tape", "tracking.loggers", ("jsonl", "swanlab"), ()),
    ("agent_proxy.max_context_window", 2, -2, "rollout.window_size", 2, ()),
    ("agent_proxy.max_turn", 3, 0, "rollout.max_turns", 3, ()),
    ("agent_proxy.action_sep", "';'", 1, "rollout.action_separator", ";", ()),
    ("agent_proxy.max_actions_per_turn", 2, 0, "rollout.max_actions_per_turn", 2, ()),
    ("agent_proxy.use_turn_scores", True, 1, "algorithm.turn_rewards", True, ()),
    ("agent_proxy.enable_think", False, 1, "rollout.think", False, ()),
    ("agent_proxy.reward_normalization.grouping", "batch", "env", "algorithm.shaping.center", "batch", (NORMALIZED,)),
    ("agent_proxy.reward_normalization.method", "asym_clip", "clip", "algorithm.shaping.clip", 3.0, ()),
    ("es_manager.format_penalty", -0.5, "big", "rollout.format_penalty", -0.5, ()),
    ("es_manager.train.group_size", 32, 0, "training.samples_per_group", 32, ()),
    ("es_manager.val.group_size", 2, 0, "validation.sampling.samples", 2, ()),
]
GROUPS_OF = {side: f"es_manager.{side}.env_configs.n_groups" for side in ("train", "val")}
SMALL_STEP = (f"{GROUPS_OF['train']}=[4]", "ppo_mini_batch_size=16")
OF_GROUPS: list[tuple[str, Any, Any, str, Any, tuple[str, ...]]] = [
    ("es_manager.train.env_groups", 4, 0, "training.groups_per_step", 4, SMALL_STEP),
    (GROUPS_OF["train"], [5, 3], [-1], "envs.Lake.share", 3.0, (TWO,)),
    ("es_manager.train.env_configs.tags", ["Lake"], "Lake", "envs.Lake.share", 8.0, ()),
    ("es_manager.val.env_groups", 4, 0, "validation.episodes", 4, (f"{GROUPS_OF['val']}=[4]",)),
    (GROUPS_OF["val"], [256], [-1], "validation.episodes", 256, ()),
    ("es_manager.val.env_configs.tags", ["Lake"], "Lake", "envs.Lake.validation_episodes", 256, ()),
]
"""Keys that need others beside them."""
WITHOUT_EFFECT = [
    *("seed.val", f"{ACTOR}.micro_batch_size_per_gpu", f"{ACTOR}.grpo_advantage_length_weight"),
    *(f"{ROLLOUT}.tp_size_check", "data.max_prompt_length", "data.max_response_length", "data.train_batch_size"),
    *("trainer.generations_to_log_to_wandb.train", "trainer.local_log_dir"),
    *(f"ctx_manager.generation.gen_config.{key}" for key in ("response_length", "temperature", "top_p", "top_k")),
    "ctx_manager.generation.gen_config.kwargs",
]
OTHER_VALUES = {bool: True, int: 3, float: 0.5, str: "other", type(None): 5}


def texts(key: str, written: Any) -> str:
    return f"{key}={written}" if not isinstance(written, list) else f"{key}=[{','.join(map(str, written))}]"


CASES = [*REACHED, *OF_GROUPS]


@pytest.mark.proves("ragen", *(case[0] for case in CASES))
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_key_of_agents_reaches_the_run(tmp_path: Path, case: tuple[str, Any, Any, str, Any, tuple[str, ...]]) -> None:
    key, written, illegal, native, expected, others = case
    assert value(load(tmp_path, *others, texts(key, written)), native) == expected
    with pytest.raises(ConfigError) as error:
        load(tmp_path, *others, texts(key, illegal))
    assert key in str(error.value)


@pytest.mark.proves("ragen", *WITHOUT_EFFECT)
def test_keys_without_an_effect_change_nothing(tmp_path: Path) -> None:
    specs = DIALECTS["ragen"].narrowed(BASE).specs()
    changed = []
    for key in WITHOUT_EFFECT:
        accepted = [item for item in (True, False, 3, 0.5, "other", {"a": 1}) if specs[key].value_type.accepts(item)]
        other = next(item for item in accepted if item != specs[key].default)
        changed.append(f"{key}={{a: 1}}" if isinstance(other, dict) else f"{key}={str(other).lower()}")
    assert load(tmp_path, *changed).experiment == load(tmp_path).experiment


@pytest.mark.proves(
    "ragen",
    "actor_rollout_ref.actor.optim.total_training_steps",
    "critic.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.val_kwargs.n",
)
def test_keys_that_follow_others_may_not_contradict_them(tmp_path: Path) -> None:
    for key in ("rollout.n", "rollout.val_kwargs.n"):
        with pytest.raises(ConfigError, match=r"n = 2.*must be one of 1"):
            load(tmp_path, f"actor_rollout_ref.{key}=2")
    with pytest.raises(ConfigError, match=r"critic\.ppo_mini_batch_size = 16"):
        load(tmp_path, "critic.ppo_mini_batch_size=16")
    warm = "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1"
    assert value(load(tmp_path, warm), "actor.optimizer.warmup_steps") == 20
    steps = "actor_rollout_ref.actor.optim.total_training_steps=100"
    assert value(load(tmp_path, warm, steps), "actor.optimizer.warmup_steps") == 10


@pytest.mark.proves(
    "ragen",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.enable_chunked_prefill",
    "trainer.n_gpus_per_node",
)
def test_engine_and_devices_reach_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=2, packages=("vllm",))
    engine = "actor_rollout_ref.rollout.name=vllm"
    parallel = ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2")
    run = load(tmp_path, engine, *parallel, "system.CUDA_VISIBLE_DEVICES='0,1'").experiment
    assert (run.rollout.engine_options.tensor_parallel, run.placement.devices_per_node) == (2, 2)
    assert run.rollout.engine_options.chunked_prefill is True
    off = load(tmp_path, engine, "actor_rollout_ref.rollout.enable_chunked_prefill=false").experiment
    assert off.rollout.engine_options.chunked_prefill is False
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES.*names 1, but trainer\.n_gpus_per_node = 2"):
        load(tmp_path, *parallel)


def test_the_reference_run_has_ragens_arithmetic(tmp_path: Path) -> None:
    """By hand from RAGEN's base.yaml: 8 × 16 episodes, of which the filter keeps 2 groups, one mini-batch of 32."""
    run = load(tmp_path).experiment
    training, rollout = run.training, run.rollout
    assert (training.steps, training.groups_per_step, training.samples_per_group) == (200, 8, 16)
    assert (training.mini_batches, run.algorithm.filter.keep_share, run.validation.episodes) == (4, 0.25, 256)
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens, rollout.max_turns) == (3200, 400, 5)
    assert (rollout.response_format, rollout.unknown_actions, rollout.window_size) == ("anywhere", "skip", None)
    assert (run.algorithm.advantage.name, run.algorithm.kl, run.algorithm.turn_rewards) == ("gae", None, False)
    assert not run.algorithm.drop_groups_without_signal
    assert (run.policy.lora, run.warm_start, run.name) == (None, None, "sokoban")


@pytest.mark.parametrize(
    ("overrides", "name", "normalized", "center"),
    [
        ([NORMALIZED], "grpo", True, "none"),
        (["agent_proxy.reward_normalization.method=mean"], "grpo", False, "none"),
        ([], "raw", None, "none"),
        ([NORMALIZED, "agent_proxy.reward_normalization.grouping=batch"], "raw", None, "batch"),
        ([NORMALIZED, "agent_proxy.use_turn_scores=true"], "raw", None, "none"),
    ],
)
def test_grpo_compares_episodes_only_by_the_normalization_of_rewards(
    tmp_path: Path, overrides: list[str], name: str, normalized: bool | None, center: str
) -> None:
    algorithm = load(tmp_path, *GRPO, *overrides).experiment.algorithm
    assert algorithm.advantage.name == name
    assert getattr(algorithm.advantage, "normalize_by_std", None) is normalized
    assert algorithm.shaping.center == center


ENV_OPTIONS: list[tuple[str, str, Any, str, Any]] = [
    ("SimpleSokoban", "max_actions_per_traj", 7, "max_actions", 7),
    ("SimpleSokoban", "env_config.dim_x", 8, "height", 8),
    ("SimpleSokoban", "env_config.dim_y", 9, "width", 9),
    ("SimpleSokoban", "env_config.num_boxes", 2, "boxes", 2),
    ("SimpleSokoban", "env_config.max_steps", 50, "max_steps", 50),
    ("SimpleSokoban", "env_config.search_depth", 10, "pull_steps", 10),
    ("SimpleSokoban", "env_config.render_mode", "rgb_array", "render", "vision"),
    ("Letters", "env_config.dim_room", [7, 8], "height", 7),
    ("Lake", "env_config.size", 5, "size", 5),
    ("Lake", "env_config.p", 0.9, "floor_density", 0.9),
    ("Lake", "env_config.is_slippery", False, "slippery", False),
    ("Lake", "env_config.map_seed", 5, "slippery", True),
    ("Bandit", "env_config.lo_arm_name", "Trader", "low_arm", "Trader"),
    ("Bandit", "env_config.hi_arm_name", "Librarian", "high_arm", "Librarian"),
    ("Bandit", "env_config.lo_arm_score", 0.2, "low_reward", 0.2),
    ("Bandit", "env_config.hi_arm_loscore", -1, "miss_reward", -1.0),
    ("Bandit", "env_config.hi_arm_hiscore", 2, "high_reward", 2.0),
    ("Bandit", "env_config.hi_arm_hiscore_prob", 0.5, "high_probability", 0.5),
    ("Bandit", "env_config.action_space_start", 0, "low_arm", "phoenix"),
    ("Countdown", "env_config.train_path", "mine.parquet", "path", "mine.parquet"),
    ("Math", "env_config.dataset_path", "mine.jsonl", "path", "mine.jsonl"),
    ("Math", "env_config.cache_dir", "cache", "path", "cache/MetaMathQA"),
    ("Math", "env_config.split", "train", "path", "data/MetaMathQA"),
    ("Shop", "env_config.dataset", "full", "dataset", "full"),
    ("Shop", "env_config.observation_mode", "html", "observation", "html"),
    ("Shop", "env_config.file_path", "items.json", "file_path", "items.json"),
    ("Shop", "env_config.num_products", 100, "products", 100),
    ("Shop", "env_config.human_goals", True, "human_goals", True),
]
PROVED = [f"custom_envs.SimpleSokoban.{option}" for _, option, *_ in ENV_OPTIONS]


def only(tag: str) -> tuple[str, str]:
    return (f"es_manager.train.env_configs.tags=[{tag}]", f"es_manager.val.env_configs.tags=[{tag}]")


@pytest.mark.proves("ragen", *PROVED)
@pytest.mark.parametrize("case", ENV_OPTIONS, ids=[f"{case[0]}.{case[1]}" for case in ENV_OPTIONS])
def test_an_option_of_an_environment_reaches_the_run(tmp_path: Path, case: tuple[str, str, Any, str, Any]) -> None:
    tag, option, written, native, expected = case
    key = f"custom_envs.{tag}.{option}"
    assert value(load(tmp_path, *only(tag), texts(key, written)), f"env.{native}") == expected


@pytest.mark.proves(
    "ragen",
    "custom_envs.SimpleSokoban.env_instruction",
    "custom_envs.SimpleSokoban.max_tokens",
    "custom_envs.SimpleSokoban.env_config.grid_lookup",
    "custom_envs.SimpleSokoban.env_config.grid_vocab",
    "custom_envs.SimpleSokoban.env_config.max_instances",
)
def test_the_instruction_has_the_users_text_and_the_legend(tmp_path: Path) -> None:
    env = load(tmp_path, *only("Letters"), "custom_envs.Letters.max_tokens=33").experiment.env
    assert (env.name, env.symbols) == ("sokoban", "W.GCBA@")
    assert env.instruction.startswith(
        "Push the boxes.\nSymbols: W wall, . empty, G target, A player\nActions: Up, Down"
    )
    assert env.instruction.endswith("at most 10\nLength of a response: at most 33 words")
    assert load(tmp_path, *only("Bandit")).experiment.env.instruction is None
    rows = "custom_envs.Countdown.env_config.max_instances=99"
    file = "custom_envs.Countdown.env_config.train_path=mine.parquet"
    assert load(tmp_path, *only("Countdown"), file, rows).experiment.env.max_rows == 99


def test_tags_are_mixed_by_their_groups(tmp_path: Path) -> None:
    validation = ("es_manager.val.env_configs.tags=[Lake,Bandit]", "es_manager.val.env_configs.n_groups=[100,156]")
    run = load(tmp_path, TWO, "es_manager.train.env_configs.n_groups=[6,2]", *validation).experiment
    assert {name: (entry.share, entry.validation_episodes) for name, entry in run.envs.items()} == {
        "SimpleSokoban": (6.0, 0),
        "Lake": (2.0, 100),
        "Bandit": (0.0, 156),
    }


def test_both_kl_terms_have_their_own_coefficients(tmp_path: Path) -> None:
    words = (*IN_LOSS, *ADAPTIVE, f"{ACTOR}.kl_loss_coef=0.1", "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.3}")
    algorithm = load(tmp_path, *words, "algorithm.kl_penalty=abs").experiment.algorithm
    assert algorithm.kl == KlConfig(apply_to="loss", coefficient=0.1, estimator="k1")
    assert algorithm.reward_kl is not None
    assert (algorithm.reward_kl.coefficient, algorithm.reward_kl.estimator) == (0.3, "abs")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([TWO], ("n_groups = [8]", "SimpleSokoban", "in equal parts", "n_groups=[4, 4]")),
        (["es_manager.train.env_configs.tags=[SimpelSokoban]"], ("SimpelSokoban", "did you mean SimpleSokoban?")),
        (
            ["ppo_mini_batch_size=24"],
            ("ppo_mini_batch_size = 24", "128 episodes", "nearest valid value: ppo_mini_batch_size="),
        ),
        (["ppo_mini_batch_size=64"], ("ppo_mini_batch_size = 64", "keeps 32 episodes", "rollout_filter_ratio=1")),
        (["actor_rollout_ref.rollout.rollout_filter_ratio=0.1"], ("keeps none", "env_groups = 8")),
        ([*GRPO, "algorithm.bi_level_gae=true"], ("bi_level_gae = true", "needs the estimator gae")),
        (["custom_envs.SimpleSokoban.env_config.size=4"], ("env_config.size = 4", "sokoban has no such option")),
        (["actor_rollout_ref.rollout.max_model_len=400"], ("leaves no tokens for the prompt",)),
        (["agent_proxy.max_turns=3"], ("agent_proxy.max_turns", "did you mean agent_proxy.max_turn?")),
    ],
)
def test_what_has_no_meaning_is_refused_by_ragens_own_keys(
    tmp_path: Path, overrides: list[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, *overrides)
    for word in words:
        assert word in str(error.value)


def test_a_file_that_only_names_its_base_is_recognised(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert read_config_source(str(path), [], None, quiet=True).dialect == "ragen"
    assert read_config_source(str(tmp_path / "base.yaml"), [], None, quiet=True).dialect == "ragen"
    (tmp_path / "base.yaml").unlink()  # a file of RAGEN's own
    assert read_config_source(str(path), [], None, quiet=True).dialect == "ragen"


def test_the_file_of_environments_says_that_it_is_no_run(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)RAGEN's file of environments.*_2_sokoban\.yaml"):
        read_config_source(str(tmp_path / "envs.yaml"), [], None, quiet=True)
    with pytest.raises(ConfigError, match=r"(?s)text of a symbolic link.*submodule"):
        read_config_source(str(tmp_path / "ppo_trainer.yaml"), [], None, quiet=True)


def test_verls_file_counts_if_its_link_leads_to_it(tmp_path: Path) -> None:
    tree = tmp_path / "verl" / "verl" / "trainer" / "config"
    config = tmp_path / "config"
    for directory in (tree, config):
        directory.mkdir(parents=True)
    (tree / "ppo_trainer.yaml").write_text("actor_rollout_ref: {actor: {grad_clip: 0.5}, rollout: {temperature: 0.7}}")
    assert value(load(config), "actor.optimizer.max_grad_norm") == 0.5


def test_models_behind_an_api_wait(tmp_path: Path) -> None:
    models = {"model_config": {"model_name": "gpt"}, "model_info": {"gpt": {"provider_name": "mine"}}}
    found = convert(compose_config(write(tmp_path, models), []), DIALECTS["ragen"], to_plan=True)
    assert {problem.key for problem in found.unsupported} == {"model_config.model_name", "model_info"}
    assert all("quintet eval --endpoint" in problem.message for problem in found.unsupported)


def test_a_run_in_several_environments_can_be_translated(tmp_path: Path) -> None:
    validation = ("es_manager.val.env_configs.tags=[Lake,Bandit]", "es_manager.val.env_configs.n_groups=[100,156]")
    composed = load(tmp_path, TWO, "es_manager.train.env_configs.n_groups=[6,2]", *validation)
    translated = translate(composed, DIALECTS["ragen"])
    tree: dict[str, Any] = {}
    set_value(tree, "es_manager", translated.tree["es_manager"])
    assert tree["es_manager"]["train"]["env_configs"]["n_groups"] == [6, 2]
    assert set(translated.tree["custom_envs"]) == {"SimpleSokoban", "Lake", "Bandit"}
    assert [key for key in translated.lost if key.startswith(("envs.", "training.", "algorithm."))] == [
        "envs.SimpleSokoban.env.instruction"
    ]


OLDER_TREE = {
    "actor_rollout_ref": {
        "model": {"return_last_hidden_state": False, "use_fused_loss": False},
        "actor": {"checkpoint": {"contents": ["model", "optimizer", "extra"]}},
        "rollout": {"chat_scheduler": None, "multi_turn": {"enable": False, "max_turns": None}},
    },
    "critic": {"checkpoint": {"contents": ["model", "optimizer", "extra"]}},
}
"""What the trees of verl 0.3 and 0.4, which RAGEN links to, have beyond newer ones."""


@pytest.mark.proves(
    "verl", "actor_rollout_ref.model.return_last_hidden_state", "actor_rollout_ref.model.use_fused_loss"
)
def test_the_older_tree_of_verl_is_not_refused_as_a_slip(tmp_path: Path) -> None:
    result = convert(compose_config(write(tmp_path, OLDER_TREE), ()), DIALECTS["ragen"], to_plan=True)
    assert not result.unsupported
    renamed = [remark.partition(" (")[0] for remark in result.composed.remarks if "is read as" in remark]
    assert "actor_rollout_ref.actor.checkpoint.contents" in renamed
    fused = [f"{MODEL}.{key}=true" for key in ("return_last_hidden_state", "use_fused_loss")]
    assert load(tmp_path, *fused).experiment == load(tmp_path).experiment


def test_a_scheduler_of_conversations_waits_by_name(tmp_path: Path) -> None:
    override = "actor_rollout_ref.rollout.chat_scheduler=mine.Scheduler"
    result = convert(compose_config(write(tmp_path), (override,)), DIALECTS["ragen"], to_plan=True)
    assert ["agent loops and engine servers from user code" in str(problem) for problem in result.unsupported] == [True]
