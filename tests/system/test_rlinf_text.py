"""If these fail, an RLinf user's file of mathematical reasoning does not train here: model, data, devices and sizes are
small, everything else is as in RLinf's example files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_processes

Command = Any
ROWS = [{"prompt": f"{n} + 1 =", "solutions": [f"\\boxed{{{n + 1}}}"]} for n in range(8)]
PROFILER = {
    "output_dir": "${runner.output_dir}/${runner.experiment_name}/profiler",
    "activities": ["cpu", "cuda"],
    "export_tensorboard": True,
    "schedule_warmup": 2,
}


def learner(rate: float) -> dict[str, Any]:
    """The section of a learner on Megatron; options that need GPUs or Transformer Engine are off."""
    return {
        "training_backend": "megatron",
        "mcore_gpt": True,
        "spec_name": "local_gpt",
        "offload_optimizer": False,
        "offload_weight": False,
        "offload_grad": False,
        "enable_dp_load_balance": False,
        "seed": 1234,
        "model": {
            "precision": "fp32",
            "add_bias_linear": False,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "activation": "swiglu",
            "sequence_parallel": False,
            "recompute_method": None,
            "recompute_granularity": None,
            "recompute_num_layers": None,
            "seq_length": "${runner.seq_length}",
            "normalization": "rmsnorm",
            "position_embedding_type": "rope",
            "apply_rope_fusion": False,
            "variable_seq_lengths": True,
        },
        "optim": {
            "optimizer": "adam",
            "bf16": False,
            "fp16": False,
            "lr": rate,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1.0e-05,
            "min_lr": 0.0,
            "weight_decay": 0.05,
            "use_distributed_optimizer": False,
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
            "loss_scale": 65536,
            "clip_grad": 1.0,
        },
        "lr_sched": {"lr_warmup_fraction": 0.0, "lr_warmup_iters": 0, "lr_decay_style": "constant"},
        "megatron": {
            "distributed_backend": "gloo",
            "ckpt_format": "torch",
            "use_hf_ckpt": True,
            "ckpt_convertor": {
                "model": "DeepSeek-R1-Distill-Qwen-1.5B",
                "model_type": None,
                "hf_model_path": "${rollout.model.model_path}",
                "save_path": "${runner.output_dir}/${runner.experiment_name}/converted",
                "use_gpu_num": 0,
                "process_num": 1,
            },
            "use_profiler": False,
            "profiler": PROFILER,
        },
    }


def reasoning(name: str, model: Path) -> dict[str, Any]:
    """A file such as RLinf's `math/qwen2.5-1.5b-grpo-megatron.yaml`."""
    tokenizer = {"use_fast": True, "trust_remote_code": False, "padding_side": "right"}
    actor = learner(2.0e-05)
    return {
        "hydra": {"run": {"dir": "."}, "output_subdir": None},
        "cluster": {"num_nodes": 1, "component_placement": {"actor,rollout,reward": "all"}},
        "runner": {
            "task_type": "reasoning",
            "logger": {
                "log_path": "${runner.output_dir}/${runner.experiment_name}",
                "experiment_name": "${runner.experiment_name}",
                "logger_backends": ["tensorboard"],
            },
            "max_epochs": 5,
            "max_steps": 2,
            "val_check_interval": -1,
            "save_interval": 50,
            "seq_length": 48,
            "resume_dir": None,
            "experiment_name": name,
            "output_dir": "results",
        },
        "algorithm": {
            "group_size": 2,
            "n_minibatches": 2,
            "training_batch_size_per_gpu": 1,
            "logprob_forward_micro_batch_size": 1,
            "recompute_logprobs": True,
            "shuffle_rollout": False,
            "loss_type": "actor",
            "loss_agg_func": "token-mean",
            "kl_beta": 0.0,
            "kl_penalty_type": "low_var_kl",
            "ratio_clip_eps": 0.2,
            "entropy_bonus": 0.0,
            "adv_type": "grpo",
            "normalize_advantages": True,
            "early_stop_imp_ratio": 5.0,
            "sampling_params": {"temperature": 1.0, "top_k": 1000000, "max_new_tokens": 8, "min_new_tokens": 0},
        },
        "rollout": {
            "group_name": "RolloutGroup",
            "model": {"model_path": str(model), "model_type": "qwen2.5", "precision": "${actor.model.precision}"},
            "return_logprobs": "${not:${algorithm.recompute_logprobs}}",
            "rollout_backend": "huggingface",
            "sglang": {"attention_backend": "triton", "decode_log_interval": 500000},
            "vllm": {"enable_prefix_caching": True, "enable_chunked_prefill": True, "torch_profiler_dir": None},
        },
        "data": {
            "type": "math",
            "dataset_name": "boba",
            "max_prompt_length": 32,
            "rollout_batch_size": 4,
            "prompt_key": "prompt",
            "answer_key": "solutions",
            "shuffle": True,
            "num_workers": 0,
            "seed": 1234,
            "train_data_paths": ["sums.jsonl"],
            "val_data_paths": ["sums.jsonl"],
        },
        "actor": {**actor, "tokenizer": {"tokenizer_model": str(model), **tokenizer}},
        "reward": {
            "group_name": "RewardGroup",
            "use_reward_model": False,
            "reward_type": "math",
            "reward_scale": 5.0,
            "tokenizer": {"tokenizer_model": "${actor.tokenizer.tokenizer_model}"},
        },
        "critic": {"use_critic_model": False},
    }


def on_fsdp(tree: dict[str, Any]) -> None:
    """Change a file to one such as `math/qwen2.5-1.5b-grpo-fsdp.yaml`."""
    model, optimizer = tree["rollout"]["model"]["model_path"], {"optimizer": "adam", "lr": 2.0e-05, "clip_grad": 1.0}
    dtypes = {f"{name}_dtype": "fp32" for name in ("param", "reduce", "buffer")}
    tree["actor"] = {
        "training_backend": "fsdp",
        "enable_offload": False,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "model": {"model_path": model, "model_type": "qwen2.5", "precision": "fp32", "is_lora": False},
        "optim": {**optimizer, "loss_scale": 65536},
        "tokenizer": tree["actor"]["tokenizer"],
        "fsdp_config": {"strategy": "fsdp2", "gradient_checkpointing": True, "mixed_precision": dtypes},
    }


def with_critic(tree: dict[str, Any]) -> None:
    """Change a file to one such as `math/qwen2.5-1.5b-ppo-megatron.yaml`."""
    tree["algorithm"] |= {"group_size": 1, "adv_type": "gae", "gamma": 1.0, "gae_lambda": 0.95}
    tree["algorithm"] |= {"critic_warmup_steps": 0, "value_clip": 0.2}
    tree["cluster"]["component_placement"] = {"actor,critic,rollout,reward": "all"}
    tree["critic"] = {"use_critic_model": True, "group_name": "CriticGroup", **learner(1.0e-05)}


def with_penalty(tree: dict[str, Any]) -> None:
    """Change a file to one such as `math/qwen2.5-1.5b-reinpp-megatron.yaml`."""
    tree["algorithm"] |= {"adv_type": "reinpp", "reinpp_kl_beta": 0.001, "use_reinpp_baseline": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that knows digits."""
    directory = tmp_path_factory.mktemp("model")
    overrides = ["policy.preset=numbers-1m", "data.train_files=sums/train.parquet", "env={name: prompts}", "name=made"]
    for command in (
        ["data", "make", "addition", "sums", "digits=1", "--train", "8", "--validation", "2"],
        ["sft", "sft={epochs: 1, batch: 8}", "tracking.loggers=[jsonl]", "training.threads=1", *overrides],
    ):
        command = [sys.executable, "-m", "quintet", *command]
        warm_processes.run(command, cwd=directory, check=True, capture_output=True, timeout=240)
    return directory / "runs/made/model"


RUNS: dict[str, tuple[Any, int, set[str]]] = {
    "grpo-megatron": (None, 8, set()),
    "grpo-fsdp": (on_fsdp, 8, set()),
    "ppo-megatron": (with_critic, 4, {"critic/vf_loss", "critic/grad_norm"}),
    "reinpp-megatron": (with_penalty, 8, {"actor/reward_kl_penalty"}),
}
"""Changes to the file, episodes of a step, and metrics that only such a run has."""


@pytest.mark.parametrize("name", RUNS)
def test_a_file_of_mathematical_reasoning_trains(
    quintet: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if "megatron" in name:
        pytest.importorskip("megatron.core", reason="pip install -e '.[megatron]'")
    tree = reasoning(name, model)
    change, episodes, metrics = RUNS[name]
    if change is not None:
        change(tree)
    (tmp_path / "file.yaml").write_text(json.dumps(tree, indent=1))
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    done = quintet("train", "file.yaml", check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results" / name / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["perf/total_num_tokens"] == episodes * (line["prompt_length/mean"] + line["response_length/mean"])
        assert line["critic/score/min"] >= -5.0, "a wrong answer costs reward_scale"
        assert line["actor/lr"] == 2e-05
        assert metrics | {"actor/grad_norm"} <= line.keys()
    if change is with_critic:
        assert lines[0]["critic/lr"] == 1e-05
