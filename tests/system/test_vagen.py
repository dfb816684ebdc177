"""If these fail, VAGEN's scripts and files of start states do not train here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

Command = Any
Serve = Any
SCRIPT = """\
set -x
read -p "Enter port number (default: 5000): " PORT_INPUT
PORT=${PORT_INPUT:-5000}
SCRIPT_DIR="$( cd "$( dirname "${BASH_SOURCE[0]}" )" && pwd )"
EXPERIMENT_NAME=$(echo $SCRIPT_DIR | rev | cut -d'/' -f1-2 | rev | tr '/' '-')
python -m vagen.env.create_dataset \\
    --yaml_path "$SCRIPT_DIR/env_config.yaml" \\
    --train_path "data/$EXPERIMENT_NAME/train.parquet" \\
    --test_path "data/$EXPERIMENT_NAME/test.parquet" \\

python3 -m vagen.trainer.main_ppo \\
    algorithm.adv_estimator=bi_level_gae \\
    algorithm.high_level_gamma=0.95 \\
    algorithm.kl_ctrl.kl_coef=0.001 \\
    data.train_files=data/$EXPERIMENT_NAME/train.parquet \\
    data.val_files=data/$EXPERIMENT_NAME/test.parquet \\
    data.train_batch_size=4 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=24 \\
    data.max_trajectory_length=2000 \\
    data.truncation=left \\
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\
    actor_rollout_ref.actor.grad_norm_threshold=1000 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-3B-Instruct \\
    critic.model.path=Qwen/Qwen2.5-VL-3B-Instruct \\
    trainer.logger=['console'] \\
    trainer.experiment_name=$EXPERIMENT_NAME \\
    trainer.n_gpus_per_node=4 \\
    trainer.total_training_steps=300 \\
    trainer.val_before_train=False \\
    trainer.val_generations_to_log_to_wandb=0 \\
    rollout_manager.max_turns=2 \\
    rollout_manager.window_size=5 \\
    rollout_manager.use_multi_turn_reward=True \\
    rollout_manager.use_loss_mask=True \\
    rollout_manager.use_gae_mask=True \\
    rollout_manager.n_trajectory=2 \\
    2>&1 | tee $EXPERIMENT_NAME.log
"""
ENVS = """\
env1:
    env_name: sokoban
    env_config:
        render_mode: MODE
        prompt_format: grounding_worldmodeling
        use_state_reward: True
    train_size: 6
    test_size: 3
env2:
    env_name: frozenlake
    env_config:
        render_mode: MODE
        prompt_format: grounding_worldmodeling
        use_state_reward: True
    train_size: 3
    test_size: 2
"""
REFERENCE = """\
algorithm.adv_estimator=bi_level_gae
algorithm.high_level_gamma=1.0
algorithm.kl_ctrl.kl_coef=0.001
data.train_files=data/svg-vision-debug/train.parquet
data.val_files=data/svg-vision-debug/test.parquet
data.train_batch_size=16
data.max_prompt_length=1024
data.max_response_length=648
data.max_trajectory_length=1800
data.image_key=images
data.truncation=error
actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-3B-Instruct
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=32
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=mse
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.2
actor_rollout_ref.rollout.enable_chunked_prefill=False
actor_rollout_ref.rollout.enforce_eager=False
actor_rollout_ref.rollout.free_cache_engine=False
actor_rollout_ref.rollout.n=1
actor_rollout_ref.rollout.top_p=0.95
actor_rollout_ref.rollout.temperature=0.7
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1
actor_rollout_ref.ref.fsdp_config.param_offload=True
critic.optim.lr=1e-5
critic.ppo_micro_batch_size_per_gpu=1
critic.model.use_remove_padding=True
critic.model.path=Qwen/Qwen2.5-VL-3B-Instruct
critic.model.enable_gradient_checkpointing=True
critic.model.fsdp_config.param_offload=False
critic.model.fsdp_config.optimizer_offload=False
trainer.critic_warmup=0
trainer.logger=['console','wandb']
trainer.project_name='vagen_new'
trainer.experiment_name='trico_svg_vision_service'
trainer.n_gpus_per_node=4
trainer.nnodes=1
trainer.save_freq=70
trainer.test_freq=20
trainer.total_training_steps=300
trainer.val_before_train=True
trainer.val_generations_to_log_to_wandb=8
rollout_manager.max_turns=2
rollout_manager.window_size=3
rollout_manager.use_multi_turn_reward=False
rollout_manager.use_loss_mask=True
rollout_manager.use_gae_mask=True
rollout_manager.n_trajectory=8
"""
"""The overrides of VAGEN's documentation."""
REFERENCE_ENV = """\
env1:
    env_name: frozenlake
    env_config:
        render_mode: text
    train_size: 10000
    test_size: 512
"""
HERE = (
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
)
"""Settings of a small machine in place of those of scripts."""


def made_model(quintet: Command, directory: Path, *overrides: str) -> list[str]:
    """Create a tiny model and return the keys that name it."""
    brief = ("warm_start.episodes=4", "warm_start.updates=1", "rollout.max_turns=2", "validation.episodes=1")
    quintet("train", "small.yaml", "validation.only=true", "name=made", *brief, *overrides)
    path = directory / "runs/made/checkpoints/global_step_0/hf"
    return [f"{model}.model.path={path}" for model in ("actor_rollout_ref", "critic")]


def training_metrics(directory: Path) -> list[dict[str, Any]]:
    (metrics,) = directory.glob("checkpoints/*/*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


VISION = ("policy.preset=grid-vl", "env.render=vision", "env.tile_size=8")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("mode", "overrides"), [("text", ()), ("vision", VISION)])
def test_a_script_trains_on_the_rows_of_its_files(
    quintet: Command, tmp_path: Path, mode: str, overrides: tuple[str, ...]
) -> None:
    models = made_model(quintet, tmp_path, *overrides)
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "env_config.yaml").write_text(ENVS.replace("MODE", mode))
    name = "-".join(tmp_path.parts[-2:])
    quintet("data", "envs", "env_config.yaml", f"data/{name}")
    quintet("train", "run.sh", *models, *HERE, "trainer.val_before_train=True")
    steps = training_metrics(tmp_path)
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert {"critic/vf_loss", "actor/reward_kl_penalty", "train/env1/groups"} <= steps[1].keys()
    assert (
        sum(line["train/env1/groups"] for line in steps[1:])
        + sum(line.get("train/env2/groups", 0) for line in steps[1:])
        == 8
    )
    (validation,) = tmp_path.glob("checkpoints/*/*/trajectories/validation/step_000000.jsonl")
    seeds = [(episode["env"], episode["seed"]) for episode in map(json.loads, validation.read_text().splitlines())]
    assert seeds == [("env1", 1), ("env1", 4), ("env1", 7), ("env2", 1), ("env2", 4)]


@pytest.mark.usefixtures("small")
def test_the_overrides_of_the_documentation_train_on_images_of_a_service(
    quintet: Command, serve: Serve, tmp_path: Path
) -> None:
    models = made_model(quintet, tmp_path, *VISION)
    (tmp_path / "overrides.txt").write_text(REFERENCE)
    (tmp_path / "env_config.yaml").write_text(REFERENCE_ENV)
    _, url = serve("--env", "frozenlake", "--workers", "1")
    service = ("rollout_manager.use_service=True", f"rollout_manager.base_url={url}")
    sizes = (
        "data.train_batch_size=2",
        "data.max_response_length=16",
        "rollout_manager.n_trajectory=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.val_before_train=False",
    )
    quintet("train", "overrides.txt", *models, *HERE, *service, *sizes, "env1.env_config.render_mode=vision")
    steps = training_metrics(tmp_path)
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["num_turns/max"] == 2 and math.isfinite(line["critic/vf_loss"]) for line in steps)
