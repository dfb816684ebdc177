"""If these fail, adapters for layers that aren't there are told late, or such that are there are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quintet.cli.choices import check_choices
from quintet.config.checks.adapters import adapter_problems
from quintet.config.compose import load_experiment
from quintet.errors import ConfigError

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
TENSORS = ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight")


def told(*words: str) -> str:
    return "\n".join(map(str, adapter_problems(load_experiment(None, list(words)))))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(dict.fromkeys(TENSORS, np.zeros(1)), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("key", ["policy.lora", "sft.lora"])
def test_layers_that_arent_there_are_told_before_anything_is_loaded(key: str) -> None:
    words = [f"{key}={{target_modules: [q_prj, c_attn]}}", *["sft.episodes={}"] * (key == "sft.lora")]
    with pytest.raises(ConfigError) as refused:
        check_choices(load_experiment(None, words))
    assert refused.value.key == f"{key}.target_modules"
    assert refused.value.source == "command line"
    assert "(command line): the model has no such layers\n  it has down_proj," in str(refused.value)


@pytest.mark.parametrize("targets", ["[q_proj]", "[self_attn.q_proj, x]", "[all-linear]", "['.*self_attn.*']"])
def test_layers_that_are_there_are_taken(model: Path, targets: str) -> None:
    lora = f"policy.lora={{target_modules: {targets}}}"
    assert not told(lora)
    assert not told(lora, "policy.preset=null", f"policy.path={model}")


def test_a_models_own_files_say_what_it_has(model: Path) -> None:
    at = ["policy.preset=null", f"policy.path={model}"]
    assert "it has lm_head, q_proj; for all linear layers" in told("policy.lora={target_modules: [o_proj]}", *at)
    (model / "model.safetensors").unlink()
    assert not told("policy.lora={target_modules: [o_proj]}", *at)
    index = {"weight_map": dict.fromkeys(TENSORS, "a.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no such layers" in told("policy.lora={target_modules: ['model.layers.*o_proj']}", *at)


def test_a_damaged_file_is_left_to_be_told_when_it_is_loaded(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 20)
    assert not told("policy.lora={target_modules: [o_proj]}", "policy.preset=null", f"policy.path={model}")


def test_a_pattern_that_is_none_is_told() -> None:
    assert "invalid regular expression" in told("policy.lora={target_modules: ['*proj']}")


def test_a_head_that_is_the_embedding_isnt_adapted() -> None:
    assert "embedding and head of this model share one matrix" in told(
        "policy.lora={target_modules: [q_proj, lm_head]}"
    )


def test_adapters_that_are_stored_know_their_layers(tmp_path: Path) -> None:
    assert not told(f"policy.lora={{target_modules: [nothing], path: {tmp_path}}}")
