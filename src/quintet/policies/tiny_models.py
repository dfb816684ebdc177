"""Small randomly initialized policies, created locally without downloads.

A preset is a Qwen2, or with experts a Qwen3-MoE, with random weights and a byte-level BPE tokenizer trained on the
texts of the environments, saved as a Hugging Face directory. Each grid symbol and action word is one token; any other
text can be encoded, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.data.chat_templates import CHATML
from quintet.errors import ConfigError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEXT_TOKENS = ("<think>", "</think>", "<answer>", "</answer>", "||")

ROPE_THETA = 100.0
"""Rows of a grid are a few tokens apart: fast rotations distinguish them, the slow ones of larger models do not."""


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


PRESETS: Mapping[str, Preset] = {
    "grid-1m": Preset(hidden=128, layers=4, heads=8, kv_heads=2, mlp=384, vocabulary=640, context=2048),
    "grid-3m": Preset(hidden=256, layers=4, heads=8, kv_heads=4, mlp=704, vocabulary=640, context=4096),
    "grid-moe": Preset(hidden=128, layers=4, heads=8, kv_heads=2, mlp=128, vocabulary=640, context=2048, experts=8),
    "numbers-1m": Preset(hidden=128, layers=4, heads=4, kv_heads=4, mlp=384, vocabulary=512, context=2048, digits=True),
}


def get_preset(name: str) -> Preset:
    """Return a preset by name.

    Raises:
        ConfigError: unknown preset; the hint names the nearest.
    """
    if name in PRESETS:
        return PRESETS[name]
    close = nearest(name, PRESETS)
    hint = (f"did you mean {close!r}? " if close else "") + f"valid presets: {', '.join(sorted(PRESETS))}"
    raise ConfigError(f"policy.preset = {name!r}: unknown preset", key="policy.preset", value=name, hint=hint)


def train_tokenizer(vocabulary: int, texts: Iterable[str], *, digits: bool = False) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocabulary` tokens on `texts`, with the ChatML template.

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
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TEXT_TOKENS),
        special_tokens=[PAD, MESSAGE_START, MESSAGE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TEXT_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MESSAGE_END,
        pad_token=PAD,
        additional_special_tokens=[MESSAGE_START],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHATML
    return wrapped


def build_model(preset: Preset, vocabulary: int, eos: int, pad: int, seed: int) -> PreTrainedModel:
    """Build a Qwen2, or with experts a Qwen3-MoE, with tied embeddings and random weights determined by `seed`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not preset.experts:
            return Qwen2ForCausalLM(Qwen2Config(**sizes))
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **_moe_sizes(preset)))


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
    tokenizer = train_tokenizer(preset.vocabulary, texts, digits=preset.digits)
    model = build_model(preset, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
