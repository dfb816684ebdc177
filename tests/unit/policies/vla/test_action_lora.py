"""If these fail, adapters of action policies are not those of RLinf, or training them changes other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.openvla_directories import write_openvla_directory
from tests.support.robot_policies import observe, robot_experiment

from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSampling
from quintet.policies.lora import WEIGHTS_FILE, iter_merged_weights, save_adapters
from quintet.policies.vla.build import load_action_policy

RLINF_TARGETS = (
    *("proj", "qkv", "fc1", "fc2", "q", "kv", "fc3", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj", "lm_head"),
)
PUBLISHED_ADAPTER_TENSORS = 878
"""A and B of the linear layers, the head, and the two convolutions that are also named `proj`."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openvla") / "policy"
    write_openvla_directory(path)
    return path


def _experiment(directory: Path, **lora: Any) -> Experiment:
    vla = {"action_dim": 3, "action_chunk": 2, "normalization_key": "libero_spatial"}
    adapters = {"rank": 2, "alpha": 2.0, "target_modules": RLINF_TARGETS, **lora}
    policy = {"preset": None, "path": str(directory), "kind": "openvla_oft", "vla": vla, "lora": adapters}
    return robot_experiment(policy, rollout={"max_prompt_tokens": 90})


def test_adapters_and_value_head_are_trained_and_published_adapters_load(directory: Path, tmp_path: Path) -> None:
    policy = load_action_policy(directory, _experiment(directory))
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert all(".lora_" in name or name.startswith("value_head.") for name in trained)
    assert {name for name, _ in policy.named_parameters() if name.startswith("value_head.")} <= trained
    assert sum(".lora_" in name for name, _ in policy.named_parameters()) == PUBLISHED_ADAPTER_TENSORS
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if ".lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    inputs = policy.prepare(observe(2))
    sample = policy.sample(inputs, None, ActionSampling())
    (policy.statistics(inputs, sample.actions, ActionSampling()).logprobs.sum() + sample.values.sum()).backward()
    assert {name for name, weight in policy.named_parameters() if weight.grad is not None} == trained

    adapters = tmp_path / "lora_adapter"
    save_adapters(policy, adapters, directory)
    stored = load_file(adapters / WEIGHTS_FILE)
    head = policy.language_model.lm_head.base_layer.weight.detach().clone()
    stored["base_model.model.language_model.lm_head.base_layer.weight"] = head
    save_file(stored, adapters / WEIGHTS_FILE)
    loaded = load_action_policy(directory, _experiment(directory, path=str(adapters)))
    assert torch.equal(loaded.sample(inputs, None, ActionSampling()).logprobs, sample.logprobs)

    merged = load_action_policy(directory, _experiment(directory).model_copy(update={"policy": _plain(directory)}))
    weights = dict(iter_merged_weights(policy))
    assert set(weights) == set(merged.state_dict())
    merged.load_state_dict(weights)
    assert torch.allclose(merged.sample(inputs, None, ActionSampling()).logprobs, sample.logprobs, atol=1e-4)


def _plain(directory: Path) -> Any:
    return _experiment(directory).policy.model_copy(update={"lora": None})
