"""If these fail, a ROLL user's file of the usual kinds does not train here: model, data, devices and sizes are small,
everything else is as in ROLL's example files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from judge_endpoint import endpoint

Command = Any

COMMON: dict[str, Any] = {
    "seed": 42,
    "logging_dir": "./output/logs",
    "output_dir": "./output",
    "system_envs": {"USE_MODELSCOPE": "1"},
    "track_with": "tensorboard",
    "tracker_kwargs": {"log_dir": "boards"},
    "checkpoint_config": {"type": "file_system", "output_dir": "copies/${exp_name}"},
    "num_gpus_per_node": 8,
    "max_steps": 2,
    "save_steps": 10000,
    "logging_steps": 1,
    "eval_steps": 2,
    "resume_from_checkpoint": False,
    "ppo_epochs": 1,
    "init_kl_coef": 0.0,
    "entropy_loss_coef": 0,
    "max_grad_norm": 1.0,
}
MODEL = {"disable_gradient_checkpointing": True, "dtype": "fp32", "model_type": None}
WORKERS: dict[str, Any] = {
    "actor_train": {
        "model_args": {**MODEL, "attn_implementation": "sdpa"},
        "training_args": {
            "learning_rate": 1.0e-4,
            "weight_decay": 0,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "warmup_steps": 1,
            "lr_scheduler_type": "cosine",
        },
        "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {"param_dtype": "fp32"}},
        "device_mapping": "[0]",
        "infer_batch_size": 2,
    },
    "actor_infer": {
        "model_args": MODEL,
        "generating_args": {
            "max_new_tokens": 16,
            "top_p": 0.99,
            "top_k": 100,
            "num_beams": 1,
            "temperature": 0.99,
            "num_return_sequences": 1,
        },
        "strategy_args": {"strategy_name": "hf_infer"},
        "device_mapping": "[0]",
        "infer_batch_size": 1,
    },
    "reference": {
        "model_args": {**MODEL, "attn_implementation": "sdpa"},
        "strategy_args": {"strategy_name": "hf_infer", "strategy_config": None},
        "device_mapping": "[0]",
        "infer_batch_size": 2,
    },
}
LAKE = {
    "env_type": "frozen_lake",
    "max_steps": 2,
    "max_tokens_per_step": "${max_tokens_per_step}",
    "env_manager_cls": "${env_manager_cls}",
    "use_thread_lock": True,
    "agent_system_template": "You are a good game player.",
    "agent_template": "Turn {turn_idx}:\n{observation}",
    "env_config": {"action_pattern": "<answer>(.*?)</answer>", "max_steps": 2, "format_penalty": -0.01},
}
BOXES = {
    **LAKE,
    "env_type": "sokoban",
    "env_config": {"max_steps": 2, "format_penalty": -0.15, "dim_room": [6, 6], "num_boxes": 1},
}
TRAJECTORIES = "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"
STEPS = "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"


def agentic(name: str, tag: str, env: dict[str, Any], manager: str = TRAJECTORIES) -> dict[str, Any]:
    return {
        **COMMON,
        **WORKERS,
        "exp_name": name,
        "rollout_batch_size": 8,
        "val_batch_size": 4,
        "sequence_length": 1024,
        "advantage_clip": 0.2,
        "adv_estimator": "grpo",
        "whiten_advantages": True,
        "max_tokens_per_step": 16,
        "env_manager_cls": manager,
        "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
        "train_env_manager": {
            "max_env_num_per_worker": 4,
            "num_env_groups": 2,
            "group_size": 4,
            "tags": [tag],
            "num_groups_partition": [2],
        },
        "val_env_manager": {"num_env_groups": 4, "group_size": 1, "tags": [tag], "num_groups_partition": [4]},
        "custom_env": {tag: env},
        "custom_envs": {tag: f"${{custom_env.{tag}}}"},
    }


def trained(quintet: Command, tmp_path: Path, tree: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics of a run of such a file."""
    (tmp_path / "run.yaml").write_text(json.dumps(tree, indent=1))
    done = quintet("train", "run.yaml", check=False)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "output" / tree["exp_name"]
    assert list((tmp_path / "boards").rglob("events.out.tfevents*"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    return lines


def test_an_agentic_frozen_lake_file_trains(quintet: Command, tmp_path: Path) -> None:
    lines = trained(quintet, tmp_path, agentic("lake", "FrozenLake", LAKE))
    assert "val/frozenlake/success_rate" in lines[2]
    assert "actor/lr" in lines[1]


def test_an_agentic_sokoban_file_trains(quintet: Command, tmp_path: Path) -> None:
    lines = trained(quintet, tmp_path, agentic("boxes", "SimpleSokoban", BOXES))
    assert "val/sokoban/success_rate" in lines[2]


def test_a_gigpo_file_trains_turn_by_turn(quintet: Command, tmp_path: Path) -> None:
    tree = agentic("turns", "FrozenLake", {**LAKE, "history_length": 2}, STEPS)
    gigpo = {"adv_estimator": "gigpo", "batch_adjust_mode": "copy", "step_reward_gamma": 0.95}
    lines = trained(quintet, tmp_path, {**tree, **gigpo, "use_kl_loss": True, "kl_loss_coef": 0.01})
    assert lines[1]["actor/kl_loss"] >= 0


CHOICES = {
    "worker_cls": "roll.pipeline.rlvr.rewards.crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker",
    "reward_type": "soft",
    "tag_included": ["aime"],
}


def prompts(path: Path, tags: Sequence[str]) -> None:
    rows = [
        {
            "tag": tag,
            "messages": [{"role": "user", "content": f"{n} + 1 ="}],
            "ground_truth": "ABCD"[n] if tag == "aime" else str(n + 1),
        }
        for n in range(4)
        for tag in tags
    ]
    path.write_text("\n".join(map(json.dumps, rows)))


def rlvr(domains: dict[str, Any], shares: dict[str, float]) -> dict[str, Any]:
    """A file with these domains, of which each but `math_rule` has changes."""
    domain = {
        "worker_cls": "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker",
        "model_args": {"model_name_or_path": "${reward_pretrain}"},
        "tag_included": ["math"],
        "world_size": 1,
        "infer_batch_size": 1,
    }
    tree = {
        **COMMON,
        **WORKERS,
        "exp_name": "sums",
        "reward_pretrain": None,
        "rollout_batch_size": 4,
        "prompt_length": 64,
        "response_length": 16,
        "num_return_sequences_in_group": 2,
        "adv_estimator": "reinforce",
        "value_clip": 0.5,
        "reward_clip": 10,
        "advantage_clip": 2.0,
        "dual_clip_loss": True,
        "whiten_advantages": True,
        "add_token_level_kl": False,
        "max_len_mask": True,
        "rewards": {name: {**domain, **changes} for name, changes in domains.items()},
    }
    data = {
        "file_name": ["sums.jsonl"],
        "domain_interleave_probs": shares,
        "dataset_dir": "data",
        "messages": "messages",
        "interleave_probs": "1.0",
        "preprocessing_num_workers": 1,
    }
    return tree | {"actor_train": {**WORKERS["actor_train"], "data_args": data}}


def test_an_rlvr_file_trains(quintet: Command, tmp_path: Path) -> None:
    prompts(tmp_path / "sums.jsonl", ("math", "aime"))
    tree = rlvr({"math_rule": {}, "contest": CHOICES}, {"math_rule": 0.5, "contest": 0.5})
    lines = trained(quintet, tmp_path, tree)
    assert {f"val/{name}/success_rate" for name in ("prompts", "math_rule", "contest")} <= lines[2].keys()
    assert (lines[1]["train/math_rule/groups"], lines[1]["train/contest/groups"]) == (2, 2)


ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_prefetch_bucket_size": "auto"},
}


def test_a_file_with_deepspeed_trains(quintet: Command, tmp_path: Path) -> None:
    """The policy and its reference under DeepSpeed, by a section that the file refers to."""
    prompts(tmp_path / "sums.jsonl", ("math",))
    tree = {**rlvr({"math_rule": {}}, {"math_rule": 1.0}), "deepspeed_zero3": ZERO3}
    tree |= {"use_kl_loss": True, "max_len_mask": False}
    for worker, strategy in (("actor_train", "deepspeed_train"), ("reference", "deepspeed_infer")):
        options = {"strategy_name": strategy, "strategy_config": "${deepspeed_zero3}"}
        tree[worker] = {**tree[worker], "strategy_args": options}
    training = {**tree["actor_train"]["training_args"], "lr_scheduler_type": "constant"}
    tree["actor_train"] = {**tree["actor_train"], "training_args": training}
    lines = trained(quintet, tmp_path, tree)
    assert lines[1].get("train/failures", 0) == 0
    assert "actor/kl_loss" in lines[2]
    assert lines[2]["actor/lr"] == 1.0e-4


JUDGE: dict[str, Any] = {
    "worker_cls": "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker",
    "judge_prompt": "Qwen2.5-7B-Instruct-RLVR-prompt",
    "tag_included": ["RLVR"],
}


def test_an_rlvr_file_with_a_judge_trains(quintet: Command, tmp_path: Path) -> None:
    """The domains of ROLL's main example, with the judge behind an endpoint."""
    prompts(tmp_path / "sums.jsonl", ("math", "RLVR", "aime"))
    with endpoint(lambda prompt: "YES" if len(prompt) % 2 else "No.") as known:
        api = {"judge_model_type": "api", "judge_model_name": "large", "judge_api_url": known.url}
        domains = {"math_rule": {}, "llm_judge": {**JUDGE, **api}, "contest": CHOICES}
        tree = rlvr(domains, {"math_rule": 0.25, "llm_judge": 0.5, "contest": 0.25})
        lines = trained(quintet, tmp_path, tree)
    assert [lines[1][f"train/{name}/groups"] for name in domains] == [1, 2, 1]
    # two steps of two prompts with two responses each, and four held-out prompts twice
    assert len(known.seen) == 2 * 2 * 2 + 2 * 4
    assert {one["model"] for one in known.seen} == {"large"}
    assert all("temperature" not in one for one in known.seen)


def test_an_rlvr_file_with_a_judge_that_the_run_serves_trains(quintet: Command, tmp_path: Path) -> None:
    prompts(tmp_path / "sums.jsonl", ("RLVR",))
    quintet("train", "name=made", "training.steps=0", "warm_start=null", "validation.before_training=false")
    served = {
        "judge_model_type": "inference",
        "model_args": {"model_name_or_path": "runs/made/checkpoints/global_step_0/hf", "dtype": "fp32"},
        "generating_args": {"max_new_tokens": 4, "temperature": 0.8, "top_p": 0.8, "top_k": 50},
        "data_args": {"template": "qwen2_5"},
        "strategy_args": {"strategy_name": "hf_infer", "strategy_config": None},
        "device_mapping": "[0]",
    }
    # a judge with random weights gives no verdict
    tree = rlvr({"llm_judge": {**JUDGE, **served}}, {"llm_judge": 1.0})
    lines = trained(quintet, tmp_path, tree)
    assert lines[1]["trajectory/failures/reward/NoVerdict"] == lines[1]["reward/failed"] > 0
    assert lines[1]["train/llm_judge/groups"] == 4


def test_a_distillation_file_trains(quintet: Command, tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "sums.json").write_text(json.dumps(rows))
    for name, seed in (("small", 1), ("large", 2)):
        quintet("train", f"name={name}", f"seed={seed}", "training.steps=0", "warm_start=null",
                "validation.before_training=false")  # fmt: skip
    models = {name: f"runs/{name}/checkpoints/global_step_0/hf" for name in ("small", "large")}
    tree = {
        **COMMON,
        "exp_name": "distilled",
        "student_pretrain": models["small"],
        "teacher_pretrain": models["large"],
        "logits_topk": 64,
        "distill_loss_weight": 0.85,
        "kd_objective": "forward_kl",
        "distill_on_prompt": False,
        "logits_transfer_backend": "nccl-only",
        "sequence_length": 128,
        "question_key": "question",
        "answer_key": "answer",
        "validation": {"data_args": {"file_name": ["sums.json"], "template": "qwen2_5"}},
        "student": {
            "model_args": {**MODEL, "attn_implementation": "sdpa"},
            "training_args": {
                "learning_rate": 1.0e-3,
                "lr_scheduler_type": "constant",
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "warmup_steps": 0,
                "num_train_epochs": 1,
            },
            "data_args": {"template": "qwen2_5", "file_name": ["sums.json"], "preprocessing_num_workers": 1},
            "strategy_args": {"strategy_name": "fsdp2_train"},
            "device_mapping": "[0]",
            "infer_batch_size": 2,
        },
        "teacher": {
            "model_args": MODEL,
            "data_args": {"template": "qwen2_5"},
            "training_args": {"per_device_train_batch_size": 2},
            "strategy_args": {"strategy_name": "fsdp2_infer"},
            "device_mapping": "[0]",
        },
    }
    for name in ("max_steps", "ppo_epochs", "init_kl_coef", "entropy_loss_coef"):
        del tree[name]
    (tmp_path / "distill.yaml").write_text(json.dumps(tree))
    done = quintet("sft", "distill.yaml", check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "output/distilled/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["train/distillation_loss"] > 0 for line in lines)
    assert "val/loss" in lines[1]
    # a teacher that is the student itself has the same distributions
    (tmp_path / "same.yaml").write_text(json.dumps({**tree, "exp_name": "same", "teacher_pretrain": models["small"]}))
    quintet("sft", "same.yaml")
    first = json.loads((tmp_path / "output/same/metrics.jsonl").read_text().splitlines()[0])
    assert abs(first["train/distillation_loss"]) < 1e-6
    assert first["train/loss"] == lines[0]["train/loss"]
