"""Defaults of keys that a file leaves out: those of its release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign import converted, natively

from quintet.cli.configuration import inspect_config
from quintet.config.dialects.composition.foreign_config import compose_config, config_from_tree
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.loader import convert, merge_with_reference
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.release_defaults import spec_of_release
from quintet.config.dialects.release_tables import ReleaseEvidence
from quintet.config.dialects.value_types import parse_type
from quintet.config.dotted import unflatten
from quintet.errors import ConfigError

GRPO = {"actor_rollout_ref.model.path": "model", "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}
TUNING = {"model.partial_pretrain": "model"}
VAGEN = {"env1.env_name": "sokoban", "actor_rollout_ref.actor.use_kl_loss": False}
LISTED = {"train_envs.lake.name": "FrozenLake"}
AGENTS = {"agent_proxy.max_turn": 5}
ROLL = {"pretrain": "model", "rewards.math_rule.tag_included": ["math"]}
MATH, ROBOTS = {"runner.task_type": "math"}, {"runner.task_type": "embodied"}
DEFAULTS = [
    ("verl", GRPO | {"algorithm.use_kl_in_reward": True}, "algorithm.kl_ctrl.kl_coef", 0.001),
    ("verl", GRPO, "trainer.test_freq", -1),
    ("verl", GRPO | {"actor_rollout_ref.actor.clip_ratio": 0.3}, "actor_rollout_ref.actor.clip_ratio_low", 0.2),
    ("verl", GRPO | {"actor_rollout_ref.actor.clip_ratio": 0.3}, "actor_rollout_ref.actor.clip_ratio_high", 0.2),
    ("verl", TUNING, "trainer.total_epochs", 4),
    ("verl", TUNING, "data.train_batch_size", 256),
    ("verl", TUNING, "data.prompt_key", "question"),
    ("verl", TUNING, "data.response_key", "answer"),
    # vagen/trainer/config/ppo_trainer.yaml of b6e0b38, 25.6.28
    ("vagen", VAGEN, "actor_rollout_ref.rollout.temperature", 1.0),
    ("vagen", VAGEN, "actor_rollout_ref.rollout.top_p", 1),
    ("vagen", VAGEN, "trainer.total_training_steps", None),
    ("vagen", VAGEN, "rollout_manager.max_turns", 5),
    ("vagen", VAGEN, "rollout_manager.n_trajectory", 1),
    ("vagen", VAGEN, "rollout_manager.window_size", 5),
    ("vagen", VAGEN, "data.max_prompt_length", 512),
    ("vagen", VAGEN, "data.max_response_length", 512),
    ("vagen", VAGEN, "data.max_trajectory_length", 3072),
    ("vagen", VAGEN, "data.train_batch_size", 1024),
    ("vagen", VAGEN, "actor_rollout_ref.actor.ppo_mini_batch_size", 256),
    ("vagen", VAGEN, "actor_rollout_ref.actor.entropy_coeff", 0.001),
    ("vagen", VAGEN, "trainer.save_freq", -1),
    ("vagen", VAGEN, "trainer.test_freq", -1),
    # vagen/configs/vagen_multiturn.yaml of 2936322, 2026-07-23, and ppo_trainer.yaml of verl 0.6.1 beneath
    ("vagen", LISTED, "data.train_batch_size", 128),
    ("vagen", LISTED, "data.max_prompt_length", 9000),
    ("vagen", LISTED, "data.max_response_length", 8000),
    ("vagen", LISTED, "trainer.test_freq", -1),
    # config/base.yaml of 20daedc, 2026-04-14
    ("ragen", AGENTS, "es_manager.train.env_configs.tags", ["CoordSokoban"]),
    ("ragen", AGENTS, "custom_envs.CoordSokoban.env_config.observation_format", "grid_coord"),
    ("ragen", AGENTS, "es_manager.val.env_groups", 512),
    ("ragen", AGENTS, "agent_proxy.max_actions_per_turn", 2),
    # config/base.yaml of ce7b924, 2025-03-08
    ("ragen", {"training.n_rollout": 16}, "optimization.adv_estimator", "gae"),
    # roll/configs of 7f9d4d38, 0.3.0
    ("roll", ROLL, "num_return_sequences_in_group", 1),
    ("roll", ROLL, "rollout_batch_size", 128),
    ("roll", ROLL, "prompt_length", 1024),
    ("roll", ROLL, "actor_train.training_args.learning_rate", 5e-5),
    ("roll", ROLL, "actor_train.training_args.per_device_train_batch_size", 8),
    ("roll", ROLL, "actor_train.training_args.gradient_accumulation_steps", 1),
    ("roll", ROLL, "actor_infer.generating_args.temperature", 0.95),
    ("roll", ROLL, "actor_train.training_args.warmup_ratio", 0.0),
    ("roll", ROLL, "loss_agg_mode", "seq-mean-token-mean"),
    # `cfg.get` in rlinf/config.py and in workers of v0.3, which are the same in 0.1
    ("rlinf", MATH, "algorithm.clip_ratio_c", 3.0),
    ("rlinf", MATH, "algorithm.n_minibatches", 1),
    ("rlinf", MATH, "actor.optim.weight_decay", 0.01),
    ("rlinf", MATH, "actor.fsdp_config.sharding_strategy", "full_shard"),
    ("rlinf", ROBOTS, "algorithm.value_clip", None),
    ("rlinf", ROBOTS, "actor.enable_offload", False),
    ("rlinf", ROBOTS, "rollout.enable_offload", False),
    ("rlinf", ROBOTS, "actor.optim.adam_eps", 1e-8),
]
"""Values in the framework's own files at the newest release with these keys."""


def default(framework: str, keys: dict[str, Any], key: str, release: str | None = None) -> Any:
    """The value of a key that a file with these keys leaves out."""
    config = config_from_tree(unflatten(keys), "given.yaml:1")
    object.__setattr__(config, "evidence", ReleaseEvidence(named=release))
    return merge_with_reference(config, DIALECTS[framework])[0][key]


@pytest.mark.parametrize(("framework", "keys", "key", "value"), DEFAULTS)
def test_a_key_that_is_left_out_has_another_value_than_in_the_framework(
    framework: str, keys: dict[str, Any], key: str, value: Any
) -> None:
    assert default(framework, keys, key) == value


@pytest.mark.parametrize(
    ("release", "key", "value"),
    [
        ("0.1", "actor_rollout_ref.actor.entropy_coeff", 0.001),
        ("0.3.0", "actor_rollout_ref.actor.entropy_coeff", 0.001),
        ("0.4", "actor_rollout_ref.actor.entropy_coeff", 0),
        ("0.1", "trainer.test_freq", 2),
        ("0.3.0", "actor_rollout_ref.actor.clip_ratio_low", "${actor_rollout_ref.actor.clip_ratio}"),
    ],
)
def test_a_named_release_does_not_decide_the_defaults(release: str, key: str, value: Any) -> None:
    expected = 0.3 if isinstance(value, str) else value
    keys = GRPO | {"actor_rollout_ref.actor.clip_ratio": 0.3}
    assert default("verl", keys, key, release) == expected


@pytest.mark.parametrize(
    ("framework", "keys", "release", "key", "value"),
    [
        # config/base.yaml of 5eb79b8
        ("ragen", AGENTS, "2025-09", "es_manager.val.env_groups", 256),
        ("ragen", AGENTS, "2025-09", "agent_proxy.max_actions_per_turn", 5),
        ("ragen", AGENTS, "2025-09", "actor_rollout_ref.rollout.rollout_filter_ratio", 0.25),
        # config/base.yaml of a69f8a5, which has no filter and one clip ratio
        ("ragen", AGENTS, "2025-04-14", "actor_rollout_ref.rollout.rollout_filter_ratio", 1.0),
        ("ragen", AGENTS, "2025-04-14", "actor_rollout_ref.actor.clip_ratio_high", 0.2),
        ("ragen", AGENTS, "2025-04-14", "actor_rollout_ref.actor.clip_ratio_c", None),
        ("ragen", AGENTS, "2025-04-14", "es_manager.val.env_groups", 128),
        # vagen/configs/vagen_multiturn.yaml of ed6b765
        ("vagen", LISTED, "26.2.5", "data.train_batch_size", 256),
        ("vagen", LISTED, "26.2.5", "trainer.max_actor_ckpt_to_keep", None),
        ("vagen", VAGEN, "25.3.25", "actor_rollout_ref.actor.grad_norm_threshold", None),
        ("vagen", VAGEN, "25.6.28", "actor_rollout_ref.actor.grad_norm_threshold", 1000),
        # roll/configs/training_args.py and roll/pipeline/base_config.py of 9eb672cf
        ("roll", ROLL, "0.1.0", "actor_train.training_args.warmup_ratio", 0.03),
        ("roll", ROLL, "v0.1.0", "loss_agg_mode", "seq-mean-token-sum"),
    ],
)
def test_a_named_release_of_another_framework_does_not_decide_the_defaults(
    framework: str, keys: dict[str, Any], release: str, key: str, value: Any
) -> None:
    assert default(framework, keys, key, release) == value


@pytest.mark.parametrize(
    ("framework", "keys", "valid"),
    [("ragen", AGENTS, "2025-09-06"), ("vagen", VAGEN, "25.6.28"), ("roll", ROLL, "0.2.1")],
)
def test_a_wrong_release_is_taken_for_another_or_valid_ones_are_not_named(
    framework: str, keys: dict[str, Any], valid: str
) -> None:
    with pytest.raises(ConfigError, match=f"--release 9.9: {framework} has no such release") as error:
        default(framework, keys, "seed", "9.9")
    assert valid in str(error.value.hint)


DOCUMENTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ragen": (
        {
            "training": {"train_batch_size": 8, "n_rollout": 16, "ppo_batch_size": 128, "max_turns": 5},
            "optimization": {"adv_estimator": "grpo", "kl_coef": 0.001, "actor_lr": 1e-6},
        },
        {
            "training.groups_per_step": 8,
            "training.samples_per_group": 16,
            "rollout.max_turns": 5,
            "algorithm.advantage.name": "grpo",
            "actor.optimizer.learning_rate": 1e-6,
        },
    ),
    "vagen": (
        {
            "env1": {"env_name": "svg"},
            "algorithm": {"adv_estimator": "bi_level_gae", "high_level_gamma": 1.0},
            "data": {"train_batch_size": 16, "max_trajectory_length": 1800, "max_response_length": 648},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 32}, "rollout": {"temperature": 0.7, "top_p": 0.95}},
            "trainer": {"total_training_steps": 300},
            "rollout_manager": {"max_turns": 2, "window_size": 3, "n_trajectory": 8},
        },
        {
            "training.groups_per_step": 16,
            "training.samples_per_group": 8,
            "training.mini_batches": 4,
            "training.steps": 300,
            "rollout.max_turns": 2,
            "rollout.window_size": 4,
            "rollout.max_prompt_tokens": 1152,
            "rollout.temperature": 0.7,
        },
    ),
    "roll": (
        {
            "rollout_batch_size": 64,
            "prompt_length": 2048,
            "response_length": 4096,
            "num_return_sequences_in_group": 8,
            "actor_train": {
                "training_args": {
                    "learning_rate": 1e-6,
                    "per_device_train_batch_size": 1,
                    "gradient_accumulation_steps": 32,
                    "warmup_steps": 20,
                },
                "data_args": {"file_name": "train.json"},
                "device_mapping": "list(range(0,16))",
            },
            "actor_infer": {"generating_args": {"max_new_tokens": "${response_length}", "temperature": 0.99}},
        },
        {
            "training.groups_per_step": 64,
            "training.samples_per_group": 8,
            "training.mini_batches": 1,
            "rollout.max_prompt_tokens": 2048,
            "rollout.max_response_tokens": 4096,
            "rollout.temperature": 0.99,
            "actor.optimizer.warmup_steps": 20,
        },
    ),
}
"""Values of the reference documents, and what they are natively."""


@pytest.mark.parametrize("framework", DOCUMENTED)
def test_defaults_of_a_release_override_what_a_file_of_the_reference_document_says(
    tmp_path: Path, framework: str
) -> None:
    tree, expected = DOCUMENTED[framework]
    found = converted(tmp_path, framework, tree)
    assert {key: natively(found, key) for key in expected} == expected
    assert found.composed.release.startswith(f"{framework} ")


def test_early_files_without_a_kl_loss_have_no_kl_in_the_rewards(tmp_path: Path) -> None:
    """Until 0.3.0, verl subtracts KL × `kl_coef` from the rewards unless `use_kl_loss` is true."""
    early = {"actor_rollout_ref.actor.fsdp_config.grad_offload": False}
    found = converted(tmp_path, "verl", unflatten(GRPO | early))
    assert (natively(found, "algorithm.kl.apply_to"), natively(found, "algorithm.kl.coefficient")) == ("reward", 0.001)
    in_loss = converted(tmp_path, "verl", unflatten(GRPO | early | {"actor_rollout_ref.actor.use_kl_loss": True}))
    assert natively(in_loss, "algorithm.kl.apply_to") == "loss"
    newer = converted(tmp_path, "verl", unflatten(GRPO))
    assert newer.composed.experiment.algorithm.kl is None


def test_early_releases_have_a_dual_clip(tmp_path: Path) -> None:
    """verl has `clip_ratio_c`, and the bound, since 2025-04-02."""
    assert default("verl", GRPO, "actor_rollout_ref.actor.clip_ratio_c", "0.3") is None
    assert default("verl", GRPO, "actor_rollout_ref.actor.clip_ratio_c", "0.4") == 3.0


@pytest.mark.parametrize(
    ("release", "prompts", "changes", "batches"),
    [
        ("0.2", 64, {}, (1, None)),
        ("0.6", 64, {"actor_rollout_ref.actor.use_dynamic_bsz": True}, (1, None)),
        # 256 × 4 sequences, then the other 128 × 4
        ("0.6", 384, {}, (1, 1024)),
        ("0.6", 512, {}, (2, None)),
    ],
)
def test_mini_batches_that_a_release_takes_are_refused(
    tmp_path: Path, release: str, prompts: int, changes: dict[str, Any], batches: tuple[int, int | None]
) -> None:
    keys = GRPO | {"data.train_batch_size": prompts, "actor_rollout_ref.actor.ppo_mini_batch_size": 256} | changes
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(unflatten(keys)))

    def training(named: str) -> Any:
        config = compose_config(path, [], evidence=ReleaseEvidence(named=named))
        return convert(config, DIALECTS["verl"]).composed.experiment.training

    found = training(release)
    assert (found.mini_batches, found.mini_batch_sequences) == batches
    if prompts % 256:
        with pytest.raises(ConfigError, match="ppo_mini_batch_size = 256"):
            training("0.9")


def spec(key: str, value_type: str, default_value: Any, *aliases: str) -> KeySpec:
    return KeySpec(key=key, effect="", value_type=parse_type(value_type), default=default_value, aliases=aliases)


def test_a_default_refers_to_a_key_that_the_references_lack() -> None:
    table = {"a.size": "${.total}", "a.total": "${oc.select:b.rest,3}", "a.text": "${a.size}-x", "a.c": "${b.d}"}
    documented = {"a.size": "a.size", "b.d": "c.d"}
    assert spec_of_release(spec("a.size", "int", 1), table, documented).default == 3
    assert spec_of_release(spec("a.c", "int", 1), table, documented).default == "${c.d}"
    assert spec_of_release(spec("a.text", "text", "y"), table, documented).default == "${a.size}-x"


def test_null_under_the_documented_name_hides_the_value_under_the_releases_own() -> None:
    table = {"style": None, "type": "cosine"}
    key = spec("style", "text", "constant", "type")
    assert spec_of_release(key, table, {"style": "style", "type": "style"}).default == "cosine"


def test_a_default_of_another_type_replaces_the_documented_one() -> None:
    assert spec_of_release(spec("size", "int >= 1", 4), {"size": None}, {}).default == 4


def test_a_script_of_vagen_has_the_defaults_of_its_reference_document(tmp_path: Path) -> None:
    """`vagen/trainer/config/ppo_trainer.yaml` of 2025 has other values than VAGEN's page."""
    (tmp_path / "env_config.yaml").write_text("env1: {env_name: frozenlake, train_size: 256, test_size: 8}\n")
    script = tmp_path / "run.sh"
    words = "data.train_batch_size=256 rollout_manager.max_turns=3 actor_rollout_ref.model.path=model"
    script.write_text(f"python3 -m vagen.trainer.main_ppo {words} trainer.nnodes=1 trainer.n_gpus_per_node=8\n")
    found = inspect_config(str(script), [], None, "refuse").composed.experiment
    assert (found.rollout.temperature, found.rollout.top_p, found.algorithm.entropy_coefficient) == (1.0, 1.0, 0.001)
    assert found.algorithm.loss.model_dump()["clip_dual"] is None
    assert found.training.samples_per_group == 1


def test_a_default_share_of_warm_up_contradicts_steps_that_a_file_of_roll_sets() -> None:
    """Early releases warm up over 3 % of the steps; transformers reads that only without `warmup_steps`."""
    keys = ROLL | {"num_return_sequences_in_group": 8, "actor_train.training_args.warmup_steps": 20}
    config = config_from_tree(unflatten(keys))
    object.__setattr__(config, "evidence", ReleaseEvidence(named="0.1.0"))
    optimizer = convert(config, DIALECTS["roll"], to_plan=True).composed.experiment.actor.optimizer
    assert (optimizer.warmup_steps, optimizer.warmup_ratio) == (20, 0.0)
