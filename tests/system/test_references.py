"""If these fail, a reference of verl, RLinf or ROLL as it stands, its GPU options set for a CPU, doesn't train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

Command = Any

KEYS = Path(__file__).parents[1] / "unit/config/dialects/keys"

VERL = [
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "trainer.n_gpus_per_node=1",
    "trainer.default_hdfs_dir=null",
    "trainer.logger=['console']",
    "data.train_batch_size=8",
    "data.max_prompt_length=64",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.optim.total_training_steps=2",
]
RLINF = [
    "actor.training_backend=fsdp",
    "actor.model.precision=fp32",
    "actor.offload_optimizer=False",
    "actor.offload_weight=False",
    "actor.offload_grad=False",
    "actor.tokenizer.use_fast=True",
    "algorithm.val_rollout_batch_size_per_gpu=null",
    "algorithm.sampling_params.min_new_tokens=0",
    "data.rollout_batch_size=8",
    "data.max_prompt_length=64",
    "runner.seq_length=72",
    "runner.max_steps=1",
    "runner.output_dir=results",
]
ON_CPU = {"actor_train": "fsdp2_train", "actor_infer": "hf_infer", "reference": "hf_infer", "critic": "fsdp2_train"}
ROLL = [
    *(f"{worker}.strategy_args.strategy_name={name}" for worker, name in ON_CPU.items()),
    *(f"{worker}.device_mapping=null" for worker in ON_CPU),
    *(f"~actor_infer.strategy_args.strategy_config.{key}" for key in ("block_size", "max_model_len", "load_format")),
    "actor_train.model_args.dtype=fp32",
    "actor_train.strategy_args.strategy_config.param_dtype=fp32",
    "+actor_infer.model_args.dtype=fp32",
    "+reference.model_args.dtype=fp32",
    "rollout_batch_size=8",
    "prompt_length=64",
    "response_length=8",
    "+max_steps=1",
]


@pytest.fixture
def model(quintet: Command, tmp_path: Path) -> Path:
    """A policy made on the spot that knows the words of made questions, which lie in `sums`."""
    quintet("data", "make", "addition", "sums", "digits=1", "--train", "30", "--validation", "6")
    overrides = ["sft={epochs: 1, batch: 10}", "data.train_files=sums/train.parquet", "policy.preset=numbers-1m"]
    quintet("sft", *overrides, "name=made", "tracking.loggers=[jsonl]", "env={name: prompts}", "training.threads=1")
    return tmp_path / "runs/made/model"


def lines(directory: Path) -> list[dict[str, Any]]:
    (actual,) = (path for path in directory.rglob("metrics.jsonl") if path.parent.name != "made")
    return [json.loads(line) for line in actual.read_text().splitlines()]


@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_verls_ppo_trainer_trains(quintet: Command, model: Path, tmp_path: Path, estimator: str) -> None:
    (tmp_path / "ppo_trainer.yaml").write_text((KEYS / "verl_ppo_trainer.yaml").read_text())
    paths = [
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        "data.train_files=sums/train.parquet",
        "data.val_files=sums/validation.parquet",
    ]
    samples = [] if estimator == "gae" else ["actor_rollout_ref.rollout.n=2"]
    done = quintet("train", "ppo_trainer.yaml", *paths, *VERL, *samples, f"algorithm.adv_estimator={estimator}")
    records = lines(tmp_path)
    assert [line["step"] for line in records] == [0, 1, 2], done.stderr
    assert "val-core/addition/acc/mean@1" in records[0]
    assert ("critic/vf_loss" in records[1]) == (estimator == "gae")
    assert records[1]["actor/grad_norm"] >= 0


def test_rlinfs_math_reference_trains(quintet: Command, model: Path, tmp_path: Path) -> None:
    reference: dict[str, Any] = yaml.safe_load((KEYS / "rlinf_basic.yaml").read_text())
    merge(reference, yaml.safe_load((KEYS / "rlinf_math.yaml").read_text()))
    (tmp_path / "math.yaml").write_text(yaml.safe_dump(reference))
    rows = [{"prompt": f"{n} + 1 = ?", "solutions": [f"\\boxed{{{n + 1}}}"]} for n in range(1, 20)]
    (tmp_path / "math.jsonl").write_text("\n".join(map(json.dumps, rows)))
    paths = [
        f"rollout.model.model_path={model}",
        f"actor.tokenizer.tokenizer_model={model}",
        "data.train_data_paths=[math.jsonl]",
        "data.val_data_paths=[math.jsonl]",
    ]
    done = quintet("train", "math.yaml", *paths, *RLINF)
    records = lines(tmp_path)
    assert records[-1]["step"] == 1, done.stderr
    assert records[-1]["critic/score/min"] == -5.0, "a wrong answer costs reward_scale"


def merge(tree: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = value


def test_rolls_reference_trains(quintet: Command, model: Path, tmp_path: Path) -> None:
    (tmp_path / "roll.yaml").write_text((KEYS / "roll.yaml").read_text())
    rows = [{"instruction": f"{n} + 1 = ?", "ground_truth": str(n + 1)} for n in range(1, 20)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    paths = [f"+pretrain={model}", "actor_train.data_args.file_name=train.json"]
    done = quintet("train", "roll.yaml", *paths, *ROLL)
    records = lines(tmp_path)
    assert records[-1]["step"] == 1, done.stderr
    assert records[-1]["actor/grad_norm"] >= 0
