"""Tiny random models of every causal language model of transformers, built from the families' default settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "n_embed", "dim", "model_dim", "embedding_size"), 64),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_hidden_size",
            "n_inner",
            "d_ff",
            "ffn_dim",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "dim_ff",
        ),
        96,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(
        ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 16
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 256),
    "first_k_dense_replace": 1,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "hidden_size_per_layer_input": 16,
}
"""Values of settings by name, where a family has them."""
MAX_PARAMETERS = 10**7
NOT_BUILT = {
    **dict.fromkeys(("blt", "longcat_flash", "roc_bert", "xlm", "phi4_multimodal"), "some sizes have other names"),
    **dict.fromkeys(("emu3", "mllama"), "its directory has the model type of a part"),
    **dict.fromkeys(("musicgen", "musicgen_melody", "dbrx"), "its settings cannot be given"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "it is a draft model of another model"),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text", "cohere_compass_text"), "its defaults cannot be built"),
    **dict.fromkeys(
        ("inkling2_text", "inkling2_loop_text", "dots3_note", "dots3_note_text"),
        "it has more than 10 million parameters",
    ),
    "dory": "its numbers of layers depend on each other",
    "zamba": "its layers are shared by their numbers",
    "gemma3n": "it needs the package timm",
    "reformer": "it must be told to be a decoder",
}
"""Families whose settings cannot be made small, and why."""
LAYER_COUNTS = (
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
)


SMALL_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_chunk_size": 8, "mamba_d_state": 8}
FULL_HEADS = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu")
"""Families with as many heads of keys and values as of queries."""
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in FULL_HEADS},
    "falcon_h1": {**SMALL_MAMBA, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zamba2": {
        "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "hybrid"],
        "layer_types": ["linear_attention", "hybrid"],
    },
    "zaya": {"num_experts_per_tok": 1},
    # caps and divisors that change the small numbers of random weights
    **{key: {"attn_logit_softcapping": 0.02} for key in ("gemma2", "vaultgemma")},
    "nanochat": {"final_logit_softcapping": 5.0},
    **{key: {"logits_scaling": 8.0} for key in ("granite", "granitemoe")},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 1,
        "index_n_heads": 2,
    },
    "bamba": {**SMALL_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**SMALL_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}
"""Further settings of single families."""


def tiny_config(model_type: str) -> Any:
    """Return a small configuration of a family."""
    default = AutoConfig.for_model(model_type)
    parts = {key: part for key in default.sub_configs if (part := getattr(default, key, None)) is not None}
    return _shrink(default, {key: _shrink(part).to_dict() for key, part in parts.items()})


def _shrink(default: Any, parts: dict[str, Any] | None = None) -> Any:
    settings = default.to_dict()
    sizes = {
        name: value
        for name, value in SIZES.items()
        if name in settings and (settings[name] is not None or not name.endswith("_token_id"))
    }
    kinds = list(dict.fromkeys(settings.get("layer_types") or ()))
    count = max(2, len(kinds))
    sizes.update({name: count for name in LAYER_COUNTS if name in settings})
    if kinds:
        sizes["layer_types"] = (kinds * 2)[:count]
    return type(default)(**{**sizes, **(parts or {}), **FAMILY_SIZES.get(default.model_type, {})})


def save_tiny_model(model_type: str, directory: Path, **settings: Any) -> None:
    """Save a random model of a family, in float32, as a Hugging Face directory."""
    config = tiny_config(model_type)
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{model_type} has {size} parameters")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
