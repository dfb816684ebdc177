"""Small vision-language models with random weights, and transformers' own log-probs of sequences with images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from quintet.policies.tiny_models import Preset, VisionPreset, build_vision_language_model, train_tokenizer
from quintet.policies.vision.image_encoder import placeholder_tokens
from quintet.policies.vision.image_processing import ImageProcessor
from quintet.policies.vision.image_tokens import image_tokens
from quintet.records import Batch, FinishReason, ImageInput, Outcome, Trajectory, Turn
from quintet.rollout.collate import collate

TEXTS = ["system\nuser\nassistant\n Left Down Right Up safe"]
SHAPE = Preset(64, 2, 4, 2, 96, 400, 512, vision=VisionPreset(layers=2, hidden=32, heads=2, mlp=48, patch=4))
PROCESSOR = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=64 * 64)


def save_qwen2_5_vl(directory: Path, shape: Preset = SHAPE) -> Path:
    """Create a model whose first vision layer attends within windows of 2 × 2 image tokens."""
    tokenizer = train_tokenizer(shape.vocabulary, TEXTS, images=True)
    assert shape.vision
    model = build_vision_language_model(shape, shape.vision, tokenizer, seed=5)
    model.config.vision_config.fullatt_block_indexes = [1]
    model.config.vision_config.window_size = 16
    randomize_biases(model)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    PROCESSOR.save(directory)
    return directory


def save_qwen2_vl(directory: Path, head_dim: int = 16) -> Path:
    """Create a Qwen2-VL."""
    text = _text_sizes(head_dim) | {"rope_parameters": _rope(head_dim)}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **_tokens(), tie_word_embeddings=True)
    return _save(Qwen2VLForConditionalGeneration, config, directory)


def save_qwen3_vl(directory: Path, head_dim: int = 16) -> Path:
    """Create a Qwen3-VL, whose encoder adds features to the states after the decoder's first layer."""
    rope = _rope(head_dim) | {"mrope_interleaved": True}
    text = _text_sizes(head_dim) | {"rope_parameters": rope, "head_dim": head_dim}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **_tokens(), tie_word_embeddings=True)
    return _save(Qwen3VLForConditionalGeneration, config, directory)


def _rope(head_dim: int) -> dict[str, Any]:
    section = [head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16]
    return {"rope_type": "default", "rope_theta": 100.0, "mrope_section": section}


def _text_sizes(head_dim: int) -> dict[str, Any]:
    return {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 64 // head_dim,
        "num_key_value_heads": 32 // head_dim,
        "initializer_range": 0.125,
        "bos_token_id": None,
    }


def _tokens() -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {name: 3 + index for index, name in enumerate(names)}


def _save(cls: type[PreTrainedModel], config: PreTrainedConfig, directory: Path) -> Path:
    """Save a model with the same random weights in each test: those of some seeds have gradients near 0, of which AdamW
    makes steps in any direction."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config)
    randomize_biases(model)
    with torch.no_grad():
        for name, parameter in model.model.visual.named_parameters():
            if name.endswith("weight") and parameter.dim() > 1:
                # as large as those of the decoder: else log-probs hardly depend on images
                parameter.mul_(0.15 / parameter.std())
    model.save_pretrained(directory)
    PROCESSOR.save(directory)
    return directory


@torch.no_grad()
def randomize_biases(model: PreTrainedModel) -> None:
    """Fill biases, which are initialized to 0, with random numbers."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0.0, 0.3, generator=generator)


def random_image(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return RGB `uint8[height, width, 3]`."""
    return np.random.default_rng([height, width, seed]).integers(0, 256, (height, width, 3)).astype(np.uint8)


def process(height: int, width: int, seed: int = 0) -> ImageInput:
    """Return a random image as the models of this module see it."""
    return PROCESSOR.process(random_image(height, width, seed))


def prompt_with(*images: ImageInput, first: int = 20) -> tuple[int, ...]:
    """Return a prompt of text tokens with the images between them."""
    tokens: tuple[int, ...] = (first, first + 1)
    for number, image in enumerate(images):
        tokens += (3, *image_tokens(image), 4, first + 2 + number)
    return tokens


def turn(
    prompt: Sequence[int], response: Sequence[int], images: Sequence[ImageInput] = (), *, continues: bool = False
) -> Turn:
    """Return a turn with the log-probs of its response unknown."""
    return Turn(
        observation="",
        prompt=tuple(prompt),
        continues=continues,
        tokens=tuple(response),
        logprobs=(0.0,) * len(response),
        weight_version=0,
        text="",
        actions=(),
        valid_format=True,
        reward=1.0,
        finish_reason=FinishReason.STOP,
        image_inputs=tuple(images),
    )


def batch_of(*episodes: Sequence[Turn]) -> Batch:
    """Return the batch of episodes with these turns."""
    return collate(
        Trajectory("env", number, number, 0, tuple(turns), Outcome.SUCCESS) for number, turns in enumerate(episodes)
    )


def load_in_transformers(directory: Path) -> PreTrainedModel:
    """Load a model without any code of Quintet."""
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def transformers_logprobs(model: Any, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Return the log-prob of each response token, [N], 0 elsewhere, by one forward pass of transformers for each
    sequence. Placeholders are excluded from the normalization."""
    images = images_of(batch)
    out: list[Tensor] = []
    for tokens, mask in zip(*(x.split(batch.lengths.tolist()) for x in (batch.tokens, batch.loss_mask)), strict=True):
        ids = torch.where(tokens < 0, model.config.image_token_id, tokens)[None]
        inputs = image_arguments(tokens, images) | {"mm_token_type_ids": (tokens < 0).int()[None]}
        logits = model(input_ids=ids, use_cache=False, **(inputs if bool((tokens < 0).any()) else {})).logits[0, :-1]
        logits = logits.index_fill(-1, torch.tensor(placeholder_tokens(model.config)), -torch.inf) / temperature
        logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None].clamp(min=0)).squeeze(-1)
        out += [logits.new_zeros(1), torch.where(mask[1:], logprobs, 0.0)]
    return torch.cat(out)


def images_of(batch: Batch) -> dict[int, tuple[Tensor, Tensor]]:
    """Return grid and patches of each image by its key."""
    if batch.image_keys is None or batch.image_grids is None or batch.image_patches is None:
        return {}
    patches = batch.image_patches.split(batch.image_grids.prod(1).tolist())
    return dict(zip(batch.image_keys.tolist(), zip(batch.image_grids, patches, strict=True), strict=True))


def image_arguments(tokens: Tensor, images: dict[int, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the arguments of transformers' forward pass for the images of a sequence, in its order."""
    firsts = [token for token in tokens.tolist() if token < 0 and not (-1 - token) & ((1 << 18) - 1)]
    chosen = [images[(-1 - token) >> 18] for token in firsts]
    if not chosen:
        return {}
    grids = torch.stack([torch.cat([torch.tensor([1]), 2 * grid]) for grid, _ in chosen])
    return {
        "pixel_values": PROCESSOR.pixel_values(torch.cat([patches for _, patches in chosen])),
        "image_grid_thw": grids,
    }
