"""If these fail, a run says that it makes better or worse use of a device than it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig
from vision_models import save_qwen2_5_vl

from quintet.policies.model_loading import load_model
from quintet.policies.vision.image_encoder import encode_images
from quintet.training.flops import forward_flops, image_flops, peak_flops, training_flops, utilization

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_flops_agree_with_torchs_counter() -> None:
    """Of a model with one token, where attention has no future; torch counts what really runs."""
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=torch.zeros(5, 1, dtype=torch.long)).logits.sum()
        forward = counter.get_total_flops()
        torch.autograd.backward(loss)
    lengths = torch.ones(5, dtype=torch.long)
    # torch may leave the products of attention over a single key out
    attention = 2 * 2 * 3 * 32 * 5
    assert forward in {forward_flops(model.config, lengths), forward_flops(model.config, lengths) - attention}
    assert training_flops(model.config, lengths) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_flops_agree_with_a_hand_calculation() -> None:
    config = Qwen2Config(**SHAPE)
    weights = 32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 48
    pairs = 3 * 4 // 2 + 2 * 3 // 2
    expected = 2 * (3 * (5 * weights + 2 * 32 * pairs) + 4 * 32 * 50)
    assert forward_flops(config, torch.tensor([3, 2]), num_logits=4) == expected


def test_only_active_experts_count() -> None:
    sparse = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    one = torch.ones(1, dtype=torch.long)
    mixed = forward_flops(Qwen3MoeConfig(**SHAPE, head_dim=8, **sparse), one)
    # two of 24 are as wide as one of 48; the router has a weight for each expert and hidden number
    assert mixed - forward_flops(Qwen2Config(**SHAPE), one) == 2 * 3 * 32 * 8


def test_mfu_is_the_share_of_peak_flops() -> None:
    actual = utilization(4e15, 2.0, devices=4, device="NVIDIA H100 80GB HBM3")
    assert actual == {"perf/tflops/actor": 500.0, "perf/mfu/actor": pytest.approx(500 / 989)}
    assert utilization(1e12, 1.0, device="Something else") == {"perf/tflops/actor": 1.0}
    assert peak_flops("NVIDIA L40S") != peak_flops("NVIDIA L4")


def test_flops_of_images_agree_with_torchs_counter(tmp_path: Path) -> None:
    """Of an encoder without windows, where every patch attends to all of its image."""
    model = load_model(save_qwen2_5_vl(tmp_path))
    model.model.visual.fullatt_block_indexes = model.config.vision_config.fullatt_block_indexes = [0, 1]
    grids = torch.tensor([[2, 3], [1, 4]])
    patches = torch.zeros(10, 4 * 3 * 16, dtype=torch.uint8)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encode_images(model.model, patches, grids)
    # on a CPU, torch does not count attention: two products in each of two layers, over 24² and 16² pairs of patches
    attention = 2 * 2 * 2 * 32 * (24**2 + 16**2)
    assert image_flops(model.config, grids) - attention == pytest.approx(counter.get_total_flops(), rel=0.002)
    text = training_flops(model.config, torch.ones(2, dtype=torch.long))
    images = training_flops(model.config, torch.ones(2, dtype=torch.long), image_grids=grids) - text
    assert images == 3 * image_flops(model.config, grids)
    frozen = training_flops(model.config, torch.ones(2, dtype=torch.long), image_grids=grids, trains_encoder=False)
    assert frozen - text == image_flops(model.config, grids)
