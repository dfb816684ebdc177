"""If these fail, a policy is loaded with another configuration or tokenizer than the one that was asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quintet.config.compose import load_experiment
from quintet.errors import ConfigError, MachineError
from quintet.policies import tiny_models
from quintet.policies.model_loading import load_model, load_tokenizer
from quintet.runtime.components import build_components


def test_overrides_lie_over_the_models_own_configuration(policy_directory: Path) -> None:
    assert load_model(policy_directory, overrides={"rms_norm_eps": 0.25}).config.rms_norm_eps == 0.25
    with pytest.raises(ConfigError, match="no such setting") as error:
        load_model(policy_directory, overrides={"rms_norm_epss": 0.25})
    assert error.value.hint == "did you mean policy.overrides.rms_norm_eps?"


def test_models_loaded_in_several_threads_keep_their_tied_heads(policy_directory: Path) -> None:
    """Without a lock, the first loading of two threads at once makes the heads of all later models random."""
    with ThreadPoolExecutor(3) as threads:
        models = list(threads.map(load_model, [policy_directory] * 9))
    assert all(model.lm_head.weight is model.get_input_embeddings().weight for model in models)
    assert load_model(policy_directory).lm_head.weight.equal(models[0].lm_head.weight)


def test_a_head_is_never_random(policy_directory: Path, tmp_path: Path) -> None:
    """transformers only warns if the files have no head, and other programs tie one that the configuration ties."""
    with pytest.raises(MachineError, match=r"incomplete: its files have no lm_head\.weight"):
        load_model(policy_directory, overrides={"tie_word_embeddings": False})
    shutil.copytree(policy_directory, tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MachineError, match="have a head that differs from the embedding"):
        load_model(tmp_path / "model")
    assert not load_model(tmp_path / "model", overrides={"tie_word_embeddings": False}).config.tie_word_embeddings


def test_another_tokenizer_is_taken_if_the_model_knows_its_tokens(policy_directory: Path, tmp_path: Path) -> None:
    small = tiny_models.train_tokenizer(300, ["system\nuser\nassistant\n Up Down"])
    small.save_pretrained(tmp_path / "small")
    large = tiny_models.train_tokenizer(300, ["system\nuser\nassistant\n Up Down"])
    large.add_tokens([f"<{number}>" for number in range(200)])
    large.save_pretrained(tmp_path / "large")
    overrides = ["policy.preset=null", f"policy.path={policy_directory}", "rollout.max_prompt_tokens=64"]
    taken = build_components(
        load_experiment(None, [*overrides, f"policy.tokenizer={tmp_path}/small"]).experiment, policy_directory
    )
    assert len(taken.tokenizer) == len(small)
    with pytest.raises(ConfigError, match="the model only"):
        build_components(
            load_experiment(None, [*overrides, f"policy.tokenizer={tmp_path}/large"]).experiment, policy_directory
        )


@pytest.mark.proves("rlinf", "actor.model.low_cpu_mem_usage")
def test_weights_are_never_twice_in_memory(tmp_path: Path) -> None:
    """A process that loads 128 MiB of weights grows by less than half as much again."""
    program = """
import resource, sys
from transformers import Qwen2Config, Qwen2ForCausalLM
from quintet.policies.model_loading import load_model, load_tokenizer
unit = 1 << (20 if sys.platform == "darwin" else 10)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
shape = dict(vocab_size=64, hidden_size=512, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4)
if sys.argv[2] == "make":
    Qwen2ForCausalLM(Qwen2Config(intermediate_size=2048, **shape)).save_pretrained(sys.argv[1])
else:
    Qwen2ForCausalLM(Qwen2Config(intermediate_size=64, **{**shape, "hidden_size": 16}))
    before = peak()
    load_model(sys.argv[1])
    print(peak() - before)
"""
    for task in ("make", "load"):
        completed = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), task],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
    size = (tmp_path / "model.safetensors").stat().st_size / (1 << 20)
    assert size > 100
    assert float(completed.stdout.splitlines()[-1]) < 1.6 * size


def test_a_damaged_configuration_of_a_tokenizer_is_the_users_error(policy_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(policy_directory, tmp_path / "policy")
    (tmp_path / "policy/tokenizer_config.json").write_text('"text"')
    with pytest.raises(MachineError, match="cannot load a tokenizer from"):
        load_tokenizer(tmp_path / "policy")
