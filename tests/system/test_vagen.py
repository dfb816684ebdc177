"""If these fail, VAGEN's scripts and files of start states do not train here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

Command = Any
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
