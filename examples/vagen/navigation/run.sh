#!/bin/bash
set -x

SCRIPT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-VL-3B-Instruct}
EXPERIMENT_NAME=navigation-turn_wise_gae
TRAIN=data/navigation/train.parquet
TEST=data/navigation/test.parquet

python -m vagen.env.create_dataset --yaml_path "$SCRIPT_DIR/env_config.yaml" --train_path $TRAIN --test_path $TEST

python3 -m vagen.trainer.main_ppo \
    algorithm.adv_estimator=turn_wise_gae \
    algorithm.high_level_gamma=1.0 \
    algorithm.kl_ctrl.kl_coef=0.001 \
    data.train_files=$TRAIN \
    data.val_files=$TEST \
    data.train_batch_size=12 \
    data.max_prompt_length=1024 \
    data.max_response_length=256 \
    data.max_trajectory_length=6000 \
    data.image_key=images \
    data.truncation=left \
    actor_rollout_ref.model.path=$MODEL_PATH \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.ppo_mini_batch_size=24 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.entropy_coeff=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.3 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    critic.optim.lr=1e-5 \
    critic.model.path=$MODEL_PATH \
    critic.ppo_micro_batch_size_per_gpu=1 \
    critic.model.fsdp_config.param_offload=True \
    trainer.logger=['console','wandb'] \
    trainer.project_name=vagen_navigation \
    trainer.experiment_name=$EXPERIMENT_NAME \
    trainer.n_gpus_per_node=4 \
    trainer.nnodes=1 \
    trainer.save_freq=-1 \
    trainer.test_freq=20 \
    trainer.total_training_steps=100 \
    rollout_manager.max_turns=4 \
    rollout_manager.window_size=4 \
    rollout_manager.use_multi_turn_reward=True \
    rollout_manager.n_trajectory=8 "$@"
