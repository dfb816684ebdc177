"""If these fail, a model that this version computes wrongly is trained or sampled without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from quintet.config.native.policy import LoraConfig
from quintet.errors import MachineError, UserError
from quintet.policies import (
    attention,
    hidden_states,
    inference_decoder,
    model_check,
    model_loading,
    output_head,
    training_decoder,
)
from quintet.policies.attention import PackedLayout
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.inference_decoder import InferenceDecoder
from quintet.policies.lora import add_lora
from quintet.policies.model_check import build_miniature, reference_logits
from quintet.policies.model_loading import load_model
from quintet.policies.vision.image_encoder import MODEL_TYPES
from quintet.rollout.engines.hf import paged_attention, paged_cache, running_batch
from quintet.rollout.engines.hf.engine import HfEngine
from quintet.rollout.engines.hf.engine_check import check_engine
from support.tiny_families import save_tiny_model

Patch = Callable[[pytest.MonkeyPatch], None]


def leaking(patch: pytest.MonkeyPatch) -> None:
    """All tokens of a pass are one sequence, for the modules and for the kernels."""
    joined, descriptor = PackedLayout.attend, PackedLayout.kernel_descriptor

    def joined_layout(layout: PackedLayout) -> PackedLayout:
        parts = layout.structure
        stems = 0 if parts.stems is None else int(parts.stems.sum())
        return PackedLayout(torch.tensor([parts.prefix + stems + int(parts.branches.sum())]))

    patch.setattr(PackedLayout, "attend", lambda self, *a: joined(joined_layout(self), *a))
    patch.setattr(PackedLayout, "kernel_descriptor", lambda self, *a: descriptor(joined_layout(self), *a))


def without_window(patch: pytest.MonkeyPatch) -> None:
    masks = PackedLayout._masks
    patch.setattr(PackedLayout, "_masks", lambda self, _: masks(self, None))


def with_wider_window(patch: pytest.MonkeyPatch) -> None:
    masks = PackedLayout._masks
    patch.setattr(PackedLayout, "_masks", lambda self, window: masks(self, window and window + 1))


def with_continued_positions(patch: pytest.MonkeyPatch) -> None:
    """Positions count on from one sequence to the next."""

    def continued(position_ids: Tensor) -> Tensor:
        return torch.arange(len(position_ids))[None]

    patch.setattr(hidden_states, "batched_positions", continued)
    patch.setattr(training_decoder, "batched_positions", continued)


def with_another_scale(patch: pytest.MonkeyPatch) -> None:
    layer = attention._attention

    def scaled(*arguments: Any, scaling: float, **options: Any) -> Any:
        return layer(*arguments, scaling=1.1 * scaling, **options)

    patch.setattr(model_loading, "register_attention", partial(register, scaled))
    patch.setattr(model_check, "register_attention", partial(register, scaled))


def register(function: Callable[..., Any]) -> str:
    from transformers import AttentionInterface

    AttentionInterface.register("altered", function)
    return "altered"


def without_biases(patch: pytest.MonkeyPatch) -> None:
    weights = training_decoder._layer_weights

    def unbiased(layer: Any) -> tuple[Tensor, ...]:
        parts = weights(layer)
        return (*parts[:5], *(part[:0] for part in parts[5:8]), *parts[8:])

    patch.setattr(training_decoder, "_layer_weights", unbiased)


def without_norms(patch: pytest.MonkeyPatch) -> None:
    weights = training_decoder._layer_weights
    patch.setattr(training_decoder, "_layer_weights", lambda layer: (torch.ones(64), *weights(layer)[1:]))


def without_soft_cap(patch: pytest.MonkeyPatch) -> None:
    options = attention.AttentionOptions
    patch.setattr(attention, "AttentionOptions", lambda backend, softcap, sinks: options(backend, None, sinks))


def without_sinks(patch: pytest.MonkeyPatch) -> None:
    options = attention.AttentionOptions
    patch.setattr(attention, "AttentionOptions", lambda backend, softcap, sinks: options(backend, softcap))


def without_logit_transform(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(output_head.LogitTransform, "apply", lambda _, logits: logits)


@pytest.mark.parametrize(
    ("family", "settings", "broken"),
    [
        ("llama", {}, leaking),
        ("qwen3", {}, leaking),
        ("mistral", {"sliding_window": 4096}, without_window),
        ("gemma3_text", {}, without_window),
        ("gemma3_text", {}, with_wider_window),
        ("qwen2", {}, with_continued_positions),
        ("qwen3_moe", {}, with_continued_positions),
        ("qwen3", {}, with_another_scale),
        ("qwen2", {}, without_biases),
        ("llama", {}, without_norms),
        ("gemma2", {}, without_soft_cap),
        ("gpt_oss", {}, without_sinks),
        ("granite", {}, without_logit_transform),
        ("nanochat", {}, without_logit_transform),
    ],
)
def test_a_decoder_that_computes_something_else_is_refused(
    family: str, settings: dict[str, Any], broken: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(family, tmp_path, **settings)
    broken(monkeypatch)
    with pytest.raises(MachineError, match=r"is not supported: (hidden states|logits of packed sequences) up to"):
        load_model(tmp_path)


def decoding_without_window(patch: pytest.MonkeyPatch) -> None:
    widen_window(patch, is_decoding=True)


def prefilling_without_window(patch: pytest.MonkeyPatch) -> None:
    widen_window(patch, is_decoding=False)


def widen_window(patch: pytest.MonkeyPatch, *, is_decoding: bool) -> None:
    attend = paged_attention._attend_part

    def widened(layout: Any, part: slice, stored: Any, qkv: Any, scale: float, window: int | None) -> Any:
        is_wider = window is not None and (layout.counts[part] == 1).all() == is_decoding
        return attend(layout, part, stored, qkv, scale, window + 1 if window is not None and is_wider else window)

    patch.setattr(paged_attention, "_attend_part", widened)


def decoding_a_position_late(patch: pytest.MonkeyPatch) -> None:
    tokens = running_batch.RunningBatch.tokens.fget
    assert tokens is not None
    patch.setattr(running_batch.RunningBatch, "tokens", property(lambda self: (tokens(self)[0], tokens(self)[1] + 1)))


def forgetting_the_prefix(patch: pytest.MonkeyPatch) -> None:
    open_sequence = paged_cache.PagedCache.open

    def forgetful(self: Any, tokens: tuple[int, ...]) -> Any:
        sequence = open_sequence(self, tokens)
        self.tables[sequence.row, 0] = sequence.path[-1].block
        return sequence

    patch.setattr(paged_cache.PagedCache, "open", forgetful)


def without_adapters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inference_decoder._Linear, "_add_adapter", lambda _self, _inputs, out: out)
    patch.setattr(InferenceDecoder, "_probe_difference", lambda _: 0.0)


def with_another_head(patch: pytest.MonkeyPatch) -> None:
    from quintet.rollout.engines.hf import engine

    head = engine.apply_head
    patch.setattr(engine, "apply_head", lambda *arguments, **options: 1.01 * head(*arguments, **options))


@pytest.mark.parametrize(
    ("family", "broken"),
    [
        ("mistral", decoding_without_window),
        ("mistral", prefilling_without_window),
        ("llama", decoding_a_position_late),
        ("qwen3_moe", decoding_a_position_late),
        ("llama", forgetting_the_prefix),
        ("qwen2", without_adapters),
        ("qwen3", with_another_head),
    ],
)
def test_an_engine_that_computes_something_else_is_refused(
    family: str, broken: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(family, tmp_path)
    model = load_model(tmp_path)
    add_lora(model, LoraConfig(rank=2))
    build = partial(HfEngine, max_num_seqs=3)
    check_engine(model, lambda miniature, length: build(miniature, max_model_len=length))
    broken(monkeypatch)
    with pytest.raises(MachineError, match="log-probs of sampled tokens differ"):
        check_engine(model, lambda miniature, length: build(miniature, max_model_len=length))


def test_the_check_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    save_tiny_model("gemma3_text", tmp_path)
    model = load_model(tmp_path)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    check_engine(model, lambda miniature, length: HfEngine(miniature, max_num_seqs=3, max_model_len=length))
    assert all(
        torch.equal(weight, other) for weight, other in zip(model.parameters(), stored.parameters(), strict=True)
    )
    assert len(model.model.layers) == len(stored.model.layers)
    same = {key: value for key, value in model.config.to_dict().items() if "attn" not in key}
    assert same == {key: value for key, value in stored.config.to_dict().items() if "attn" not in key}
    assert model.config._attn_implementation == "quintet"


def test_a_miniature_has_every_kind_of_layer_and_the_weights(tmp_path: Path) -> None:
    save_tiny_model("gemma3_text", tmp_path)
    model = load_model(tmp_path)
    miniature = build_miniature(model)
    assert miniature.model.embed_tokens.weight.shape[0] == model_check.VOCABULARY
    windows = {layer.self_attn.sliding_window for layer in miniature.model.layers}
    assert windows == {model_check.WINDOW, None}
    weights = (layer.mlp.up_proj.weight for layer in (model.model.layers[0], miniature.model.layers[0]))
    assert len({weight.data_ptr() for weight in weights}) == 1


@pytest.mark.parametrize("window", [3, 7])
def test_a_window_given_as_override_is_computed(window: int, tmp_path: Path) -> None:
    save_tiny_model("mistral", tmp_path, sliding_window=None)
    model = load_model(tmp_path, overrides={"sliding_window": window})
    tokens = torch.randint(96, (20,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        layout = PackedLayout(torch.tensor([20]))
        logits = model.lm_head(compute_hidden_states(model.model, tokens, torch.arange(20), layout))
    torch.testing.assert_close(logits, reference_logits(model, [tokens])[0], atol=1e-5, rtol=1e-4)
    unlimited = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=tokens[None]).logits[0]
    assert (logits[-1] - unlimited[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_sequences_at_which_rotary_embeddings_change_are_refused(rope: str, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0, **(factors if rope == "longrope" else {})}
    save_tiny_model("llama", tmp_path, rope_parameters=parameters, max_position_embeddings=32)
    model = load_model(tmp_path)

    def computed(length: int) -> Tensor:
        tokens = torch.arange(length)
        return compute_hidden_states(model.model, tokens, tokens, PackedLayout(torch.tensor([length])))

    assert computed(32).isfinite().all()
    with pytest.raises(MachineError, match="a sequence has 33 tokens, but the rotary embedding"):
        computed(33)


def test_code_of_a_directory_passes_the_check_or_is_refused(tmp_path: Path) -> None:
    save_tiny_model("qwen3", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"model_type": "own", "auto_map": {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    code = """
from transformers import Qwen3Config, Qwen3ForCausalLM
class OwnConfig(Qwen3Config):
    model_type = "own"
class Own(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
    (tmp_path / "code.py").write_text(code)
    load_model(tmp_path, trust_remote_code=True)
    mixing = "        self.model.layers[1].mlp.forward = lambda x: x.cumsum(1)\n"
    (tmp_path / "code.py").write_text(
        f"{code}    def __init__(self, config):\n        super().__init__(config)\n{mixing}"
    )
    with pytest.raises(MachineError, match="logits of packed sequences up to"):
        load_model(tmp_path, trust_remote_code=True)


@pytest.mark.parametrize(
    "family", sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_TYPES})
)
def test_other_vision_language_models_are_refused_without_traceback(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UserError) as refusal:
        load_model(tmp_path)
    assert family in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_weights_that_are_not_numbers_are_named(tmp_path: Path) -> None:
    save_tiny_model("qwen3", tmp_path)
    model: Any = load_model(tmp_path)
    nn.init.constant_(model.model.layers[1].mlp.up_proj.weight, float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(MachineError, match="contain NaN or infinite values"):
        load_model(tmp_path)
