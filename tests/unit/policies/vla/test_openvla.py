"""If these fail, OpenVLA's action tokens are sampled from another distribution than the one that is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.openvla_directories import write_openvla_directory
from tests.support.robot_policies import observe, robot_experiment

from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSampling
from quintet.policies.model_loading import enable_activation_checkpointing
from quintet.policies.vla.build import load_action_policy
from quintet.policies.vla.openvla import OpenVlaPolicy

ACTION_DIM = 3
SAMPLING = ActionSampling(temperature=1.6, top_k=40)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    path = tmp_path_factory.mktemp("openvla") / "policy"
    write_openvla_directory(path)
    vla = {"action_dim": ACTION_DIM, "action_chunk": 1, "normalization_key": "libero_spatial"}
    policy = {"preset": None, "path": str(path), "kind": "openvla", "vla": vla}
    return robot_experiment(policy, rollout={"max_prompt_tokens": 90})


@pytest.fixture(scope="module")
def policy(config: Experiment) -> OpenVlaPolicy:
    return load_action_policy(Path(str(config.policy.path)), config)


def _uniforms(robots: int) -> torch.Tensor:
    return torch.rand((robots, 1, ACTION_DIM), generator=torch.Generator().manual_seed(0))


def test_sampling_with_a_cache_agrees_with_teacher_forcing(policy: OpenVlaPolicy) -> None:
    inputs = policy.prepare(observe(5))
    with torch.no_grad():
        sample = policy.sample(inputs, _uniforms(5), SAMPLING)
        statistics = policy.statistics(inputs, sample.actions, SAMPLING)
    assert torch.allclose(sample.logprobs, statistics.logprobs, atol=1e-5)
    assert torch.allclose(sample.values, statistics.values, atol=1e-5)
    assert (statistics.entropies > 0).all()


def test_each_token_depends_on_those_before_it_only(policy: OpenVlaPolicy) -> None:
    inputs = policy.prepare(observe(1))
    first, last = torch.tensor([[[3, 7, 9]]]), torch.tensor([[[3, 7, 200]]])
    with torch.no_grad():
        statistics = [policy.statistics(inputs, actions, ActionSampling()) for actions in (first, last)]
        changed = policy.statistics(inputs, torch.tensor([[[90, 7, 9]]]), ActionSampling())
    assert torch.equal(statistics[0].logprobs[..., :2], statistics[1].logprobs[..., :2])
    assert torch.equal(statistics[0].entropies, statistics[1].entropies)
    assert (changed.entropies[..., 1:] - statistics[0].entropies[..., 1:]).abs().min() > 1e-6


def test_activation_checkpointing_changes_nothing(config: Experiment, policy: OpenVlaPolicy) -> None:
    checkpointed = load_action_policy(Path(str(config.policy.path)), config)
    enable_activation_checkpointing(checkpointed)
    inputs = policy.prepare(observe(2))
    samples = [each.sample(inputs, _uniforms(2), SAMPLING) for each in (policy, checkpointed)]
    assert torch.equal(samples[0].actions, samples[1].actions)
    gradients = []
    for each in (policy, checkpointed):
        each.zero_grad()
        each.statistics(inputs, samples[0].actions, SAMPLING).logprobs.sum().backward()
        gradients.append(each.vision_backbone.featurizer.blocks[0].attn.qkv.weight.grad.clone())
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_the_saved_policy_knows_its_kind(config: Experiment, policy: OpenVlaPolicy, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path / "again")
    without_kind = config.policy.model_copy(update={"kind": None})
    again = load_action_policy(tmp_path / "again", config.model_copy(update={"policy": without_kind}))
    inputs = policy.prepare(observe(2))
    assert isinstance(again, OpenVlaPolicy)
    samples = [each.sample(inputs, _uniforms(2), SAMPLING) for each in (policy, again)]
    assert torch.equal(samples[0].actions, samples[1].actions)
