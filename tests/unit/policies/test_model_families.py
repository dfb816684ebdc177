"""If these fail, models of a family of transformers are computed wrongly without a word, or end in a traceback."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quintet.config.native.policy import LoraConfig
from quintet.config.plan.model_support import model_support, unsupported_features
from quintet.errors import MachineError, UserError
from quintet.policies import model_loading
from quintet.policies.attention import PackedLayout
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.lora import add_lora, is_adapter_name
from quintet.policies.model_check import own_attention
from quintet.policies.model_loading import enable_activation_checkpointing, load_model
from quintet.rollout.engines.hf.engine import HfEngine
from quintet.rollout.engines.hf.engine_check import check_engine
from support.tiny_families import NOT_BUILT, save_tiny_model

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
REFUSED = {family: feature for feature, families in model_support()["families"].items() for family in families}
TESTED = [family for family in model_support()["tested"] if family in FAMILIES]
BUILT = [family for family in REFUSED if family in FAMILIES and family not in NOT_BUILT]
RIGHT_SINCE = {"moshi": "5.24"}
"""Refused families that later releases of transformers compute by their attention interface."""
LENGTHS = (11, 5, 8)
build_engine = partial(HfEngine, max_num_seqs=3)


def test_every_family_of_transformers_is_in_the_table_once() -> None:
    """The table also has families that releases before 5.24 lack."""
    named = [*REFUSED, *model_support()["tested"]]
    assert len(set(named)) == len(named)
    assert set(FAMILIES) <= set(named)


@pytest.mark.parametrize("family", TESTED)
def test_a_supported_family_is_computed_as_by_transformers(family: str, tmp_path: Path) -> None:
    save_tiny_model(family, tmp_path)
    model = load_model(tmp_path)
    add_lora(model, LoraConfig(rank=2))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    check_engine(model, lambda miniature, length: build_engine(miniature, max_model_len=length))
    sequences = _sequences()
    with own_attention(model):
        expected = _gradients(model, [model(input_ids=tokens[None]).logits[0] for tokens in sequences], sequences)
    if model.supports_gradient_checkpointing:
        enable_activation_checkpointing(model)
    gradients = _gradients(model, _packed_logits(model, sequences), sequences)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-4 * largest, rtol=1e-3)


def _sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(96, (length,), generator=generator) for length in LENGTHS]


def _packed_logits(model: Any, sequences: list[Tensor]) -> list[Tensor]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    layout = PackedLayout(torch.tensor(LENGTHS))
    states = compute_hidden_states(model.model, torch.cat(sequences), positions, layout)
    return list(torch.split(model.lm_head(states), LENGTHS))


def _gradients(model: Any, logits: list[Tensor], sequences: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of the adapters for the sequences' log-probs."""
    losses = [
        torch.nn.functional.cross_entropy(each[:-1], tokens[1:]) for each, tokens in zip(logits, sequences, strict=True)
    ]
    model.zero_grad()
    torch.stack(losses).sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if is_adapter_name(name) and parameter.grad is not None
    }


@pytest.mark.parametrize(
    "family", [family for family in BUILT if Version(version("transformers")) < Version(RIGHT_SINCE.get(family, "99"))]
)
def test_a_refused_family_is_named_and_does_not_pass_the_check(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(family, tmp_path)
    with pytest.raises(MachineError, match=REFUSED[family].replace("'", ".")):
        load_model(tmp_path)
    monkeypatch.setattr(model_loading, "unsupported_reason", lambda _: None)
    with pytest.raises(UserError):
        check_engine(load_model(tmp_path), lambda miniature, length: build_engine(miniature, max_model_len=length))


@pytest.mark.parametrize("family", NOT_BUILT)
def test_a_family_that_cannot_be_built_small_is_refused_by_name(family: str) -> None:
    assert REFUSED[family] in unsupported_features({"model_type": family})
