"""If these fail, a RAGEN configuration runs as something else than what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign import converted, machine, natively

from quintet.config.capabilities import Capability
from quintet.config.composed import ComposedConfig
from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.loader import load_config
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dotted import flatten
from quintet.config.translate import translate
from quintet.config.yaml_writer import dump_config
from quintet.errors import ConfigError

PLAIN = {
    "model": {"base_model": "some/model"},
    "sft": {"env_type": "frozenlake"},
    "logging": {"mode": ["console"]},
}
"""What a run gives that asks for nothing which waits."""

REACHED: list[tuple[str, Any, Any, str, Any]] = [
    ("model.base_model", "other/model", 1, "policy.path", "other/model"),
    ("model.experiment_name", "mine", None, "name", "mine"),
    ("model.gradient_checkpointing", False, "no", "actor.gradient_checkpointing", False),
    ("training.train_data_num", 100, -1, "training.start_states", 100),
    ("training.val_data_num", 35, -1, "validation.episodes", 30),
    ("training.val_batch_size", 7, 0, "validation.episodes", 49),
    ("training.micro_batch_size", 2, 0, "actor.budget.sequences", 2),
    ("training.train_batch_size", 16, "eight", "training.groups_per_step", 16),
    ("training.ppo_batch_size", 32, 0, "training.mini_batches", 4),
    ("training.n_rollout", 32, 0, "training.samples_per_group", 32),
    ("training.max_start_length", 500, 0, "rollout.max_prompt_tokens", 3100),
    ("training.max_response_length", 100, 0, "rollout.max_response_tokens", 100),
    ("training.max_obs_length", 100, 0, "rollout.max_observation_tokens", 100),
    ("training.max_turns", 2, 0, "rollout.max_turns", 2),
    ("training.total_epochs", 2, 0, "training.steps", 2500),
    ("training.total_training_steps", 7, -1, "training.steps", 7),
    ("training.temperature", 1.0, 0, "rollout.temperature", 1.0),
    ("training.use_kl_loss", False, 1, "algorithm.kl.apply_to", "reward"),
    ("training.no_think_rl", True, "yes", "rollout.think", False),
    ("training.state_masking", True, "yes", "algorithm.train_on_observations", False),
    ("training.mask_state", True, 1, "algorithm.train_on_observations", False),
    ("training.binary_reward", True, 1, "rollout.binary_reward", True),
    ("training.length_penalty", True, 1, "algorithm.shaping.length_penalty", 1.0),
    ("training.use_sft", True, 1, "sft.then_reinforce", True),
    ("rl_or_sft", "sft", "both", "sft.then_reinforce", False),
    ("optimization.adv_estimator", "brpo", "gea", "algorithm.advantage.name", "brpo"),
    ("trainer.project_name", "mine", None, "output_dir", "runs/mine"),
    ("training.ref_update_steps", 5, 0, "algorithm.kl.refresh_every_steps", 5),
    ("optimization.actor_lr", 3e-4, 0, "actor.optimizer.learning_rate", 3e-4),
    ("optimization.critic_lr", 3e-4, "1", "critic.optimizer.learning_rate", 3e-4),
    ("optimization.kl_coef", 0.5, -1, "algorithm.kl.coefficient", 0.5),
    ("optimization.kl_loss_type", "mse", "kll", "algorithm.kl.estimator", "k2"),
    ("optimization.gpu_memory_utilization", 0.6, 1.2, "rollout.engine_options.memory_share", 0.6),
    ("logging.mode", "['swanlab', 'mlflow']", ["konsole"], "tracking.loggers", ("jsonl", "swanlab", "mlflow")),
    ("logging.log_images", True, "on", "tracking.rendered_episodes", 32),
    ("logging.log_image_dir", "drawn", 7, "tracking.rendered_episodes_dir", "drawn"),
    ("logging.log_n_image_per_batch", 5, -1, "tracking.rendered_episodes", 5),
    ("trainer.val_before_train", False, "no", "validation.before_training", False),
    ("trainer.val_only", True, 0, "validation.only", True),
    ("trainer.save_freq", 7, "often", "checkpoint.every_steps", 7),
    ("trainer.default_hdfs_dir", "hdfs://there", 1, "checkpoint.remote_dir", "hdfs://there"),
    ("trainer.test_freq", -1, -2, "validation.every_steps", -1),
    ("logging.log_image_step_size", 9, 0, "tracking.trajectories_every_steps", 9),
    ("sft.env_type", "sokoban", "chess", "env.name", "sokoban"),
    ("sft.frozenlake.size", 5, 1, "env.size", 5),
    ("sft.frozenlake.p", 0.5, 1.5, "env.success_rate", 0.5),
    ("sft.frozenlake.is_slippery", False, 0, "env.slippery", False),
]
OF_STAGES: list[tuple[str, Any, Any, str, Any]] = [
    ("sft.output_dir", "tuned", 1, "sft.output_dir", "tuned"),
    ("sft.data_generation.data_dir", "solved", 1, "sft.episodes.directory", "solved"),
    ("sft.data_generation.algo", "bfs", "dfs", "sft.episodes.algorithm", "bfs"),
    ("sft.data_generation.seed", 7, -1, "sft.episodes.seed", 7),
    ("sft.data_generation.train_size", 50, 0, "sft.episodes.episodes", 50),
    ("sft.data_generation.test_size", 5, 0, "sft.episodes.validation_episodes", 5),
    ("sft.data_generation.bfs_max_depths", 12, 0, "sft.episodes.max_depth", 12),
    ("sft.data_generation.prefix", "base", "latin", "sft.episodes.form", "base"),
    ("sft.data_generation.num_processes", 2, 0, "sft.episodes.processes", 2),
    ("sft.training.max_length", 512, 0, "sft.max_tokens", 512),
    ("sft.training.learning_rate", 1e-3, 0, "sft.optimizer.learning_rate", 1e-3),
    ("sft.training.train_batch_size", 16, 0, "sft.batch", 16),
    ("sft.training.micro_batch_size", 2, 0, "sft.sequences_per_pass", 2),
    ("sft.training.experiment_name", "mine", 1, "sft.name", "mine"),
    ("sft.training.logger", ["console", "clearml"], "['x']", "sft.loggers", ("jsonl", "console", "clearml")),
    ("sft.training.epochs", 2, 0, "sft.epochs", 2),
    ("sft.training.hdfs_dir", "hdfs://there", 1, "sft.remote_dir", "hdfs://there"),
    ("sft.training.validate_before_training", False, 0, "sft.before_training", False),
    ("sft.training.lora_rank", 8, -1, "sft.lora.rank", 8),
    ("sft.training.lora_alpha", 16, 0, "sft.lora.alpha", 16.0),
    ("sft.training.target_modules", ["q_proj"], 1, "sft.lora.target_modules", ("q_proj",)),
    ("sft.training.enable_gradient_checkpointing", True, 1, "sft.gradient_checkpointing", True),
    ("sft.training.base_model", "other/model", 1, "sft.path", "other/model"),
    ("sft.training.project_name", "mine", 1, "sft.project", "mine"),
]
"""Keys of the stages, which count where those are run."""
OF_VLLM: list[tuple[str, Any, Any, str, Any]] = [
    ("system.vllm_attention_backend", "FLASH_ATTN", "FAST", "rollout.engine_options.attention_backend", "FLASH_ATTN"),
    ("training.rollout_tp_size", 2, 0, "rollout.engine_options.tensor_parallel", 2),
]
"""Keys of the engine with which RAGEN generates."""
SOKOBAN = [
    ("sft.sokoban.dim_x", 7, 3, "env.height", 7),
    ("sft.sokoban.dim_y", 8, "8", "env.width", 8),
    ("sft.sokoban.num_boxes", 2, 0, "env.boxes", 2),
    ("sft.sokoban.max_steps", 50, 0, "env.max_steps", 50),
    ("sft.sokoban.search_depth", 40, 0, "env.pull_steps", 40),
]


def load(tmp_path: Path, tree: dict[str, Any], *overrides: str) -> ComposedConfig:
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_config(compose_config(path, overrides), DIALECTS["ragen"])


def changed(key: str, value: Any, **others: Any) -> dict[str, Any]:
    tree = yaml.safe_load(yaml.safe_dump(PLAIN))
    for dotted, one in {**others, key: value}.items():
        *sections, last = dotted.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = one
    return tree


CASES = [*REACHED, *OF_STAGES, *OF_VLLM]


@pytest.mark.proves("ragen", *(case[0] for case in CASES))
@pytest.mark.parametrize(("key", "value", "illegal", "native", "expected"), CASES, ids=[one[0] for one in CASES])
def test_a_key_reaches_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, illegal: Any, native: str, expected: Any
) -> None:
    if any(key == one[0] for one in OF_VLLM):
        machine(monkeypatch, gpus=4, packages=("vllm",))
    others: dict[str, Any] = {"training.ppo_batch_size": 64} if key == "training.max_turns" else {}
    others |= {"rl_or_sft": "sft"} if any(key == one[0] for one in OF_STAGES) else {}
    composed = load(tmp_path, changed(key, value, **others))
    assert flatten(composed.experiment.model_dump())[native] == expected
    assert key in composed.provenance[native]
    assert "base.yaml:" in composed.provenance[native]
    with pytest.raises(ConfigError) as error:
        load(tmp_path, changed(key, illegal, **others))
    assert key in str(error.value)


@pytest.mark.proves("ragen", *(case[0] for case in SOKOBAN))
@pytest.mark.parametrize(("key", "value", "illegal", "native", "expected"), SOKOBAN, ids=[one[0] for one in SOKOBAN])
def test_a_key_of_sokoban_reaches_the_run(
    tmp_path: Path, key: str, value: Any, illegal: Any, native: str, expected: Any
) -> None:
    composed = load(tmp_path, changed(key, value, **{"sft.env_type": "sokoban"}))
    assert flatten(composed.experiment.model_dump())[native] == expected
    with pytest.raises(ConfigError, match=key):
        load(tmp_path, changed(key, illegal, **{"sft.env_type": "sokoban"}))


def test_the_episodes_of_a_step_must_fill_whole_updates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, changed("training.ppo_batch_size", 100))
    told = str(error.value)
    for word in ("ppo_batch_size = 100", "train_batch_size = 8", "n_rollout = 16", "128", "ppo_batch_size=128"):
        assert word in told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training.train_data_num": 4}, ("train_batch_size = 8", "4 start states", "train_batch_size=4")),
        ({"training.val_data_num": 5}, ("val_data_num = 5", "val_batch_size = 10", "val_data_num=10")),
    ],
)
def test_batches_that_nothing_fills_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, changed("training.max_turns", 5, **changes))
    for word in words:
        assert word in str(error.value)


def test_start_states_that_are_drawn_once_decide_about_the_steps(tmp_path: Path) -> None:
    """By hand: 100 // 8 steps in each of 5 passes; more than there are change nothing."""
    training = load(tmp_path, PLAIN, "training.train_data_num=100").experiment.training
    assert (training.steps, training.start_states) == (60, 100)
    whole = load(tmp_path, PLAIN, "training.train_data_num=20000", "training.val_data_num=20000").experiment
    assert (whole.training.steps, whole.training.start_states, whole.validation.episodes) == (6250, None, 10000)


def test_ragen_generates_with_vllm_where_that_and_a_gpu_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, gpus=1, packages=("vllm",))
    assert load(tmp_path, PLAIN).experiment.rollout.engine == "vllm"
    for gpus, packages in ((0, ("vllm",)), (1, ())):
        machine(monkeypatch, gpus=gpus, packages=packages)
        assert load(tmp_path, PLAIN).experiment.rollout.engine == "hf"


def test_an_option_of_vllm_is_refused_where_hf_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=0)
    for key, value in {"training.rollout_tp_size": 2, "system.vllm_attention_backend": "FLASHINFER"}.items():
        with pytest.raises(ConfigError, match=rf"(?s){key} = .*engine hf has no such option.*leave {key} out"):
            load(tmp_path, changed(key, value))
    load(tmp_path, changed("system.vllm_attention_backend", "XFORMERS"))


def test_a_coefficient_of_zero_needs_no_reference(tmp_path: Path) -> None:
    assert load(tmp_path, PLAIN, "optimization.kl_coef=0").experiment.algorithm.kl is None


def test_everything_that_waits_or_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    tree = changed("trainer.nnodes", 2, **{"system.n_gpus": 4, "training.max_turn": 3})
    with pytest.raises(ConfigError) as error:
        load(tmp_path, tree)
    told = str(error.value)
    for word in ("trainer.nnodes", "system.n_gpus", "training.max_turn ", "did you mean training.max_turns"):
        assert word in told


def test_unknown_keys_can_be_let_go_but_never_silently(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(changed("training.zebra", 1)))
    composed = load_config(compose_config(path, []), DIALECTS["ragen"], unknown="warn")
    assert "unknown keys left out, which a fork reads: training.zebra (" in composed.remarks[0]
    assert "# Remark: unknown keys left out, which a fork reads: training.zebra (" in dump_config(composed)


def test_where_the_references_own_value_waits_it_is_said(tmp_path: Path) -> None:
    remarks = "\n".join(load(tmp_path, PLAIN).remarks)
    assert "system.vllm_attention_backend" not in remarks
    assert "sft.training.lora_rank" not in remarks


@pytest.mark.parametrize("section", [5, "yes"])
def test_a_section_that_holds_no_keys_is_refused(tmp_path: Path, section: Any) -> None:
    with pytest.raises(ConfigError, match=r"optimization = .*must be a section"):
        load(tmp_path, PLAIN | {"optimization": section})


LAUNCH_KEYS = ("system.cuda_visible_devices", "system.multi_processing", "system.n_gpus", "trainer.nnodes")


def test_each_honoured_key_has_a_row_in_these_tables() -> None:
    honoured = {row.key for row in DIALECTS["ragen"].narrowed({}).specs().values() if row.state == "honoured"}
    by_processes = {"sft.training.num_gpus", *LAUNCH_KEYS}  # see test_process_checks and test_placement_keys
    assert honoured - by_processes - {"env.data_dir"} == {one[0] for one in (*CASES, *SOKOBAN)}


def test_what_a_section_that_isnt_run_says_asks_for_nothing(tmp_path: Path) -> None:
    tree = changed("sft.training.lora_rank", 16, **{"sft.training.num_gpus": 2, "sft.training.epochs": 3})
    alone = load(tmp_path, tree)
    assert alone.experiment.sft is None
    assert any(remark.startswith("sft.training.epochs = 3 (") for remark in alone.remarks)
    with pytest.raises(ConfigError, match=r"sft\.training\.num_gpus"):
        load(tmp_path, tree | {"rl_or_sft": "sft"})


@pytest.mark.parametrize(
    ("written", "native"),
    [
        ("masked_gae", {"name": "gae", "gamma": 1.0, "lam": 1.0, "whiten": True}),
        (
            "turn_wise_gae",
            {"name": "turn_wise_gae", "gamma": 1.0, "lam": 1.0, "turn_value": "last", "whiten": True}
            | {"whiten_over": "turns"},
        ),
        ("arpo", {"name": "arpo", "normalize_by_std": True, "whiten": False}),
        ("rloo", {"name": "rloo", "whiten": False}),
        ("reinforce_plus_plus", {"name": "reinforce_plus_plus", "gamma": 1.0, "whiten": True}),
        (
            "mine.py:advantage",
            {"name": "custom", "function": "mine.py:advantage", "options": {}, "needs_critic": False, "whiten": False},
        ),
    ],
)
def test_an_estimator_has_its_own_options_and_no_others(tmp_path: Path, written: str, native: dict[str, Any]) -> None:
    composed = load(tmp_path, changed("optimization.adv_estimator", written))
    assert composed.experiment.algorithm.advantage.model_dump() == native
    there = translate(composed, DIALECTS["ragen"])
    assert there.tree["optimization"]["adv_estimator"] in (written, "gae")
    assert there.lost == {}


def test_stages_before_reinforcement_count_too(tmp_path: Path) -> None:
    composed = load(tmp_path, changed("training.use_sft", True, **{"sft.training.epochs": 3}))
    sft = composed.experiment.sft
    assert sft is not None
    assert (sft.then_reinforce, sft.epochs, sft.final_weights, sft.output_dir) == (True, 3, "best", "models/sft")
    assert not any("sft.training.epochs" in remark for remark in composed.remarks)
    assert translate(composed, DIALECTS["ragen"]).lost == {}


@pytest.mark.proves("ragen", "env.data_dir")
def test_the_environment_of_early_ragens_command_line_is_that_of_the_run(tmp_path: Path) -> None:
    kwargs = {"dim_x": 7, "dim_y": 8, "num_boxes": 2}
    found = converted(tmp_path, "ragen", {"env": {"name": "sokoban", "data_dir": "data", "env_kwargs": kwargs}})
    env = found.composed.experiment.env
    assert (env.name, env.height, env.width, env.boxes) == ("sokoban", 7, 8, 2)
    assert found.unsupported == ()
    (bandit,) = converted(tmp_path, "ragen", {"env": {"name": "two_armed_bandit", "env_kwargs": {}}}).unsupported
    assert str(Capability.ENV_VARIANTS) in bandit.message


def test_one_episode_of_a_start_state_has_its_reward_as_advantage(tmp_path: Path) -> None:
    found = converted(
        tmp_path,
        "ragen",
        {"training": {"n_rollout": 1, "ppo_batch_size": 8}, "optimization": {"adv_estimator": "grpo"}},
    )
    assert natively(found, "algorithm.advantage.name") == "arpo"
