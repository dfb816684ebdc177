"""If these fail, the plan of a vision-language run counts too little memory or time for its images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from quintet.config.plan.vision_encoder import VisionEncoderShape, read_vision_encoder
from quintet.policies.attention import register_attention
from quintet.policies.model_loading import enable_activation_checkpointing
from quintet.policies.vision.image_encoder import encode_images, prepare_vision_encoder
from quintet.policies.vision.image_processing import ImageProcessor

GRIDS = torch.tensor([[8, 8], [8, 8]])
SIZES = {"small": (64, 2, 2), "large": (128, 4, 4)}
"""Width, heads and depth of encoders."""
TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}


def model_of(family: str, size: str) -> PreTrainedModel:
    """A vision-language model with a small language model."""
    width, heads, depth = SIZES[size]
    vision: dict[str, Any] = {"depth": depth, "num_heads": heads}
    if family == "qwen2_vl":
        vision |= {"embed_dim": width, "hidden_size": 64, "mlp_ratio": 4}
        model: PreTrainedModel = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=TEXT, vision_config=vision))
    elif family == "qwen2_5_vl":
        vision |= {"hidden_size": width, "intermediate_size": 3 * width, "out_hidden_size": 64}
        vision["fullatt_block_indexes"] = [depth - 1]
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision))
    else:
        vision |= {"hidden_size": width, "intermediate_size": 4 * width, "out_hidden_size": 64}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        text = TEXT | {"head_dim": 32, "rope_parameters": rope}
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))
    model.set_attn_implementation(register_attention())
    prepare_vision_encoder(model, ImageProcessor(patch_size=model.config.vision_config.patch_size))
    return model


def shape_of(model: PreTrainedModel) -> VisionEncoderShape:
    shape = read_vision_encoder(model.config.to_dict(), 64)
    assert shape is not None
    return shape


def encode(model: Any, shape: VisionEncoderShape) -> torch.Tensor:
    patches = torch.zeros(int(GRIDS.prod(1).sum()), 4 * 3 * shape.patch**2, dtype=torch.uint8)
    return encode_images(model.model, patches, GRIDS)


def saved_bytes(model: Any, shape: VisionEncoderShape) -> int:
    """What autograd keeps of a forward pass, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        encode(model, shape)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.fixture(scope="module", params=[(f, s) for f in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl") for s in SIZES])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return model_of(*request.param)


def test_parameters_are_those_of_the_module(model: Any) -> None:
    assert shape_of(model).parameters == sum(parameter.numel() for parameter in model.model.visual.parameters())


def test_flops_are_those_that_torch_counts(model: Any) -> None:
    """On a CPU, torch does not count attention."""
    shape = shape_of(model)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encode(model, shape)
    pairs = (shape.depth - shape.windowed) * (4 * 64) ** 2 + shape.windowed * 4 * (4 * 16) ** 2
    attention = 2 * 4 * shape.width * pairs
    assert 2 * shape.flops(8, 8) - attention == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_activations_are_those_that_autograd_saves(model: Any) -> None:
    shape = shape_of(model)
    patches = 4 * int(GRIDS.prod(1).sum())
    assert shape.activations(patches, 4) == pytest.approx(saved_bytes(model, shape), rel=0.1)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_recomputation_saves_the_inputs_of_blocks(family: str) -> None:
    model = model_of(family, "large")
    shape = shape_of(model)
    enable_activation_checkpointing(model)
    patches = 4 * int(GRIDS.prod(1).sum())
    expected = saved_bytes(model, shape) + shape.block_activations(patches, 4)
    assert shape.activations(patches, 4, recompute=True) == pytest.approx(expected, rel=0.1)


def test_attention_within_windows_counts_pairs_of_patches_of_a_window() -> None:
    """Windows of 4 × 4 tokens: 6 × 4 tokens are a window of 16 tokens and one of 8."""
    full = VisionEncoderShape("qwen2_5_vl", 1, 1280, 3420, 16, 2048)
    windowed = VisionEncoderShape("qwen2_5_vl", 1, 1280, 3420, 16, 2048, windowed=1)
    assert full.flops(6, 4) - windowed.flops(6, 4) == 4 * 1280 * 16 * (24**2 - 16**2 - 8**2)


def test_invalid_sizes_leave_the_model_unknown(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        read_vision_encoder({"model_type": "qwen2_vl", "vision_config": {"depth": [1]}}, 64)
