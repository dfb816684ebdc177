"""If these fail, a pretrained chat model is another one here than in transformers: its prompts, tokens, log-probs,
answers, adapters or exported files. Without network, and without the model in the cache, they are skipped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_processes
import yaml
from peft import PeftModel
from pretrained_model import NAME, pretrained_directory
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quintet.config.model_locations.published_models import published_models

ROOT = Path(__file__).parents[2]
Command = Callable[..., subprocess.CompletedProcess[str]]
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DATA = ("word_problems", "data/word_problems", "--train", "24", "--validation", "4")
EXAMPLE = str(ROOT / "examples/native/smollm2.yaml")
SMALL = ("training.groups_per_step=2", "training.samples_per_group=4", "training.mini_batches=1", "training.steps=2")


@pytest.fixture(scope="module")
def model() -> Path:
    return pretrained_directory()


@pytest.fixture
def data(quintet: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word problems, and one thread for each process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    quintet("data", "make", *DATA)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor([[1, 4093, 198, 3725, 253, 1183, 28, 216, 39]])).logits
    return result


def test_the_table_describes_the_model(model: Path) -> None:
    stored = json.loads((model / "config.json").read_text())
    assert published_models()[NAME].config.items() <= stored.items()
    names = load_file(model / "model.safetensors")
    assert sum(tensor.numel() for tensor in names.values()) == 134_515_008


def test_a_prompt_is_that_of_the_chat_template(model: Path, quintet: Command, data: None, tmp_path: Path) -> None:
    (shown,) = json.loads(quintet("plan", EXAMPLE, "--prompt", "--json").stdout)
    assert shown["text"].startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    tokenizer = AutoTokenizer.from_pretrained(model)
    question = re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", shown["text"], re.S)
    assert question
    messages = [{"role": "user", "content": question[1]}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert (shown["text"], shown["tokens"]) == (rendered, len(tokens))


def test_engine_and_learner_agree_on_dialogues(model: Path, quintet: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    limits = ("rollout.max_turns=2", "rollout.max_response_tokens=24", "rollout.max_prompt_tokens=400")
    done = quintet("check", "drift", f"policy.preset={NAME}", *limits, "--episodes", "4", "--json")
    report = json.loads(done.stdout)
    (loaded, *_) = report["measurements"]
    assert loaded["drift"]["logprobs_diff_max"] < 1e-4
    assert report["passed"]


def test_a_served_model_answers_a_chat(model: Path, tmp_path: Path) -> None:
    process = warm_processes.Popen(
        [sys.executable, "-m", "quintet", "serve", NAME, "--port", "0"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = re.fullmatch(rf"{NAME} on (http://127\.0\.0\.1:\d+/v1)\n", process.stdout.readline())
        assert address
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        asked = json.dumps({"messages": messages, "temperature": 0, "max_tokens": 16, "logprobs": True}).encode()
        request = urllib.request.Request(f"{address[1]}/chat/completions", asked, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            choice = json.load(reply)["choices"][0]
    finally:
        process.kill()
        process.communicate()
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"


def test_adapters_are_merged_into_a_model_that_transformers_loads(
    model: Path, quintet: Command, data: None, tmp_path: Path
) -> None:
    tuning = ("data.train_files=data/word_problems/train.parquet", "sft.batch=8", "sft.lora.rank=4", "data.max_steps=2")
    quintet("sft", "name=tuned", f"sft.path={NAME}", *tuning, "sft.optimizer.learning_rate=1e-3")
    quintet("export", "runs/tuned", "merged")
    adapters = tmp_path / "runs/tuned/lora_adapter"
    base = AutoModelForCausalLM.from_pretrained(model)
    untrained = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, adapters))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert torch.allclose(adapted, merged, atol=1e-3)
    assert not torch.allclose(untrained, merged, atol=1e-2)
    card = yaml.safe_load((tmp_path / "merged/README.md").read_text().split("---")[1])
    assert card["base_model"] == HUB_NAME


def test_a_trained_model_is_exported_for_transformers(
    model: Path, quintet: Command, data: None, tmp_path: Path
) -> None:
    done = quintet("train", EXAMPLE, *SMALL, "validation.before_training=false", "validation.every_steps=0")
    steps = rows(tmp_path / "runs/smollm2/metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2], done.stderr
    assert all("actor/grad_norm" in step or step["training/groups_kept"] == 0 for step in steps)
    quintet("export", "runs/smollm2", "exported")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/smollm2/checkpoints/global_step_2/hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(logits(trained), logits(exported))
