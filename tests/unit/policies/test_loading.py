"""If these fail, a policy is loaded with another configuration or tokenizer than the one that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.config import load_experiment
from quintet.errors import ConfigError
from quintet.policies import tiny
from quintet.policies.causal_lm import load_model
from quintet.runtime.local import build


def test_overrides_lie_over_the_models_own_configuration(policy_directory: Path) -> None:
    assert load_model(policy_directory, overrides={"rms_norm_eps": 0.25}).config.rms_norm_eps == 0.25
    with pytest.raises(ConfigError, match="no such value") as error:
        load_model(policy_directory, overrides={"rms_norm_epss": 0.25})
    assert error.value.hint == "did you mean policy.overrides.rms_norm_eps?"


def test_another_tokenizer_is_taken_if_the_model_knows_its_tokens(policy_directory: Path, tmp_path: Path) -> None:
    small = tiny.make_tokenizer(300, ["system\nuser\nassistant\n Up Down"])
    small.save_pretrained(tmp_path / "small")
    large = tiny.make_tokenizer(300, ["system\nuser\nassistant\n Up Down"])
    large.add_tokens([f"<{number}>" for number in range(200)])
    large.save_pretrained(tmp_path / "large")
    words = ["policy.preset=null", f"policy.path={policy_directory}", "rollout.max_prompt_tokens=64"]
    taken = build(load_experiment(None, [*words, f"policy.tokenizer={tmp_path}/small"]).experiment, policy_directory)
    assert len(taken.tokenizer) == len(small)
    with pytest.raises(ConfigError, match="the model knows"):
        build(load_experiment(None, [*words, f"policy.tokenizer={tmp_path}/large"]).experiment, policy_directory)
