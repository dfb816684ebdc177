"""If these fail, the vision towers of OpenVLA differ from the models whose weights they load."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from quintet.policies.vla.vision_tower import TowerShape, VisionTower

SIZES = {"hidden": 32, "depth": 3, "heads": 4, "mlp": 64, "patch": 4, "image": 16}
COMMON = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 4, "image_size": 16}


def _randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    model.requires_grad_(requires_grad=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.1)


def _images() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def _penultimate(model: PreTrainedModel, images: torch.Tensor) -> torch.Tensor:
    return model(images, output_hidden_states=True).hidden_states[-2]


def _copy(tower: VisionTower, name: str, *weights: torch.Tensor) -> None:
    parameter = tower.get_parameter(name)
    with torch.no_grad():
        parameter.copy_(torch.cat(weights).reshape(parameter.shape))


def _copy_block(
    tower: VisionTower,
    number: int,
    attention: nn.Module,
    output: nn.Module,
    norms: tuple[nn.Module, ...],
    mlp: nn.Module,
) -> None:
    for part in ("weight", "bias"):
        heads = [attention.get_parameter(f"{head}_proj.{part}") for head in "qkv"]
        _copy(tower, f"blocks.{number}.attn.qkv.{part}", *heads)
        _copy(tower, f"blocks.{number}.attn.proj.{part}", output.get_parameter(part))
        for index, norm in enumerate(norms, 1):
            _copy(tower, f"blocks.{number}.norm{index}.{part}", norm.get_parameter(part))
        for linear in ("fc1", "fc2"):
            _copy(tower, f"blocks.{number}.mlp.{linear}.{part}", mlp.get_parameter(f"{linear}.{part}"))


def test_features_are_the_last_but_one_hidden_states_of_dinov2_with_registers() -> None:
    """transformers adds a position to the class token, which timm adds to it in the checkpoint."""
    config = Dinov2WithRegistersConfig(**COMMON, mlp_ratio=2, num_register_tokens=4, layer_norm_eps=1e-6)
    model = Dinov2WithRegistersModel(config).eval()
    _randomize(model)
    tower = VisionTower(TowerShape(**SIZES, registers=4, has_class_token=True, has_layer_scale=True))
    embeddings = model.embeddings
    _copy(tower, "cls_token", embeddings.cls_token + embeddings.position_embeddings[:, :1])
    _copy(tower, "reg_token", embeddings.register_tokens)
    _copy(tower, "pos_embed", embeddings.position_embeddings[:, 1:])
    projection = embeddings.patch_embeddings.projection
    _copy(tower, "patch_embed.proj.weight", projection.weight)
    _copy(tower, "patch_embed.proj.bias", projection.bias)
    for number, layer in enumerate(model.encoder.layer):
        attention = layer.attention
        _copy_block(tower, number, attention, attention.o_proj, (layer.norm1, layer.norm2), layer.mlp)
        _copy(tower, f"blocks.{number}.ls1.scale_factor", layer.layer_scale1.lambda1)
        _copy(tower, f"blocks.{number}.ls2.scale_factor", layer.layer_scale2.lambda1)
    expected = _penultimate(model, _images())[:, 5:]
    assert torch.allclose(tower(_images()), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_features_are_the_last_but_one_hidden_states_of_siglip() -> None:
    config = SiglipVisionConfig(**COMMON, intermediate_size=64, hidden_act="gelu", layer_norm_eps=1e-6)
    model = SiglipVisionModel(config).eval()
    _randomize(model)
    tower = VisionTower(TowerShape(**SIZES))
    vision = getattr(model, "vision_model", model)
    _copy(tower, "pos_embed", vision.embeddings.position_embedding.weight)
    _copy(tower, "patch_embed.proj.weight", vision.embeddings.patch_embedding.weight)
    _copy(tower, "patch_embed.proj.bias", vision.embeddings.patch_embedding.bias)
    for number, layer in enumerate(vision.encoder.layers):
        attention = layer.self_attn
        _copy_block(tower, number, attention, attention.out_proj, (layer.layer_norm1, layer.layer_norm2), layer.mlp)
    expected = _penultimate(model, _images())
    assert torch.allclose(tower(_images()), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_merged_patches_are_neighbours() -> None:
    tower = VisionTower(TowerShape(**SIZES, merge=2, is_penultimate=False))
    grid = torch.arange(16.0).view(1, 16, 1).expand(1, 16, 32)
    merged = tower._merge(grid)
    assert merged.shape == (1, 4, 128)
    assert merged[0, :, ::32].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
