"""If these fail, published OpenVLA-OFT policies do not load, act differently from RLinf's, or are trained wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.openvla_directories import Sizes, published_tensors, write_openvla_directory
from tests.support.robot_policies import observe, robot_experiment

from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSampling
from quintet.errors import ConfigError, MachineError
from quintet.policies.vla.build import load_action_policy
from quintet.policies.vla.openvla_config import OpenVlaConfig
from quintet.policies.vla.openvla_modules import INITIAL_LOG_STD, ProprioProjector, RegressionHead
from quintet.policies.vla.openvla_oft import OpenVlaOftPolicy

CHUNK, ACTION_DIM = 2, 3
VLA = {"action_chunk": CHUNK, "action_dim": ACTION_DIM, "normalization_key": "libero_spatial"}
PROMPT_TOKENS = 90
SAMPLING = ActionSampling(temperature=1.6, top_k=40)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openvla") / "policy"
    write_openvla_directory(path)
    return path


def _experiment(directory: Path, vla: dict[str, Any] | None = None, **policy: Any) -> Experiment:
    section = {"preset": None, "path": str(directory), "kind": "openvla_oft", "vla": {**VLA, **(vla or {})}, **policy}
    return robot_experiment(section, rollout={"max_prompt_tokens": PROMPT_TOKENS})


@pytest.fixture(scope="module")
def policy(directory: Path) -> OpenVlaOftPolicy:
    return load_action_policy(directory, _experiment(directory))


def _uniforms(robots: int) -> torch.Tensor:
    return torch.rand((robots, CHUNK, ACTION_DIM), generator=torch.Generator().manual_seed(0))


def test_the_full_size_policy_has_the_tensors_of_the_published_checkpoint() -> None:
    with torch.device("meta"):
        policy = OpenVlaOftPolicy(OpenVlaConfig())
    shapes = {name: tuple(weight.shape) for name, weight in policy.state_dict().items()}
    assert shapes == published_tensors(Sizes())
    assert len(shapes) == 982
    assert sum(weight.numel() for weight in policy.parameters()) == 7_541_237_184


def test_a_published_directory_loads_and_a_saved_one_acts_the_same(directory: Path, tmp_path: Path) -> None:
    config = _experiment(directory, {"images": 2, "value_level": "action"})
    policy = load_action_policy(directory, config)
    stored = published_tensors(Sizes())
    assert set(stored) == {name for name in policy.state_dict() if not name.startswith("value_head.")}
    policy.save_pretrained(tmp_path / "again")
    again = load_action_policy(tmp_path / "again", config.model_copy(update={"seed": 7}))
    for name in ("dataset_statistics.json", "preprocessor_config.json"):
        files = [json.loads((each / name).read_text()) for each in (directory, tmp_path / "again")]
        assert files[0].items() <= {**files[1], "input_sizes": files[0].get("input_sizes")}.items()
    observation, uniforms = observe(3), _uniforms(3)
    samples = [each.sample(each.prepare(observation), uniforms, SAMPLING) for each in (policy, again)]
    assert torch.equal(samples[0].actions, samples[1].actions)
    assert torch.equal(samples[0].logprobs, samples[1].logprobs)
    assert torch.equal(samples[0].values, samples[1].values)
    assert samples[0].values.shape == (3, CHUNK)
    robot_actions = [each.to_robot_actions(samples[0].actions) for each in (policy, again)]
    assert np.array_equal(*robot_actions)


def test_every_slot_sees_all_others_and_no_slot_sees_padding(policy: OpenVlaOftPolicy) -> None:
    """Later slots and the prompt change the first slot; what stands at padded positions changes nothing."""
    inputs = policy.prepare(observe(2))
    logits, values = policy._forward(inputs)
    padded = torch.full_like(inputs["tokens"], 5)
    changed = {**inputs, "tokens": torch.where(inputs["mask"], inputs["tokens"], padded)}
    assert torch.allclose(policy._forward(changed)[0], logits, atol=1e-5)
    assert values.shape == (2, 1)
    seen: list[torch.Tensor] = []
    hook = policy.language_model.model.layers[-1].register_forward_pre_hook(
        lambda _, arguments: (arguments[0].retain_grad(), seen.append(arguments[0]))[-1]
    )
    policy._forward(inputs)[0][:, 0, 0].sum().backward()
    hook.remove()
    influence = seen[0].grad.abs().sum(-1)
    assert (influence[:, -CHUNK * ACTION_DIM :] > 0).all()
    padding = ~torch.cat([inputs["mask"][:, :1], inputs["mask"][:, 1:]], dim=1)
    assert (influence[:, 1 + 4 : -CHUNK * ACTION_DIM][padding[:, 1:]] == 0).all()
    policy.zero_grad()


def test_longer_prompts_are_padded_without_an_effect(policy: OpenVlaOftPolicy) -> None:
    logits = policy._forward(policy.prepare(observe(2)))[0]
    policy.config.max_prompt_length += 9
    longer = policy._forward(policy.prepare(observe(2)))[0]
    policy.config.max_prompt_length = PROMPT_TOKENS
    assert torch.allclose(longer, logits, atol=1e-4)


def test_prompts_are_those_of_rlinf(policy: OpenVlaOftPolicy) -> None:
    tokens, mask = policy.prompts.encode(["Lift the Cup"])
    tokenizer = policy.prompts.tokenizer
    assert tokens.shape == (1, PROMPT_TOKENS)
    padding = PROMPT_TOKENS - int(mask.sum())
    assert tokens[0, 0] == tokenizer.bos_token_id
    assert mask[0].tolist() == [True] + [False] * padding + [True] * (PROMPT_TOKENS - padding - 1)
    text = tokenizer.decode(tokens[0, padding + 1 :])
    assert text.strip(" ") == "In: What action should the robot take to lift the cup?\nOut:"
    assert tokenizer.convert_ids_to_tokens(int(tokens[0, -1])) == "▁"


def test_bins_and_statistics_are_those_of_rlinf(policy: OpenVlaOftPolicy) -> None:
    """Bin centers of linspace(-1, 1, 256), 0.5 (a + 1) (q99 - q01 + 1e-8) + q01, and the mask, computed by hand."""
    tokens = torch.tensor([[[0, 255, 127], [1, 254, 128]]])
    width = 2 / 255
    normalized = np.array([[[1 - width / 2, -1 + width / 2, 0.0 + width / 1], [1 - width / 2, -1 + 1.5 * width, 0.0]]])
    normalized[0, :, 2] = [width, 0.0]
    expected = np.stack([0.5 * normalized[..., 0], normalized[..., 1], normalized[..., 2]], axis=-1)
    actions = policy.to_robot_actions(tokens)
    assert np.allclose(actions, expected, atol=1e-6)
    again = policy.from_robot_actions(actions)
    assert np.allclose(policy.to_robot_actions(again), actions, atol=1e-6)


def test_statistics_are_of_the_distribution_that_was_sampled(policy: OpenVlaOftPolicy) -> None:
    inputs = policy.prepare(observe(5))
    with torch.no_grad():
        sample = policy.sample(inputs, _uniforms(5), SAMPLING)
        statistics = policy.statistics(inputs, sample.actions, SAMPLING)
        logits = policy._forward(inputs)[0]
    assert torch.allclose(sample.logprobs, statistics.logprobs, atol=1e-5)
    kept = (logits / SAMPLING.temperature).topk(SAMPLING.top_k).values
    expected = torch.distributions.Categorical(logits=kept)
    assert torch.allclose(statistics.entropies, expected.entropy(), atol=1e-4)
    greedy = policy.sample(inputs, None, ActionSampling(temperature=0.0))
    assert torch.equal(greedy.actions, logits.argmax(-1))


def test_gradients_reach_what_is_trained_and_spare_the_unused_layers(policy: OpenVlaOftPolicy) -> None:
    inputs = policy.prepare(observe(2))
    sample = policy.sample(inputs, _uniforms(2), SAMPLING)
    statistics = policy.statistics(inputs, sample.actions, SAMPLING)
    (statistics.logprobs.sum() + statistics.values.sum()).backward()
    without = {name for name, weight in policy.named_parameters() if weight.grad is None}
    frozen = {name for name, weight in policy.named_parameters() if not weight.requires_grad}
    assert without == frozen
    assert {name.split(".")[2] for name in frozen} == {"norm", "blocks", "attn_pool"}
    assert not [name for name in frozen if ".blocks." in name and ".23." not in name and ".26." not in name]


def test_the_regression_head_and_the_state_load_from_separate_files(tmp_path: Path) -> None:
    config = OpenVlaConfig(text_config={"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1})
    config.update({"action_dim": ACTION_DIM, "num_action_chunks": CHUNK, "proprio_dim": 4})
    config.update({"use_proprio": True, "action_head": "l1", "vision_towers": None})
    head, projector = RegressionHead(config), ProprioProjector(config)
    del head.log_std
    parts = {
        "action_head--10000_checkpoint.pt": {f"module.{name}": weight for name, weight in head.state_dict().items()},
        "proprio_projector--10000_checkpoint.pt": projector.state_dict(),
    }
    write_openvla_directory(tmp_path / "policy", parts=parts)
    experiment = _experiment(tmp_path / "policy", {"action_head": "l1", "use_proprioception": True, "state_dim": 4})
    policy = load_action_policy(tmp_path / "policy", experiment)
    assert torch.equal(policy.action_head.model.fc1.weight, head.model.fc1.weight)
    assert torch.equal(policy.proprio_projector.fc2.bias, projector.fc2.bias)
    inputs = policy.prepare(observe(3))
    assert float(inputs["state"].abs().max()) <= 1.0
    assert policy.action_head.log_std.tolist() == [INITIAL_LOG_STD] * ACTION_DIM
    sample = policy.sample(inputs, _uniforms(3), ActionSampling())
    statistics = policy.statistics(inputs, sample.actions, ActionSampling())
    assert torch.allclose(statistics.logprobs, sample.logprobs, atol=1e-5)
    policy.save_pretrained(tmp_path / "again")
    again = load_action_policy(tmp_path / "again", experiment)
    assert torch.equal(again.sample(inputs, _uniforms(3), ActionSampling()).actions, sample.actions)


def test_center_crop_and_resizing_change_only_the_image(policy: OpenVlaOftPolicy) -> None:
    plain = policy.prepare(observe(1, size=20))
    policy.config.center_crop = True
    cropped = policy.prepare(observe(1, size=20))
    policy.config.center_crop = False
    assert plain["images"].shape == cropped["images"].shape == (1, 1, 3, 14, 14)
    assert plain["images"].dtype is torch.uint8
    assert not torch.equal(plain["images"], cropped["images"])


def test_biases_eager_attention_and_more_tokens_leave_the_published_policy_as_it_is(
    policy: OpenVlaOftPolicy, directory: Path
) -> None:
    vla = {"qkv_bias": True, "linear_bias": True, "extra_vocabulary": 7}
    config = _experiment(directory, vla, attention="eager", vision={"freeze": True})
    other = load_action_policy(directory, config)
    inputs = other.prepare(observe(2))
    assert torch.allclose(other._forward(inputs)[0], policy._forward(inputs)[0], atol=1e-4)
    layer = other.language_model.model.layers[0]
    assert layer.self_attn.q_proj.bias is not None
    assert layer.mlp.down_proj.bias is not None
    assert len(other.prompts.tokenizer) == len(policy.prompts.tokenizer) + 7
    assert not any(weight.requires_grad for weight in other.vision_backbone.parameters())
    assert other.projector.fc1.weight.requires_grad


@pytest.mark.parametrize(
    ("vla", "policy", "error", "pattern"),
    [
        ({"normalization_key": "libero_spatia"}, {}, ConfigError, r"policy.vla.normalization_key = 'libero_spatia'"),
        ({"normalization_key": None}, {}, ConfigError, r"policy.vla.normalization_key is null"),
        ({"images": 3}, {}, ConfigError, r"policy.vla.images = 3, but the simulator has 2 cameras"),
        ({}, {"kind": None}, ConfigError, r"which several kinds of policies have"),
        ({}, {"kind": "mlp"}, ConfigError, r"to which policy.kind does not belong"),
        ({}, {"kind": "openvla_of"}, ConfigError, r"policy.kind = 'openvla_of'"),
        ({"hidden_size": 32}, {}, ConfigError, r"policy.vla.hidden_size = 32, but the policy has 16"),
        ({"vocabulary": 32000}, {}, ConfigError, r"policy.vla.vocabulary = 32000, but the policy has 576"),
        ({"image_size": (224, 224)}, {}, ConfigError, r"policy.vla.image_size = \[224, 224\], but .* has \[14, 14\]"),
        ({}, {"overrides": {"n_action_bin": 9}}, ConfigError, r"policy.overrides.n_action_bin: .* no such setting"),
        ({"action_head": "l1"}, {}, MachineError, r"lacks 16 weights of OpenVlaOftPolicy, such as action_head"),
        ({"use_proprioception": True}, {}, MachineError, r"such as proprio_projector"),
    ],
)
def test_what_does_not_fit_is_named(
    directory: Path, vla: dict[str, Any], policy: dict[str, Any], error: type[Exception], pattern: str
) -> None:
    with pytest.raises(error, match=pattern):
        _load_and_act(directory, _experiment(directory, vla, **policy))


def _load_and_act(directory: Path, config: Experiment) -> None:
    policy = load_action_policy(directory, config)
    policy.to_robot_actions(policy.sample(policy.prepare(observe(1)), None, SAMPLING).actions)
