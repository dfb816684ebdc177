"""If these fail, an action policy is built with other settings than its run has."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.errors import ConfigError
from quintet.policies.vla.openvla_config import OpenVlaConfig
from quintet.policies.vla.policy_settings import apply_settings, run_settings


def robot_run(vla: str, *overrides: str) -> Experiment:
    return load_experiment(None, ["env.name=simulator", f"policy.vla={{{vla}}}", *overrides]).experiment


SETTINGS = {
    "action_dim: 5": ("action_dim", 5),
    "action_chunk: 3": ("num_action_chunks", 3),
    "use_proprioception: true": ("use_proprio", True),
    "state_dim: 4": ("proprio_dim", 4),
    "normalization_key: mine": ("unnorm_key", "mine"),
    "normalization_bounds: range": ("normalization_bounds", "range"),
    "images: 2": ("num_images_in_input", 2),
    "center_crop: true": ("center_crop", True),
    "action_head: l1": ("action_head", "l1"),
}


@pytest.mark.parametrize(("vla", "expected"), SETTINGS.items())
def test_a_setting_reaches_the_configuration_of_the_policy(vla: str, expected: tuple[str, Any]) -> None:
    assert run_settings(robot_run(vla), is_mlp=False) == dict([expected])


def test_the_sizes_of_a_run_reach_an_mlp() -> None:
    vla = "action_dim: 5, action_chunk: 3, state_dim: 4, hidden_size: 16"
    expected = {"action_dim": 5, "num_action_chunks": 3, "obs_dim": 4, "hidden_dim": 16}
    assert run_settings(robot_run(vla), is_mlp=True) == expected


def test_biases_reach_the_language_model_and_other_sizes_than_those_of_the_weights_are_refused() -> None:
    language_model = LlamaConfig(vocab_size=64, hidden_size=8, num_attention_heads=2)
    model = OpenVlaConfig(text_config=language_model.to_dict())
    apply_settings(model, robot_run("qkv_bias: true, linear_bias: true"), is_mlp=False, is_published=False)
    assert (language_model_of(model).attention_bias, language_model_of(model).mlp_bias) == (True, True)
    for vla, key in {
        "vocabulary: 7": "vocabulary",
        "hidden_size: 7": "hidden_size",
        "image_size: [7, 7]": "image_size",
    }.items():
        with pytest.raises(ConfigError, match=rf"policy\.vla\.{key} = .*, but the policy has"):
            apply_settings(model, robot_run(vla), is_mlp=False, is_published=False)


def language_model_of(model: OpenVlaConfig) -> Any:
    return model.get_text_config()
