"""If these fail, a run whose policy talks to a simulated user doesn't train, natively or from a configuration of
verl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Command = Any

NATIVE = """\
name: sums
env: {name: prompts}
policy: {preset: numbers-1m}
data: {train_files: train.jsonl, validation_files: train.jsonl, template: chatml}
rollout:
  interactions: {users: {gsm8k: {}}}
  max_turns: 3
  window_size: null
  max_prompt_tokens: 64
  max_response_tokens: 200
  async_ratio: 1.0
warm_start: {episodes: 16, updates: 30, turns_per_update: 16, until_success: null}
training: {steps: 2, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}
validation: {every_steps: 2}
tracking: {trajectories_every_steps: 1, loggers: [jsonl]}
"""
VERL = """\
set -x

PROJECT_DIR="$(pwd)"

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=512 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    data.return_raw_chat=True \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    +actor_rollout_ref.model.enable_activation_offload=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=512 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.multi_turn.enable=True \\
    actor_rollout_ref.rollout.multi_turn.max_user_turns=5 \\
    actor_rollout_ref.rollout.multi_turn.interaction_config_path="$PROJECT_DIR/interaction/gsm8k.yaml" \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \\
    actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \\
    trainer.critic_warmup=0 \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name='gsm8k_async_rl' \\
    trainer.experiment_name='qwen0.5b_function_rm-gsm8k-w-interaction' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=-1 \\
    trainer.test_freq=20 \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    trainer.total_epochs=15 $@
"""
SMALL = [
    *("data.train_files=train.jsonl", "data.val_files=train.jsonl", "data.train_batch_size=4"),
    *("data.max_prompt_length=96", "data.max_response_length=300", "actor_rollout_ref.model.path=policy"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.name=hf"),
    *("actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.rollout.n=4", "trainer.logger=[console]"),
    *("trainer.n_gpus_per_node=1", "trainer.total_training_steps=2", "trainer.test_freq=2"),
    *("trainer.default_local_dir=runs/verl", "trainer.experiment_name=verl"),
]
USERS = """\
interaction:
  - name: "gsm8k"
    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
"""


def rows(path: Path) -> None:
    """Rows as verl's preprocessing of GSM8K for this interaction writes them."""
    lines = [
        {
            "data_source": "openai/gsm8k",
            "agent_name": "tool_agent",
            "prompt": [{"role": "user", "content": f"{a}+{b}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"interaction_kwargs": {"name": "gsm8k", "query": "", "ground_truth": str(a + b)}},
            "response": f"#### {a + b if a % 2 else a}",
        }
        for a in range(1, 5)
        for b in range(1, 5)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_policy_answers_again_after_a_user_natively_and_as_under_verl(quintet: Command, tmp_path: Path) -> None:
    rows(tmp_path / "train.jsonl")
    (tmp_path / "sums.yaml").write_text(NATIVE)
    quintet("train", "sums.yaml")
    run = tmp_path / "runs/sums"
    lines = metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["interaction/replies"] > 0 for line in lines[1:])
    played = [json.loads(line) for line in (run / "trajectories/validation/step_000002.jsonl").open()]
    observations = [turn["observation"] for episode in played for turn in episode["turns"][1:]]
    assert "Your response is incorrect! You need to reflect on your answer and try again." in observations
    (run / "checkpoints/global_step_2/hf").rename(tmp_path / "policy")
    (tmp_path / "run.sh").write_text(VERL)
    (tmp_path / "interaction").mkdir()
    (tmp_path / "interaction/gsm8k.yaml").write_text(USERS)
    quintet("train", "run.sh", *SMALL)
    lines = metrics(tmp_path / "runs/verl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["interaction/replies"] > 0 for line in lines[1:])
