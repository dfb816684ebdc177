"""If these fail, an engine computes in another type than the one that was asked for, without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quintet.config.compose import load_experiment
from quintet.errors import ConfigError, MachineError
from quintet.runtime.engines.engine_builders import engine_dtype, policy_dtype


def test_the_type_is_the_engines_own_the_policys_or_the_models(tmp_path: Path) -> None:
    def stored_policy_dtype(stored: str, *overrides: str) -> torch.dtype:
        (tmp_path / "config.json").write_text(json.dumps({"dtype": stored}))
        return engine_dtype(load_experiment(None, list(overrides)).experiment, tmp_path)

    auto = "rollout.engine_options.dtype=auto"
    assert stored_policy_dtype("bfloat16") is torch.float32
    assert stored_policy_dtype("float32", "policy.dtype=bfloat16") is torch.bfloat16
    assert (
        stored_policy_dtype("float32", "policy.dtype=bfloat16", "rollout.engine_options.dtype=float32") is torch.float32
    )
    assert stored_policy_dtype("bfloat16", auto) is torch.bfloat16
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        stored_policy_dtype("float8_e4m3fn", auto)


def test_a_run_that_goes_on_computes_in_the_type_it_began_with(tmp_path: Path) -> None:
    began, checkpoint = tmp_path / "model", tmp_path / "global_step_3/hf"
    for place, stored in ((began, "bfloat16"), (checkpoint, "float32")):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps({"dtype": stored}))
    tokenizer = [f"policy.path={began}", "policy.preset=null", "rollout.engine_options.dtype=auto", "policy.dtype=auto"]
    config = load_experiment(None, tokenizer).experiment
    assert engine_dtype(config, began) is engine_dtype(config, checkpoint) is torch.bfloat16
    assert policy_dtype(config) is torch.bfloat16
    (began / "config.json").unlink()
    for told in (lambda: engine_dtype(config, checkpoint), lambda: policy_dtype(config)):
        with pytest.raises(MachineError, match=r"dtype = auto is the dtype .* there is no .*model/config\.json"):
            told()
