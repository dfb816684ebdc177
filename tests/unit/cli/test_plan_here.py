"""If these fail, people learn one by one what their script needs on their own machine, from runs that are refused."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quintet import hardware
from quintet.cli import main as command
from quintet.cli.machine_changes import MODEL
from quintet.config.plan.format_sizes import GIB

ROOT = Path(__file__).parents[3]
VERL = sorted((ROOT / "examples/verl").glob("run_*.sh"))
SMALL = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 640,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
USUAL = """
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=/data/gsm8k/train.parquet \\
    data.val_files=/data/gsm8k/test.parquet \\
    data.prompt_key=question \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=2048 \\
    data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=5 \\
    trainer.logger='["console","wandb"]' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=2 \\
    trainer.total_epochs=15 $@
"""
Call = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Run `quintet plan --json` in an empty directory on a machine with 16 GiB and without vLLM and W&B."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    monkeypatch.setattr(hardware, "nvidia_smi", lambda: ())
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 16 * GIB)
    installed = hardware.is_installed
    monkeypatch.setattr(hardware, "is_installed", lambda name: name not in ("vllm", "wandb") and installed(name))

    def run(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["quintet", "plan", *arguments, "--json"])
        with pytest.raises(SystemExit) as end:
            command.main()
        output = capsys.readouterr()
        assert not end.value.code, output.err
        found: dict[str, Any] = json.loads(output.out)
        return found

    return run


def prepare(commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands that make data; in place of the one that makes a model, write what a plan reads of it."""
    for line in commands:
        if line.startswith("quintet data"):
            monkeypatch.setattr(sys, "argv", shlex.split(line))
            with pytest.raises(SystemExit) as end:
                command.main()
            assert not end.value.code
        else:
            Path(MODEL).mkdir(parents=True)
            (Path(MODEL) / "config.json").write_text(json.dumps(SMALL))


def test_the_usual_verl_script_is_told_everything_at_once(
    plan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.sh").write_text(USUAL)
    here = plan("run.sh", "--here")
    assert here["problems"] == []
    assert {
        "actor_rollout_ref.rollout.name=hf",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=console",
        f"actor_rollout_ref.model.path={MODEL}",
        "data.max_prompt_length=512",
        "data.max_response_length=512",
        "data.train_files=data/addition/train.parquet",
        "data.val_files=data/addition/validation.parquet",
        "data.prompt_key=prompt",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    } == {word.replace("""'["console"]'""", "console").replace('["console"]', "console") for word in here["overrides"]}
    words = shlex.split(here["command"])
    assert words == ["quintet", "train", "run.sh", *here["overrides"]]
    prepare(here["prepare"], monkeypatch)
    planned = plan(*words[2:])
    assert planned["not_yet"] == planned["not_here"] == []
    assert planned["start"] is None
    assert plan(*words[2:], "--here")["overrides"] == [], "the overrides are not all that was needed"


@pytest.mark.parametrize("script", VERL, ids=lambda path: path.stem)
def test_the_overrides_of_every_verl_script_give_a_plan_without_refusals(
    script: Path, plan: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rewards").mkdir()
    Path("rewards/boxed.py").write_text("def compute_score(**arguments): return 0.0")  # a function of the user
    here = plan(str(script), "--here")
    assert here["problems"] == []
    prepare(here["prepare"], monkeypatch)
    planned = plan(str(script), *here["overrides"])
    assert planned["not_yet"] == planned["not_here"] == []


def test_with_gpus_only_what_differs_is_changed(plan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 2)
    monkeypatch.setattr(hardware, "is_installed", lambda name: name != "wandb")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(SMALL | {"max_position_embeddings": 4096}))
    (tmp_path / "run.sh").write_text(USUAL.replace("Qwen/Qwen2-7B-Instruct", str(tmp_path / "model")))
    here = plan("run.sh", "--here")
    assert {"trainer.nnodes=1", "trainer.n_gpus_per_node=2"} <= {*here["overrides"]}
    changed = " ".join(here["overrides"])
    for kept in ("rollout.name", "tensor_model_parallel_size", "model.path", "max_prompt_length"):
        assert kept not in changed
    assert here["command"].startswith("torchrun --nproc-per-node 2 -m quintet train run.sh ")


def test_a_run_that_works_here_needs_no_override(plan: Call) -> None:
    here = plan("--here")
    assert here == {"overrides": [], "prepare": [], "command": "quintet train", "problems": []}


def test_keys_that_have_to_go_are_removed_from_a_file(plan: Call) -> None:
    here = plan(str(ROOT / "examples/roll/qwen3-8b_rlvr_fsdp2_8gpu.yaml"), "--here")
    assert here["problems"] == []
    assert "~actor_infer.strategy_args.strategy_config.max_model_len" in here["overrides"]


def test_what_no_override_solves_is_said(plan: Call) -> None:
    here = plan(str(ROOT / "examples/vagen/svg/run.sh"), "--here")
    assert any("data/starvector-svg-icons-simple/train" in problem for problem in here["problems"])
