"""If these fail, the adapters of a run that went on are added to another model than the one that they belong to."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file

from quintet.config import load_experiment
from quintet.pipelines.export import export
from quintet.pipelines.rl import train
from quintet.policies.adapters import base_of

SMALL = (
    "training.groups_per_step=2",
    "training.samples_per_group=2",
    "training.mini_batches=1",
    "training.threads=1",
    "warm_start={games: 20, updates: 1, turns_per_update: 8, until_success: null}",
    "rollout.max_turns=2",
    "validation.every_steps=-1",
    "validation.before_training=false",
    "algorithm.advantage.name=reinforce_plus_plus",
    "policy.lora={rank: 2}",
    "actor.optimizer.learning_rate=0.01",
    "checkpoint.every_steps=1",
    "tracking.loggers=[jsonl]",
)


def test_adapters_of_a_run_that_went_on_belong_to_the_model_it_began_with(tmp_path: Path) -> None:
    for steps in (1, 2):
        words = (*SMALL, f"training.steps={steps}", f"output_dir={tmp_path}", "name=a")
        train(load_experiment(None, words), Console(file=io.StringIO()))
    newest = tmp_path / "a/checkpoints/global_step_2"
    assert base_of(newest / "lora_adapter") == tmp_path / "a/policy", "hf/ of a checkpoint has adapters in it already"
    export(str(newest / "lora_adapter"), tmp_path / "out")
    merged = load_file(newest / "hf/model.safetensors")
    for name, tensor in load_file(tmp_path / "out/model.safetensors").items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-6)
