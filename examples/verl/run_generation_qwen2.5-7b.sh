set -x

model=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
prompts=${PROMPTS:-$HOME/data/math/test.parquet}
responses=${RESPONSES:-$HOME/results/math/Qwen2.5-7B-Instruct.parquet}

python3 -m verl.trainer.main_generation_server \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    data.train_files=$prompts \
    data.prompt_key=prompt \
    +data.output_path=$responses \
    actor_rollout_ref.model.path=$model \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.load_format=auto \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=0.6 \
    actor_rollout_ref.rollout.top_p=0.95 \
    actor_rollout_ref.rollout.top_k=20 \
    actor_rollout_ref.rollout.prompt_length=1024 \
    actor_rollout_ref.rollout.response_length=8192 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.85 "$@"
