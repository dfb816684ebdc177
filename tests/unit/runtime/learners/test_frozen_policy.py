"""If these fail, a run that only generates loads models that no engine needs, or generates with other weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import LoraConfig
from quintet.policies.lora import add_lora, merge_adapters, save_adapters
from quintet.policies.model_loading import load_model
from quintet.runtime.controller import Controller
from quintet.runtime.engines.engine_worker import LocalEngineWorker
from quintet.runtime.learners.local_learners import FrozenPolicy, FrozenPolicyOfRank
from quintet.training.parallel.process_group import RankGroup

WORDS = ("env.name=prompts", "data.train_files=[x.jsonl]", "generation.output_path=x.parquet")


def config_of(*words: str) -> Experiment:
    return load_experiment(None, [*WORDS, *words]).experiment


def test_a_rank_without_an_engine_loads_no_model(policy_directory: Path) -> None:
    """Two devices with one engine: the second rank has none, and no weights to gather."""
    words = ("placement.devices_per_node=2", "rollout.engine=vllm", "rollout.engine_options.tensor_parallel=2")
    config = config_of(f"policy.path={policy_directory}", *words)
    policy = FrozenPolicyOfRank(RankGroup(rank=1, size=2), FrozenPolicy(config, policy_directory))
    assert LocalEngineWorker(policy).build(config, policy_directory) == 0
    assert list(policy.actor.weights()) == []
    assert policy.actor._model is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_have_the_type_of_the_engine(policy_directory: Path, dtype: str) -> None:
    config = config_of(f"policy.path={policy_directory}", f"rollout.engine_options.dtype={dtype}")
    policy = FrozenPolicy(config, policy_directory)
    expected = dict(load_model(policy_directory).named_parameters())
    found = dict(FrozenPolicy(config, policy_directory).model.named_parameters())
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(expected, getattr(torch, dtype))
    assert policy.model is policy.model
    for name, tensor in policy.weights():
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype))


def test_adapters_are_merged(policy_directory: Path, tmp_path: Path) -> None:
    adapted = load_model(policy_directory)
    add_lora(adapted, LoraConfig(rank=2))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.25)
    save_adapters(adapted, tmp_path / "adapters", str(policy_directory))
    merge_adapters(adapted)
    config = config_of(f"policy.path={policy_directory}", f"policy.lora={{rank: 2, path: {tmp_path / 'adapters'}}}")
    merged = dict(FrozenPolicy(config, policy_directory).model.named_parameters())
    plain = dict(load_model(policy_directory).named_parameters())
    assert merged.keys() == plain.keys()
    assert any(not torch.equal(merged[name], plain[name]) for name in plain)
    for name, tensor in adapted.named_parameters():
        torch.testing.assert_close(merged[name], tensor)


def test_the_controller_builds_no_learner(policy_directory: Path) -> None:
    config = config_of(f"policy.path={policy_directory}")
    controller = Controller.in_process()
    group = controller.build_learners(config, policy_directory)
    assert group.has_full_weights
    assert not any(parameter.grad is not None for parameter in group.actor.model.parameters())
    with pytest.raises(AttributeError):
        list(group.actor.adapters())
