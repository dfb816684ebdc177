"""If these fail, one of verl's most used scripts does not train here: model, data, devices and sizes are small,
everything else is as in verl's examples."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import warm_processes
import yaml
from safetensors.torch import load_file
from torch import Tensor

from quintet.config.dotted import flatten
from quintet.policies.tiny_models import create_preset_policy

ACTOR, MODEL, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "ref", "rollout"))
ONE = [sys.executable, "-m", "quintet"]
TWO = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "quintet"]

DATA = """\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
"""
TRAINER = """\
    algorithm.use_kl_in_reward=False \\
    trainer.critic_warmup=0 \\
    trainer.logger='["console","wandb"]' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=20 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15 $@
"""
FSDP = f"""\
    {MODEL}.use_remove_padding=True \\
    {MODEL}.enable_gradient_checkpointing=True \\
    {ACTOR}.fsdp_config.param_offload=False \\
    {ACTOR}.fsdp_config.optimizer_offload=False \\
"""
KL_LOSS = f"""\
    {ACTOR}.use_kl_loss=True \\
    {ACTOR}.kl_loss_coef=0.001 \\
    {ACTOR}.kl_loss_type=low_var_kl \\
    {ACTOR}.entropy_coeff=0 \\
    {REF}.log_prob_micro_batch_size_per_gpu=40 \\
    {REF}.fsdp_config.param_offload=True \\
"""
ENGINE = f"""\
    {ROLLOUT}.name=vllm \\
    {ROLLOUT}.tensor_model_parallel_size=2 \\
    {ROLLOUT}.gpu_memory_utilization=0.6 \\
    {ROLLOUT}.log_prob_micro_batch_size_per_gpu=40 \\
"""
GRPO = f"""\
set -x


python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    {MODEL}.path=Qwen/Qwen2-7B-Instruct \\
    {ACTOR}.optim.lr=1e-6 \\
    {ACTOR}.ppo_mini_batch_size=256 \\
    {ACTOR}.ppo_micro_batch_size_per_gpu=40 \\
    {ROLLOUT}.n=5 \\
    trainer.project_name='verl_grpo_example_gsm8k' \\
    trainer.experiment_name='qwen2_7b_function_rm' \\
{DATA}{FSDP}{KL_LOSS}{ENGINE}{TRAINER}"""
LORA = f"""\
set -x

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    trainer.val_before_train=False \\
    data.train_batch_size=16 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    data.shuffle=False \\
    {MODEL}.path=Qwen/Qwen2.5-3B-Instruct \\
    {MODEL}.lora_rank=64 \\
    {MODEL}.lora_alpha=32 \\
    {ACTOR}.optim.lr=3e-6 \\
    {ACTOR}.ppo_mini_batch_size=16 \\
    {ACTOR}.ppo_micro_batch_size_per_gpu=40 \\
    {ROLLOUT}.n=5 \\
    {ROLLOUT}.load_format=safetensors \\
    {ROLLOUT}.layered_summon=True \\
    trainer.project_name='verl_grpo_example_gsm8k' \\
    trainer.experiment_name='qwen2.5_3b_grpo_lora' \\
{DATA}{FSDP}{KL_LOSS}{ENGINE}{TRAINER}"""
PPO = f"""\
set -x

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=gae \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=512 \\
    {MODEL}.path=deepseek-ai/deepseek-llm-7b-chat \\
    {ACTOR}.optim.lr=1e-6 \\
    {ACTOR}.ppo_mini_batch_size=256 \\
    {ACTOR}.ppo_micro_batch_size_per_gpu=16 \\
    {ACTOR}.use_kl_loss=False \\
    critic.optim.lr=1e-5 \\
    critic.model.use_remove_padding=True \\
    critic.model.path=deepseek-ai/deepseek-llm-7b-chat \\
    critic.model.enable_gradient_checkpointing=True \\
    critic.ppo_micro_batch_size_per_gpu=32 \\
    critic.model.fsdp_config.param_offload=False \\
    critic.model.fsdp_config.optimizer_offload=False \\
    trainer.use_legacy_worker_impl=auto \\
    trainer.project_name='verl_example_gsm8k' \\
    trainer.experiment_name='deepseek_llm_7b_function_rm' \\
{DATA}{FSDP}{ENGINE}{TRAINER}"""
MEGATRON = f"""\
set -x

export CUDA_DEVICE_MAX_CONNECTIONS=1 # For megatron communication/computation overlapping

gsm8k_train_path=$HOME/data/gsm8k/train.parquet
gsm8k_test_path=$HOME/data/gsm8k/test.parquet

train_files="['$gsm8k_train_path']"
test_files="['$gsm8k_test_path']"

python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml'\\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train_files" \\
    data.val_files="$test_files" \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    {MODEL}.path=Qwen/Qwen2-7B-Instruct \\
    {ACTOR}.optim.lr=1e-6 \\
    {ACTOR}.ppo_mini_batch_size=256 \\
    {ACTOR}.ppo_micro_batch_size_per_gpu=4 \\
    {ACTOR}.megatron.pipeline_model_parallel_size=2 \\
    {ACTOR}.megatron.tensor_model_parallel_size=2 \\
    {ACTOR}.use_kl_loss=True \\
    {ACTOR}.kl_loss_coef=0.001 \\
    {ACTOR}.kl_loss_type=low_var_kl \\
    {ACTOR}.entropy_coeff=0 \\
    {REF}.log_prob_micro_batch_size_per_gpu=4 \\
    {REF}.megatron.pipeline_model_parallel_size=2 \\
    {REF}.megatron.tensor_model_parallel_size=2 \\
    {ROLLOUT}.name=vllm \\
    {ROLLOUT}.tensor_model_parallel_size=2 \\
    {ROLLOUT}.gpu_memory_utilization=0.6 \\
    {ROLLOUT}.log_prob_micro_batch_size_per_gpu=4 \\
    {ROLLOUT}.n=5 \\
    trainer.project_name='verl_grpo_example_gsm8k_math' \\
    trainer.experiment_name='qwen2_7b_megatron' \\
{TRAINER}"""

SMALL = [
    "data.train_files=train.jsonl",
    "data.val_files=test.jsonl",
    "data.train_batch_size=8",
    "data.max_prompt_length=64",
    "data.max_response_length=8",
    f"{MODEL}.path=policy",
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    f"{ROLLOUT}.name=hf",
    f"{ROLLOUT}.dtype=float32",
    "trainer.logger=['console']",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "trainer.default_local_dir=runs",
    "custom_reward_function.path=score.py",
]
SCORE = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 10
"""
"""Rewards of a model with random weights differ, so that it has something to learn."""


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with random weights, and rows as verl's preprocessing of GSM8K writes them."""
    # verl has no key for it, and two threads wait for each other in steps as small as these
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n} + 1 = ? Output the final answer after '####'."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": "train", "index": n, "answer": f"#### {n + 1}", "question": f"{n} + 1 = ?"},
        }
        for n in range(20)
    ]
    create_preset_policy("numbers-1m", tmp_path / "policy", map(json.dumps, rows), 0)
    for name, some in (("train", rows[:16]), ("test", rows[16:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    (tmp_path / "score.py").write_text(SCORE)
    return tmp_path


class Trained(NamedTuple):
    """What a run of a script left."""

    metrics: dict[int, dict[str, float]]
    """By step."""
    settings: dict[str, Any]
    """Dotted native keys."""
    sources: str
    """The same as text, with the place that set each key."""
    weights: dict[str, Tensor]
    trained_from: dict[str, Tensor]


def trained(workdir: Path, script: str, *overrides: str, command: list[str] = ONE) -> Trained:
    (workdir / "run.sh").write_text(script)
    overrides = ("train", "run.sh", *SMALL, *overrides)
    done = warm_processes.run([*command, *overrides], cwd=workdir, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "run.sh: a configuration of verl" in done.stderr
    (run,) = (path.parent for path in workdir.glob("runs/*/metrics.jsonl"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    text = (run / "config.yaml").read_text()
    weights = load_file(run / "checkpoints/global_step_2/hf/model.safetensors")
    metrics = {line["step"]: line for line in lines}
    return Trained(
        metrics, flatten(yaml.safe_load(text)), text, weights, load_file(workdir / "policy/model.safetensors")
    )


def changed_weights(run: Trained) -> set[str]:
    return {name for name, weight in run.trained_from.items() if not torch.equal(weight, run.weights[name])}


def test_grpo_on_gsm8k_trains(workdir: Path) -> None:
    """verl's `grpo_trainer/run_qwen2-7b.sh`."""
    run = trained(workdir, GRPO)
    assert list(run.metrics) == [0, 1, 2]
    assert "val-core/openai/gsm8k/acc/mean@1" in run.metrics[0]
    assert "val-core/openai/gsm8k/acc/mean@1" not in run.metrics[1]
    assert all(run.metrics[step]["actor/grad_norm"] > 1e-3 for step in (1, 2))
    assert run.metrics[2]["actor/kl_loss"] > 0, "the policy has moved away from the reference"
    assert "critic/vf_loss" not in run.metrics[1]
    assert "model.embed_tokens.weight" in changed_weights(run)
    expected = {
        "training.groups_per_step": 8,
        "training.samples_per_group": 5,
        "training.mini_batches": 2,
        "actor.optimizer.learning_rate": 1e-6,
        "actor.gradient_checkpointing": True,
        "actor.memory.remove_padding": True,
        "actor.inference_budget.sequences": 40,
        "algorithm.advantage.name": "grpo",
        "algorithm.kl.apply_to": "loss",
        "algorithm.kl.coefficient": 0.001,
        "algorithm.kl.estimator": "k3",
        "algorithm.entropy_coefficient": 0.0,
        "reference.memory.offload_parameters": True,
        "data.filter_long_prompts": True,
        "data.truncation": "error",
    }
    assert {key: run.settings[key] for key in expected} == expected
    assert "learning_rate: 1.0e-06  # actor_rollout_ref.actor.optim.lr: run.sh:10" in run.sources


def test_ppo_with_a_critic_trains(workdir: Path) -> None:
    """verl's `ppo_trainer/run_deepseek7b_llm.sh`."""
    run = trained(workdir, PPO, "critic.model.path=policy", "critic.ppo_micro_batch_size_per_gpu=4")
    assert list(run.metrics) == [0, 1, 2]
    for step in (1, 2):
        metrics = run.metrics[step]
        assert (metrics["actor/lr"], metrics["critic/lr"]) == (1e-6, 1e-5)
        assert min(metrics["actor/grad_norm"], metrics["critic/grad_norm"], metrics["critic/vf_loss"]) > 0
        assert "actor/kl_loss" not in metrics
    expected = {
        "training.samples_per_group": 1,
        "algorithm.advantage.name": "gae",
        "algorithm.kl": None,
        "critic.memory.remove_padding": True,
        "critic.budget.sequences": 4,
    }
    assert {key: run.settings[key] for key in expected} == expected


def test_grpo_of_adapters_trains(workdir: Path) -> None:
    """verl's `grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh`."""
    run = trained(workdir, LORA)
    assert list(run.metrics) == [1, 2], "val_before_train=False"
    assert all(run.metrics[step]["actor/lr"] == 3e-6 for step in (1, 2))
    assert run.metrics[2]["actor/kl_loss"] > 0
    changed = changed_weights(run)
    assert "model.layers.0.self_attn.q_proj.weight" in changed
    assert "model.embed_tokens.weight" not in changed, "only adapters are trained"
    expected = {"policy.lora.rank": 64, "policy.lora.alpha": 32.0, "data.shuffle": False}
    assert {key: run.settings[key] for key in expected} == expected


def test_grpo_on_megatron_trains_on_two_ranks(workdir: Path) -> None:
    """verl's `grpo_trainer/run_qwen2-7b_math_megatron.sh` without pipeline parallelism."""
    pytest.importorskip("megatron.core", reason="pip install -e '.[megatron]'")
    stages = [f"{section}.megatron.pipeline_model_parallel_size=1" for section in (ACTOR, REF)]
    run = trained(workdir, MEGATRON, *stages, "trainer.n_gpus_per_node=2", command=TWO)
    assert list(run.metrics) == [0, 1, 2]
    assert all(run.metrics[step]["actor/grad_norm"] > 1e-3 for step in (1, 2))
    assert run.metrics[2]["actor/kl_loss"] > 0
    assert "model.layers.0.self_attn.q_proj.weight" in changed_weights(run)
    expected = {
        "placement.devices_per_node": 2,
        "actor.backend": "megatron",
        "actor.parallel.tensor": 2,
        "actor.parallel.pipeline": 1,
        "reference.parallel.tensor": 2,
        "training.mini_batches": 2,
    }
    assert {key: run.settings[key] for key in expected} == expected


DISTILLATION = """\
DATA=(
    algorithm.adv_estimator=grpo
    data.shuffle=False
)
DISTILL=(
    distillation.enabled=True
    distillation.n_gpus_per_node=${TEACHER_WORLD_SIZE:-4}
    distillation.nnodes=1
    distillation.teacher_models.teacher_model.model_path="${TEACHER_MODEL:-Qwen/Qwen3-32B}"
    distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=${TEACHER_TP:-2}
    distillation.teacher_models.teacher_model.inference.name=vllm
    distillation.distillation_loss.loss_mode=k1
    distillation.distillation_loss.topk=64
    distillation.distillation_loss.use_task_rewards=False
    distillation.distillation_loss.use_policy_gradient=True
    distillation.distillation_loss.loss_max_clamp=10.0
    distillation.distillation_loss.log_prob_min_clamp=-10.0
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" "${DISTILL[@]}" trainer.experiment_name=distill "$@"
"""


def test_on_policy_distillation_trains_with_a_teacher_on_its_own_device(workdir: Path) -> None:
    """verl's `on_policy_distillation_trainer/run_qwen3_8b_fsdp.sh`."""
    rows = (workdir / "train.jsonl").read_text().splitlines()
    create_preset_policy("numbers-1m", workdir / "teacher", rows, 1)
    teacher = ["distillation.n_gpus_per_node=1", "distillation.teacher_models.teacher_model.model_path=teacher"]
    teacher += ["distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1"]
    budget, rate = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4", f"{ACTOR}.optim.lr=1e-3"
    run = trained(workdir, DISTILLATION, *teacher, budget, rate, f"{ROLLOUT}.n=4", command=TWO)
    assert all(run.metrics[step][name] > 1e-2 for step in (1, 2) for name in ("actor/teacher_kl", "actor/grad_norm"))
    assert run.settings["placement.reference.devices"] == [1]
    assert "model.embed_tokens.weight" in changed_weights(run)


TITAN = f"""\
TP_SIZE=${{TP_SIZE:-1}}
AC_MODE=${{AC_MODE:-selective}}

common_params=(
    model_engine=torchtitan
    algorithm.adv_estimator=grpo
    data.train_batch_size=256
    data.seed=42
    {MODEL}.use_remove_padding=True
    {ACTOR}.optim.lr=1e-6
    {ACTOR}.optim.min_lr_factor=1.0
    {ACTOR}.use_kl_loss=True
    {ACTOR}.torchtitan.data_parallel_shard_size=1
    {ACTOR}.torchtitan.tensor_parallel_size="${{TP_SIZE}}"
    {ACTOR}.torchtitan.attn_type=flex
    {ACTOR}.torchtitan.activation_checkpoint="${{AC_MODE}}"
    {ACTOR}.torchtitan.use_torch_compile=False
    {REF}.torchtitan.use_torch_compile=False
    {REF}.log_prob_micro_batch_size_per_gpu=4
    {ROLLOUT}.n=5
    trainer.project_name='verl_grpo_example_gsm8k'
    trainer.experiment_name=qwen3-0.6b-torchtitan
    trainer.n_gpus_per_node=1
)

python3 -m verl.trainer.main_ppo "${{common_params[@]}}" $@
"""
VEOMNI = f"""\
usp_size=${{usp_size:-1}}
ACTOR_VEOMNI_CONFIG="
    {ACTOR}.veomni.param_offload=True \\
    {ACTOR}.veomni.optimizer_offload=True \\
    {ACTOR}.veomni.enable_full_shard=True \\
    {ACTOR}.veomni.ulysses_parallel_size=$usp_size \\
    {ACTOR}.veomni.attn_implementation=flash_attention_2"

python -m verl.trainer.main_ppo --config-path=./config --config-name=ppo_trainer \\
    model_engine=veomni \\
    algorithm.adv_estimator=grpo \\
    {MODEL}.use_remove_padding=True \\
    {ACTOR}.optim.lr=1e-6 \\
    {ACTOR}.use_kl_loss=True \\
    {REF}.log_prob_micro_batch_size_per_gpu=4 \\
    {ROLLOUT}.n=5 \\
    $ACTOR_VEOMNI_CONFIG \\
    trainer.project_name=verl_grpo_qwen3_5_35b_a3b_geo3k \\
    trainer.experiment_name=qwen3_5_35b_a3b_veomni_sp2 \\
    trainer.n_gpus_per_node=8
"""


@pytest.mark.parametrize(
    ("script", "size", "native"),
    [
        (TITAN, f"{ACTOR}.torchtitan.tensor_parallel_size=2", "actor.parallel.tensor"),
        (VEOMNI, f"{ACTOR}.veomni.ulysses_parallel_size=2", "actor.parallel.ulysses"),
    ],
    ids=["torchtitan", "veomni"],
)
def test_grpo_on_another_training_engine_trains_on_two_ranks(
    workdir: Path, script: str, size: str, native: str
) -> None:
    """verl's scripts for TorchTitan, and `grpo_trainer/run_qwen3_5_35b_a3b_veomni.sh`, split over two ranks."""
    run = trained(workdir, script, size, "trainer.n_gpus_per_node=2", command=TWO)
    assert list(run.metrics) == [0, 1, 2]
    assert all(run.metrics[step]["actor/grad_norm"] > 1e-3 for step in (1, 2))
    assert run.metrics[2]["actor/kl_loss"] > 0
    assert "model.layers.0.self_attn.q_proj.weight" in changed_weights(run)
    assert (run.settings[native], run.settings[native.replace("actor", "reference")]) == (2, 2)
    assert "actor.backend" not in run.settings, "FSDP2 is the default"


ONE_STEP_OFF = GRPO.replace("verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo")
FULLY_ASYNC = GRPO.replace("verl.trainer.main_ppo", "verl.experimental.fully_async_policy.fully_async_main")
APART = ["trainer.n_gpus_per_node=1", "rollout.n_gpus_per_node=1"]


@pytest.mark.parametrize(
    ("script", "overrides", "groups", "ratio"),
    [
        (ONE_STEP_OFF, ["data.train_batch_size=8"], 8, 1.0),
        (
            FULLY_ASYNC,
            [
                *("data.train_batch_size=0", "async_training.require_batches=1", "async_training.partial_rollout=True"),
                *("async_training.trigger_parameter_sync_step=2", "async_training.staleness_threshold=0.5"),
            ],
            8,
            0.5,
        ),
    ],
    ids=["one step off", "fully async"],
)
def test_an_asynchronous_trainer_trains_with_an_engine_of_its_own_device(
    workdir: Path, script: str, overrides: list[str], groups: int, ratio: float
) -> None:
    run = trained(workdir, script, *APART, *overrides, command=TWO)
    assert list(run.metrics) == [0, 1, 2]
    assert all(run.metrics[step]["actor/grad_norm"] > 1e-3 for step in (1, 2))
    assert "model.embed_tokens.weight" in changed_weights(run)
    expected = {
        "placement.devices_per_node": 2,
        "placement.actor.devices": [0],
        "placement.rollout.devices": [1],
        "rollout.async_ratio": ratio,
        "rollout.recompute_logprobs": False,
        "training.groups_per_step": groups,
        "training.mini_batches": groups // 4,
    }
    assert {key: run.settings[key] for key in expected} == expected
