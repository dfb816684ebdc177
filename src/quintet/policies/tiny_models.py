"""Small randomly initialized policies, created locally without downloads.

A preset is a Qwen2, with experts a Qwen3-MoE, or with vision a Qwen2.5-VL, with random weights and a byte-level BPE
tokenizer trained on the texts of the environments, saved as a Hugging Face directory. Each grid symbol and action word
is one token; any other text can be encoded, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.data.chat_templates import CHATML
from quintet.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = (
    f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")
)
TEXT_TOKENS = ("<think>", "</think>", "<answer>", "</answer>", "||")

ROPE_THETA = 100.0
"""Rows of a grid are a few tokens apart: fast rotations distinguish them, the slow ones of larger models do not."""
IMAGE_ROPE_THETA = 3.0
"""Columns of an image differ by 1 in the slowest rotations, which have to distinguish them."""


@dataclass(frozen=True, slots=True)
class VisionPreset:
    """Sizes of a vision encoder. `patch` in pixels; an image token is 2 × 2 patches."""

    layers: int
    hidden: int
    heads: int
    mlp: int
    patch: int


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a policy. `context` in tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    context: int
    digits: bool = False
    """Tokenize each digit separately, so that addition can be learned digit by digit."""
    experts: int = 0
    """Experts per layer, each of width `mlp`; 0 for a dense MLP."""
    active: int = 2
    """Experts per token."""
    vision: VisionPreset | None = None
    """Vision encoder of a vision-language model."""


PRESETS: Mapping[str, Preset] = {
    "grid-1m": Preset(hidden=128, layers=4, heads=8, kv_heads=2, mlp=384, vocabulary=640, context=2048),
    "grid-3m": Preset(hidden=256, layers=4, heads=8, kv_heads=4, mlp=704, vocabulary=640, context=4096),
    "grid-moe": Preset(hidden=128, layers=4, heads=8, kv_heads=2, mlp=128, vocabulary=640, context=2048, experts=8),
    # an image token is a cell of an environment with `tile_size` 16
    "grid-vl": Preset(
        *(128, 4, 8, 2, 384, 640, 2048), vision=VisionPreset(layers=2, hidden=64, heads=4, mlp=128, patch=8)
    ),
    "numbers-1m": Preset(hidden=128, layers=4, heads=4, kv_heads=4, mlp=384, vocabulary=512, context=2048, digits=True),
}


def get_preset(name: str) -> Preset:
    """Return a preset by name.

    Raises:
        ConfigError: unknown preset; the hint names the nearest.
    """
    if name in PRESETS:
        return PRESETS[name]
    hint = f"{did_you_mean(name, PRESETS)} valid presets: {', '.join(sorted(PRESETS))}".lstrip()
    raise ConfigError(f"policy.preset = {name!r}: unknown preset", key="policy.preset", value=name, hint=hint)


def train_tokenizer(
    vocabulary: int, texts: Iterable[str], *, digits: bool = False, images: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocabulary` tokens on `texts`, with the ChatML template. `images`
    adds the placeholders of images.

    Grid symbols follow a space, ` P _ O`: the pre-tokenizer separates them, so each becomes one token if it occurs in
    `texts`. With `digits`, each digit is a token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split_digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_digits, byte_level]) if digits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    placeholders = [VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD] if images else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TEXT_TOKENS),
        special_tokens=[PAD, MESSAGE_START, MESSAGE_END, *placeholders],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TEXT_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MESSAGE_END,
        pad_token=PAD,
        additional_special_tokens=[MESSAGE_START, *placeholders],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHATML
    return wrapped


def build_model(preset: Preset, vocabulary: int, eos: int, pad: int, seed: int) -> PreTrainedModel:
    """Build a Qwen2, or with experts a Qwen3-MoE, with tied embeddings and random weights determined by `seed`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = _text_sizes(preset, vocabulary, eos, pad)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not preset.experts:
            return Qwen2ForCausalLM(Qwen2Config(**sizes))
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **_moe_sizes(preset)))


def _text_sizes(preset: Preset, vocabulary: int, eos: int, pad: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": preset.hidden,
        "intermediate_size": preset.mlp,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "max_position_embeddings": preset.context,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "initializer_range": preset.hidden**-0.5,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "bos_token_id": None,
    }


def build_vision_language_model(
    preset: Preset, vision: VisionPreset, tokenizer: PreTrainedTokenizerFast, seed: int
) -> PreTrainedModel:
    """Build a Qwen2.5-VL whose encoder attends to the whole image in every layer; see `build_model`."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    sizes = _text_sizes(preset, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    half = sizes["hidden_size"] // sizes["num_attention_heads"] // 2
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    text = {**sizes, "rope_parameters": {"rope_theta": IMAGE_ROPE_THETA, "mrope_section": sections}}
    text["rope_parameters"]["rope_type"] = "default"
    encoder = {
        "depth": vision.layers,
        "hidden_size": vision.hidden,
        "num_heads": vision.heads,
        "intermediate_size": vision.mlp,
        "patch_size": vision.patch,
        "out_hidden_size": sizes["hidden_size"],
        "fullatt_block_indexes": list(range(vision.layers)),
        "initializer_range": sizes["initializer_range"],
    }
    names = {"image_token_id": IMAGE_PAD, "video_token_id": VIDEO_PAD}
    names |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    tokens = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    shared = {
        name: sizes[name] for name in ("tie_word_embeddings", "eos_token_id", "pad_token_id", "initializer_range")
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=encoder, **tokens, **shared)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2_5_VLForConditionalGeneration(config)


def _moe_sizes(preset: Preset) -> dict[str, Any]:
    return {
        "num_experts": preset.experts,
        "num_experts_per_tok": preset.active,
        "moe_intermediate_size": preset.mlp,
        "norm_topk_prob": True,
        "head_dim": preset.hidden // preset.heads,
    }


def create_preset_policy(name: str, directory: Path, texts: Iterable[str], seed: int) -> None:
    """Create a preset's model and tokenizer and save them to `directory`.

    Raises:
        ConfigError: unknown preset.
    """
    preset = get_preset(name)
    tokenizer = train_tokenizer(preset.vocabulary, texts, digits=preset.digits, images=preset.vision is not None)
    directory.mkdir(parents=True, exist_ok=True)
    if preset.vision is None:
        model = build_model(preset, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed)
    else:
        patch = preset.vision.patch
        model = build_vision_language_model(preset, preset.vision, tokenizer, seed)
        from quintet.policies.vision.image_processing import ImageProcessor  # imports torch, which names do not need

        ImageProcessor(patch, min_pixels=(2 * patch) ** 2, max_pixels=(32 * patch) ** 2).save(directory)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
