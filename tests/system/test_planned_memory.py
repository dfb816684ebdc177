"""If these fail, a plan's memory is not what a run takes, and runs are refused or run out of memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from quintet import hardware
from quintet.config.compose import load_experiment
from quintet.config.plan.run_plan import RunPlan, plan_run
from quintet.data.chat_templates import CHATML
from quintet.policies.tiny_models import train_tokenizer

TOLERANCE = 0.25
VOCABULARY, HIDDEN, MLP, LAYERS, HEADS, KV_HEADS = 8192, 256, 704, 4, 8, 4
POLICY = ("policy.path=policy", "policy.preset=null")
COMMON = ("training.threads=1", "tracking.loggers=[jsonl]")
FINE_TUNING = (
    *POLICY,
    "data.train_files=[talks.jsonl]",
    "data.messages_key=messages",
    "data.truncation=right",
    "data.validation_rows=8",
    "sft.batch=48",
    "sft.max_tokens=160",
    "sft.before_training=false",
)
PROMPTS = (
    "env.name=prompts",
    "data.train_files=[sums.jsonl]",
    "rollout.max_prompt_tokens=60",
    "rollout.max_response_tokens=48",
    "rollout.ignore_end=true",
    "warm_start=null",
    "training.steps=2",
    "training.groups_per_step=8",
    "training.samples_per_group=16",
    "training.mini_batches=1",
    "validation.before_training=false",
    "validation.every_steps=-1",
)
SMALL = (
    *PROMPTS,
    "policy.preset=numbers-1m",
    "training.groups_per_step=16",
    "rollout.max_response_tokens=64",
)
TOOL = "rollout.tool_calls={tools: {calculator: {description: Adds., parameters: {expression: string}}}}"
RUNS = {
    "small": ("train", *SMALL),
    "tools": ("train", *SMALL, TOOL, "rollout.max_turns=2", "data.template=short.jinja"),
    "lora": ("train", *POLICY, *PROMPTS, "policy.lora={rank: 8, alpha: 16}"),
    "critic": ("train", *POLICY, *PROMPTS, "algorithm.advantage.name=gae", "algorithm.kl.coefficient=0.001"),
    "tuned": ("sft", *FINE_TUNING),
    "adapted": ("sft", *FINE_TUNING, "sft.lora={rank: 8, alpha: 16}"),
}
"""Runs whose episodes and rows are as long as the plan allows."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data and a policy that has a larger vocabulary than presets."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path, numbers = tmp_path_factory.mktemp("memory"), random.Random(0)

    def digits(count: int) -> str:
        return " ".join(str(numbers.randrange(10)) for _ in range(count))

    rows = [[{"role": "user", "content": digits(4)}, {"role": "assistant", "content": digits(200)}] for _ in range(96)]
    (path / "talks.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    prompts = [
        {
            "prompt": [{"role": "user", "content": digits(20)}],
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": "7"},
        }
        for _ in range(32)
    ]
    (path / "sums.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (path / "short.jinja").write_text(CHATML + "{# calls of tools are between <tool_call> tags #}")
    tokenizer = train_tokenizer(512, ["0 1 2 3 4 5 6 7 8 9"], digits=True)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **ends,
    )
    Qwen2ForCausalLM(config).save_pretrained(path / "policy")
    tokenizer.save_pretrained(path / "policy")
    return path


def planned(name: str) -> RunPlan:
    return plan_run(load_experiment(None, [*RUNS[name][1:], *COMMON, f"name={name}"]))


def peak_of(words: list[str], directory: Path) -> int:
    """Run a command in a process of its own and return its largest resident memory, bytes."""
    with (directory / "output.txt").open("w+") as output:
        command = [sys.executable, "-m", "quintet", *words]
        process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        assert process.returncode == 0, output.read()
    return usage.ru_maxrss << 10


@pytest.mark.skipif(hardware.sees_gpu() or sys.platform != "linux", reason="the plan is for a CPU under Linux")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_takes_the_memory_and_disk_of_its_plan(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resident memory within 25 %, and files of checkpoints and final weights within 5 %."""
    monkeypatch.chdir(directory)
    plan = planned(name)
    assert plan.memory.fullest is not None
    assert plan.disk is not None
    measured = peak_of([*RUNS[name], *COMMON, f"name={name}"], directory)
    assert plan.memory.fullest.total == pytest.approx(measured, rel=TOLERANCE), plan.memory.fullest
    files = [file for file in (directory / "runs" / name).rglob("*.safetensors") if not file.is_symlink()]
    assert plan.disk.total == pytest.approx(sum(file.stat().st_size for file in files), rel=0.05)


@pytest.mark.parametrize("name", RUNS)
def test_activations_and_process_are_more_than_the_tolerance_of_a_plan(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a plan without them is noticed."""
    monkeypatch.chdir(directory)
    peak = planned(name).memory.fullest
    assert peak is not None
    for part in (peak.parts["actor"].activations, peak.parts["process"].total):
        assert part > TOLERANCE * peak.total
