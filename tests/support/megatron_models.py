"""Configurations of tiny Hugging Face models, one of each family that the Megatron learner supports."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "biased": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "deep": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "experts": (
        "qwen3_moe",
        {
            "tie_word_embeddings": False,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
}
