"""If these fail, weight sync of mixture-of-experts models to vLLM or SGLang fails or mixes up experts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from quintet.policies.hf_weight_names import hf_named_weights
from quintet.policies.model_loading import load_model
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.sglang.weight_sync import WeightNames
from quintet.rollout.engines.vllm.weight_sync import WeightPlan


@pytest.fixture(scope="module")
def model(mixture_directory: Path) -> PreTrainedModel:
    return load_model(mixture_directory)


@pytest.fixture(scope="module")
def stored(mixture_directory: Path) -> dict[str, Tensor]:
    return load_file(mixture_directory / "model.safetensors")


def test_synced_weights_have_the_names_of_the_models_files(model: PreTrainedModel, stored: dict[str, Tensor]) -> None:
    actual = dict(hf_named_weights(model, model.named_parameters()))
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in actual
    assert actual.keys() == stored.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in stored.items())


def test_vllm_accepts_only_complete_weights(model: PreTrainedModel, stored: dict[str, Tensor]) -> None:
    plan = WeightPlan.from_model(model)
    assert plan.collect(model.named_parameters()).keys() == stored.keys()
    with pytest.raises(EngineError, match=r"lacks 'model.layers.0.mlp.experts.down_proj'"):
        plan.collect(
            named_parameter
            for named_parameter in model.named_parameters()
            if not named_parameter[0].endswith("0.mlp.experts.down_proj")
        )


def test_sglang_accepts_these_names(model: PreTrainedModel, stored: dict[str, Tensor], mixture_directory: Path) -> None:
    names = WeightNames.from_setup(SimpleNamespace(model=model, directory=mixture_directory))  # type: ignore[arg-type]
    assert dict(names.check(hf_named_weights(model, model.named_parameters()))).keys() == stored.keys()
