set -x

model=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
prompts=${PROMPTS:-$HOME/data/math/test.parquet}
responses=${RESPONSES:-$HOME/results/math/Qwen2.5-7B-Instruct.parquet}

python3 -m verl.trainer.main_generation \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    data.path=$prompts \
    data.prompt_key=prompt \
    data.n_samples=8 \
    data.batch_size=256 \
    data.output_path=$responses \
    model.path=$model \
    rollout.name=vllm \
    rollout.temperature=0.6 \
    rollout.top_p=0.95 \
    rollout.top_k=20 \
    rollout.prompt_length=1024 \
    rollout.response_length=8192 \
    rollout.tensor_model_parallel_size=2 \
    rollout.gpu_memory_utilization=0.85 "$@"
