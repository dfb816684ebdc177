"""Small policies made on the spot: nothing is downloaded.

A preset gives a Qwen2, or with experts a Qwen3-MoE, of random weights and a byte-level BPE tokenizer trained on the
texts of the worlds, saved as an ordinary Hugging Face directory. Every grid symbol and every action word is one
token; any other text still encodes, byte by byte where need be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.errors import ConfigError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["CHAT_TEMPLATE", "PRESETS", "Preset", "make_model", "make_policy", "make_tokenizer"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "||")

ROPE_THETA = 100.0
"""A grid's rows lie a few tokens apart: fast rotations tell them apart, the slow ones of larger models don't."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Shape of a policy. `context` in tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    context: int
    digits: bool = False
    """Each digit is a token of its own, so that sums are learnt place by place."""
    experts: int = 0
    """Experts in each layer, each `mlp` wide; 0 for a plain feed-forward part."""
    active: int = 2
    """Experts that see a token."""


PRESETS: Mapping[str, Preset] = {
    "grid-1m": Preset(hidden=128, layers=4, heads=8, kv_heads=2, mlp=384, vocabulary=640, context=2048),
    "grid-3m": Preset(hidden=256, layers=4, heads=8, kv_heads=4, mlp=704, vocabulary=640, context=4096),
    "grid-moe": Preset(hidden=128, layers=4, heads=8, kv_heads=2, mlp=128, vocabulary=640, context=2048, experts=8),
    "numbers-1m": Preset(hidden=128, layers=4, heads=4, kv_heads=4, mlp=384, vocabulary=512, context=2048, digits=True),
}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    if name in PRESETS:
        return PRESETS[name]
    close = nearest(name, PRESETS)
    hint = (f"did you mean {close!r}? " if close else "") + f"known: {', '.join(sorted(PRESETS))}"
    raise ConfigError(f"unknown preset {name!r}", key="policy.preset", value=name, hint=hint)


def make_tokenizer(vocabulary: int, texts: Iterable[str], *, digits: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocabulary` tokens, trained on `texts`, with the chat template.

    Symbols of a grid stand behind a space, ` P _ O`: the pre-tokenizer keeps each apart, so each
    becomes one token as soon as it occurs in `texts`. With `digits` no two digits share a token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alone = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([alone, by_bytes]) if digits else by_bytes
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(shape: Preset, vocabulary: int, eos: int, pad: int, seed: int) -> PreTrainedModel:
    """A Qwen2, or with experts a Qwen3-MoE, of random weights that follow from `seed` alone; the embedding is tied."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "initializer_range": shape.hidden**-0.5,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not shape.experts:
            return Qwen2ForCausalLM(Qwen2Config(**sizes))
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **_mixture(shape)))


def _mixture(shape: Preset) -> dict[str, Any]:
    """What a Qwen3-MoE has beyond a Qwen2."""
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.active,
        "moe_intermediate_size": shape.mlp,
        "norm_topk_prob": True,
        "head_dim": shape.hidden // shape.heads,
    }


def make_policy(name: str, directory: Path, texts: Iterable[str], seed: int) -> None:
    """Write the preset's model and tokenizer to `directory`, loadable by `from_pretrained`.

    Raises:
        ConfigError: unknown preset.
    """
    shape = preset(name)
    tokenizer = make_tokenizer(shape.vocabulary, texts, digits=shape.digits)
    model = make_model(shape, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
