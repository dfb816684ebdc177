#!/usr/bin/env bash
set -x
export CUDA_DEVICE_MAX_CONNECTIONS=1

NNODES=${NNODES:-2}
project_name='verl_megatron_gsm8k'
exp_name='deepseek_llm_7b'
ckpts_dir="/mnt/checkpoints/${project_name}/${exp_name}"

python3 -m verl.trainer.main_ppo \
    actor_rollout_ref.actor.strategy=megatron \
    critic.strategy=megatron \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_penalty=kl \
    algorithm.kl_ctrl.type=adaptive \
    algorithm.kl_ctrl.kl_coef=0.001 \
    algorithm.kl_ctrl.target_kl=0.05 \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.shuffle=True \
    actor_rollout_ref.actor.data_loader_seed=42 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.clip_grad=1.0 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.lr_decay_style=cosine \
    actor_rollout_ref.actor.optim.lr_decay_steps=300 \
    actor_rollout_ref.actor.optim.min_lr=1e-7 \
    actor_rollout_ref.actor.optim.weight_decay=0.01 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.load_format=dummy_megatron \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
    critic.model.path=deepseek-ai/deepseek-llm-7b-chat \
    critic.optim.lr=1e-5 \
    critic.optim.lr_warmup_steps=20 \
    critic.ppo_micro_batch_size_per_gpu=4 \
    trainer.critic_warmup=5 \
    trainer.logger=['console','wandb'] \
    trainer.project_name=$project_name \
    trainer.experiment_name=$exp_name \
    trainer.default_local_dir=$ckpts_dir \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=$NNODES \
    trainer.save_freq=100 \
    trainer.test_freq=20 \
    trainer.total_epochs=30 $@
