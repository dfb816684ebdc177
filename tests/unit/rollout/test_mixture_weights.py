"""If these fail, vLLM and SGLang can't be given the experts of a mixture, or get them in another order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from quintet.policies.causal_lm import load_model
from quintet.policies.file_names import in_files
from quintet.rollout.engine import EngineFault
from quintet.rollout.sglang_weights import Names
from quintet.rollout.vllm_weights import WeightPlan


@pytest.fixture(scope="module")
def model(mixture_directory: Path) -> PreTrainedModel:
    return load_model(mixture_directory)


@pytest.fixture(scope="module")
def stored(mixture_directory: Path) -> dict[str, Tensor]:
    return load_file(mixture_directory / "model.safetensors")


def test_weights_have_the_names_of_the_models_files(model: PreTrainedModel, stored: dict[str, Tensor]) -> None:
    found = dict(in_files(model, model.named_parameters()))
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in found
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


def test_vllm_is_given_those_once_they_are_whole(model: PreTrainedModel, stored: dict[str, Tensor]) -> None:
    plan = WeightPlan.of(model)
    assert plan.take(model.named_parameters()).keys() == stored.keys()
    with pytest.raises(EngineFault, match=r"lack 'model.layers.0.mlp.experts.down_proj'"):
        plan.take(one for one in model.named_parameters() if not one[0].endswith("0.mlp.experts.down_proj"))


def test_sglang_is_given_those(model: PreTrainedModel, stored: dict[str, Tensor], mixture_directory: Path) -> None:
    names = Names.of(SimpleNamespace(model=model, directory=mixture_directory))  # type: ignore[arg-type]
    assert dict(names.checked(in_files(model, model.named_parameters()))).keys() == stored.keys()
