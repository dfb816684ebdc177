"""If these fail, the engine writes with another model than the learner trains."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quintet.config.native.policy import LoraConfig
from quintet.policies import inference_decoder
from quintet.policies.attention import PackedLayout, register_attention
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.inference_decoder import InferenceDecoder, fuse_projections
from quintet.policies.lora import add_lora
from quintet.policies.model_loading import load_model

SHAPE = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Llama": {"attention_bias": True, "mlp_bias": False},
    "Mistral": {"sliding_window": None, "head_dim": 8},
}


def body_of(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SHAPE | FAMILIES[family] | changes)
    config._attn_implementation = register_attention()
    body = getattr(transformers, f"{family}Model")(config)
    for parameter in body.parameters():
        # norms and biases begin at ones and zeros, which would hide that they are left out
        nn.init.normal_(parameter, std=0.3)
    return body.to(dtype).eval()


def both(decoder: InferenceDecoder, body: nn.Module) -> tuple[Tensor, Tensor]:
    tokens, lengths = torch.arange(30) * 7 % 90, torch.tensor([11, 1, 18])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    with torch.inference_mode():
        theirs = compute_hidden_states(body, tokens, positions, PackedLayout(lengths))
    return decoder(tokens, positions, PackedLayout(lengths)).clone(), theirs


@pytest.fixture(params=["compiled", "torch"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(inference_decoder, "decode_kernels", lambda *_: None)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_modules_compute(family: str) -> None:
    body = body_of(family)
    decoder = InferenceDecoder.from_body(body)
    assert decoder is not None
    ours, theirs = both(decoder, body)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    again, _ = both(decoder, body)
    assert torch.equal(ours, again)


def products(decoder: InferenceDecoder, body: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often matrices are multiplied in a pass."""
    calls, multiply = [0], inference_decoder._linear

    def counted(*arguments: Tensor) -> Tensor:
        calls[0] += 1
        return multiply(*arguments)

    monkeypatch.setattr(inference_decoder, "_linear", counted)
    both(decoder, body)
    monkeypatch.setattr(inference_decoder, "_linear", multiply)
    return calls[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_lie_together_make_one_product_of_the_same_numbers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they stay the parameters that they are: what is written into them is seen, and one that moves is found."""
    body = body_of(family)
    decoder = InferenceDecoder.from_body(body)
    assert decoder is not None
    before, _ = both(decoder, body)
    kept = {name: parameter.clone() for name, parameter in body.named_parameters()}
    apart = products(decoder, body, monkeypatch)
    fuse_projections(body)
    assert all(torch.equal(parameter, kept[name]) for name, parameter in body.named_parameters())
    assert (apart, products(decoder, body, monkeypatch)) == (10, 4)
    torch.testing.assert_close(both(decoder, body)[0], before, atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.mul_(1.5)
    ours, theirs = both(decoder, body)
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)
    body.layers[0].self_attn.k_proj.weight.data = torch.zeros_like(kept["layers.0.self_attn.k_proj.weight"])  # type: ignore[index, union-attr]
    ours, theirs = both(decoder, body)
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-4)


def test_biases_that_some_layers_have_and_others_havent_are_added() -> None:
    body = body_of("Qwen2")
    fuse_projections(body)
    for layer in body.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj.bias = None
        layer.self_attn.k_proj.bias = nn.Parameter(layer.self_attn.k_proj.bias.detach().clone())
    decoder = InferenceDecoder.from_body(body)
    assert decoder is not None
    torch.testing.assert_close(*both(decoder, body), atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("_kernels")
def test_in_bfloat16_it_is_as_near_as_that_type_is() -> None:
    body = body_of("Qwen2", torch.bfloat16)
    decoder = InferenceDecoder.from_body(body)
    assert decoder is not None
    ours, theirs = both(decoder, body)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 0.05


def test_new_weights_are_seen_however_they_come() -> None:
    body = body_of("Qwen2")
    decoder = InferenceDecoder.from_body(body)
    assert decoder is not None
    before, _ = both(decoder, body)
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.mul_(1.5)
    in_place, theirs = both(decoder, body)
    torch.testing.assert_close(in_place, theirs, atol=5e-5, rtol=1e-4)
    for parameter in body.parameters():
        parameter.data = parameter.data * 0.5
    elsewhere, theirs = both(decoder, body)
    torch.testing.assert_close(elsewhere, theirs, atol=5e-5, rtol=1e-4)
    assert not torch.allclose(before, in_place)
    assert not torch.allclose(in_place, elsewhere)


def test_a_model_of_another_kind_keeps_its_modules() -> None:
    from transformers import GemmaConfig, GemmaModel

    config = GemmaConfig(**SHAPE | {"head_dim": 8})
    config._attn_implementation = register_attention()
    assert InferenceDecoder.from_body(GemmaModel(config)) is None
    assert InferenceDecoder.from_body(body_of("Qwen2", hidden_act="gelu")) is None
    assert InferenceDecoder.from_body(body_of("Mistral", sliding_window=16)) is None


def test_hooks_are_not_passed_by() -> None:
    body = body_of("Qwen2")
    body.get_submodule("layers.1.mlp").register_forward_hook(lambda *_: None)
    assert InferenceDecoder.from_body(body) is None


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("modules", [("all-linear",), ("q_proj", "down_proj", "embed_tokens")])
def test_adapters_are_not_passed_by(policy_directory: Path, modules: tuple[str, ...]) -> None:
    model = load_model(policy_directory)
    model.config.tie_word_embeddings = False
    before = both(InferenceDecoder.from_body(model.model), model.model)[0]
    add_lora(model, LoraConfig(rank=2, alpha=3.0, target_modules=modules))
    decoder = InferenceDecoder.from_body(model.model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    ours, theirs = both(decoder, model.model)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert float((ours - before).abs().max()) > 0.1


def test_a_model_that_does_something_else_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Known by name, and yet its norm isn't that of the others: a later transformers may do such a thing."""
    body = body_of("Qwen2")
    kind = type(body.get_submodule("layers.0.input_layernorm"))

    class Other(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor) -> Tensor:
            out: Tensor = super().forward(hidden_states) + 1
            return out

    body.get_submodule("layers.0.input_layernorm").__class__ = Other
    with caplog.at_level(logging.WARNING):
        assert InferenceDecoder.from_body(body) is None
    assert "Qwen2Model differs from its supported architecture" in caplog.text
