"""If these fail, small policies of robots are not created as configured, do not load again, or cannot be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from robot_policies import build_action_policy
from tests.support.robot_policies import ACTION_DIM, observe, robot_experiment

from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSampling
from quintet.policies.vla.build import create_action_preset, load_action_policy
from quintet.policies.vla.openvla import OpenVlaPolicy
from quintet.training.checkpoint.hf_directory import HfDirectory

PRESETS = ("arm-vla", "state-mlp")
SMALL = {"layers": 2, "bins": 32, "hidden": 64}
SAMPLING = ActionSampling(temperature=0.7)


def _experiment(preset: str, **vla: Any) -> Experiment:
    overrides = SMALL if preset == "arm-vla" else {"hidden": 32}
    return robot_experiment({"preset": preset, "overrides": overrides, "vla": {"action_chunk": 3, **vla}})


def _uniforms(policy: Any, robots: int) -> torch.Tensor:
    shape = (robots, policy.action_chunk, policy.action_dim)
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_saved_preset_loads_and_acts_the_same(preset: str, tmp_path: Path) -> None:
    config = _experiment(preset)
    create_action_preset(tmp_path / "policy", config, seed=5)
    first, second = (load_action_policy(tmp_path / "policy", config) for _ in range(2))
    first.save_pretrained(tmp_path / "again")
    third = load_action_policy(tmp_path / "again", config)
    observation = observe(6)
    uniforms = _uniforms(first, 6)
    samples = [each.sample(each.prepare(observation), uniforms, SAMPLING) for each in (first, second, third)]
    assert samples[0].actions.shape == (6, 3, ACTION_DIM)
    assert samples[0].values is not None
    assert samples[0].values.shape == (6, 1)
    for sample in samples[1:]:
        assert torch.equal(sample.actions, samples[0].actions)
        assert torch.equal(sample.logprobs, samples[0].logprobs)
        assert sample.values is not None
        assert torch.equal(sample.values, samples[0].values)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_seed_of_a_run_determines_the_weights(preset: str) -> None:
    config = _experiment(preset)
    states = [build_action_policy(config.model_copy(update={"seed": seed})).state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


@pytest.mark.parametrize("preset", PRESETS)
def test_training_reaches_every_weight(preset: str) -> None:
    policy = build_action_policy(_experiment(preset, value_level="action", **_proprioception(preset)))
    inputs = policy.prepare(observe(4))
    actions = policy.sample(inputs, _uniforms(policy, 4), SAMPLING).actions
    statistics = policy.statistics(inputs, actions, SAMPLING)
    assert statistics.values.shape == (4, 3)
    (statistics.logprobs.sum() + statistics.entropies.sum() + statistics.values.sum()).backward()
    trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    assert not [name for name, weight in trained.items() if weight.grad is None or not weight.grad.any()]


def _proprioception(preset: str) -> dict[str, Any]:
    return {"use_proprioception": True} if preset == "arm-vla" else {}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_robot_acts_the_same_in_any_batch_and_training_sees_the_sampled_log_probs(preset: str) -> None:
    policy = build_action_policy(_experiment(preset))
    inputs, uniforms = policy.prepare(observe(9)), _uniforms(policy, 9)
    with torch.no_grad():
        sample = policy.sample(inputs, uniforms, SAMPLING)
        alone = policy.sample({name: tensor[4:5] for name, tensor in inputs.items()}, uniforms[4:5], SAMPLING)
        statistics = policy.statistics(inputs, sample.actions, SAMPLING)
    assert torch.allclose(alone.actions, sample.actions[4:5], atol=1e-6)
    assert torch.allclose(statistics.logprobs, sample.logprobs, atol=1e-5)
    assert torch.allclose(statistics.values, sample.values, atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_policy_runs_in_bfloat16(preset: str) -> None:
    policy = build_action_policy(_experiment(preset))
    inputs = policy.prepare(observe(4))
    expected = policy.sample(inputs, None, SAMPLING)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = policy.statistics(inputs, expected.actions, SAMPLING)
    cast = policy.to(torch.bfloat16).statistics(inputs, expected.actions, SAMPLING)
    for statistics in (mixed, cast):
        assert statistics.logprobs.dtype is torch.float32
        assert torch.allclose(statistics.logprobs, expected.logprobs, atol=0.1)


def test_bins_cover_the_range_of_the_preset() -> None:
    config = robot_experiment({"preset": "arm-vla", "overrides": {**SMALL, "action_range": 0.5}})
    policy = build_action_policy(config)
    actions = np.linspace(-0.5, 0.5, 24, dtype=np.float32).reshape(3, 4, 2)
    decoded = policy.to_robot_actions(policy.from_robot_actions(actions))
    assert np.abs(decoded - actions).max() <= 0.5 / (SMALL["bins"] - 1) + 1e-6
    assert np.array_equal(policy.from_robot_actions(decoded), policy.from_robot_actions(actions))


def test_the_instruction_selects_what_is_seen_in_an_image() -> None:
    changes = {}
    for film in (True, False):
        policy = build_action_policy(robot_experiment({"preset": "arm-vla", "overrides": {**SMALL, "film": film}}))
        first, second = (policy.prepare(observe(2, [text] * 2)) for text in ("touch red", "touch blue"))
        image = slice(1, 1 + policy.config.towers[0].num_tokens)
        embeddings = [policy._embed_prompt(inputs)[0][:, image] for inputs in (first, second)]
        changes[film] = (embeddings[0] - embeddings[1]).norm() / embeddings[0].norm()
    assert changes[False] == 0
    assert changes[True] > 0.1


def test_the_images_of_an_empty_table_are_zero_and_patches_know_where_they_are() -> None:
    policy = build_action_policy(robot_experiment({"preset": "arm-vla", "overrides": {**SMALL, "patch": 8}}))
    (tower,) = policy.vision_backbone.towers
    seen = []
    tower.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0]))
    policy.vision_backbone(torch.full((1, 1, 3, 32, 32), 230, dtype=torch.uint8))
    assert seen[0].abs().max() < 0.02
    positions = tower.pos_embed[0].detach()
    assert positions.square().mean() == pytest.approx(0.5, abs=0.1)
    assert torch.cdist(positions, positions).fill_diagonal_(10.0).min() > 1.0


def test_the_kind_selects_action_tokens_one_after_another() -> None:
    policy_section = {"preset": "arm-vla", "overrides": {"layers": 2}, "kind": "openvla", "vla": {"hidden_size": 32}}
    policy = build_action_policy(robot_experiment(policy_section))
    assert isinstance(policy, OpenVlaPolicy)
    assert policy.config.language_size == 32
    inputs = policy.prepare(observe(3))
    sample = policy.sample(inputs, _uniforms(policy, 3), SAMPLING)
    statistics = policy.statistics(inputs, sample.actions, SAMPLING)
    assert torch.allclose(statistics.logprobs, sample.logprobs, atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_checkpoint_of_a_run_loads_and_acts_the_same(preset: str, tmp_path: Path) -> None:
    config = _experiment(preset)
    policy = build_action_policy(config)
    HfDirectory.from_model(policy).write(tmp_path, "hf", dict(policy.named_parameters()))
    again = load_action_policy(tmp_path / "hf", config)
    inputs = policy.prepare(observe(3))
    samples = [each.sample(inputs, _uniforms(policy, 3), SAMPLING) for each in (policy, again)]
    assert torch.equal(samples[0].actions, samples[1].actions)
    for name, tensor in again.prepare(observe(3)).items():
        assert torch.equal(tensor, inputs[name])
