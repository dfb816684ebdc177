"""If these fail, the adapters of a run that went on are added to another model than the one that they belong to."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from quintet.config.compose import load_experiment
from quintet.errors import MachineError
from quintet.pipelines.export import export
from quintet.pipelines.rl import train
from quintet.pipelines.sft.fine_tuning import fine_tune
from quintet.policies.lora import read_base_model_path

SMALL = (
    "training.groups_per_step=2",
    "training.samples_per_group=2",
    "training.mini_batches=1",
    "training.threads=1",
    "warm_start={episodes: 20, updates: 1, turns_per_update: 8, until_success: null}",
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
        overrides = (*SMALL, f"training.steps={steps}", f"output_dir={tmp_path}", "name=a")
        train(load_experiment(None, overrides), Console(file=io.StringIO()))
    newest = tmp_path / "a/checkpoints/global_step_2"
    assert read_base_model_path(newest / "lora_adapter") == tmp_path / "a/policy", (
        "hf/ of a checkpoint has adapters in it already"
    )
    export(str(newest / "lora_adapter"), tmp_path / "out")
    merged = load_file(newest / "hf/model.safetensors")
    for name, tensor in load_file(tmp_path / "out/model.safetensors").items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-6)


@pytest.fixture
def tune(tmp_path: Path, policy_directory: Path) -> Callable[..., Path]:
    """A stage of fine-tuning with LoRA on a model that the test may change; gives its directory."""
    rows = [{"prompt": f"user {number}", "response": "<answer> Up </answer>"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shutil.copytree(policy_directory, tmp_path / "base")
    overrides = (
        *(
            f"sft.path={tmp_path}/base",
            f"data.train_files=[{tmp_path}/rows.jsonl]",
            "sft.batch=8",
            "sft.lora={rank: 2}",
        ),
        *("tracking.loggers=[jsonl]", "training.threads=1", f"output_dir={tmp_path}", "name=tuned"),
    )

    def run(*more: str) -> Path:
        fine_tune(load_experiment(None, (*overrides, *more)), Console(file=io.StringIO()))
        return tmp_path / "tuned"

    return run


def test_adapters_arent_added_to_a_model_that_was_changed(tune: Callable[..., Path], tmp_path: Path) -> None:
    tune("sft.epochs=1")
    path = tmp_path / "base/model.safetensors"
    before, weights = path.read_bytes(), load_file(path)
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"] * 1.01}, path, metadata={"format": "pt"})
    with pytest.raises(MachineError, match=r"base has changed since the adapters in .*global_step_1 were saved"):
        tune("sft.epochs=2")
    path.write_bytes(before)
    assert (tune("sft.epochs=2") / "checkpoints/global_step_2").is_dir()


@pytest.mark.parametrize("saved", ["[optimizer, extra]", "[hf_model]"])
def test_resuming_without_saved_adapters_is_an_error(tune: Callable[..., Path], saved: str) -> None:
    tune("sft.epochs=1", f"checkpoint.contents={saved}")
    with pytest.raises(MachineError, match=r"has the adapters merged.*\n.*checkpoint\.load_contents"):
        tune("sft.epochs=2", f"checkpoint.contents={saved}")
