"""Tiny random models as GGUF files, written by the package `gguf` as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from quintet.policies.tiny_models import train_tokenizer

with pytest.MonkeyPatch.context() as patch:
    # OpenCV, which `gguf` imports, changes the variable, and without its value tests start no warm processes
    patch.setenv("LD_LIBRARY_PATH", os.environ.get("LD_LIBRARY_PATH", ""))
    from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
"""Sizes of all tiny models; heads are larger than hidden size / heads, as in Qwen3."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, "head_dim": 8},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3moe": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}
"""`config.json` of a tiny model of each architecture of GGUF files."""
NAMES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of tokens."""
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.gate_up_proj")


def build_family(architecture: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Build a tiny model with random weights, norms included, and a tokenizer."""
    tokenizer = train_tokenizer(300, ["ask 1 + 2 = 3 and answer 4 5 6 7 8 9 0"])
    if architecture == "qwen2":  # transformers splits texts of this family in no other way
        split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(**{**SIZES, **FAMILIES[architecture]}, vocab_size=len(tokenizer), **ids)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model, tokenizer


def write_gguf(
    file: Path,
    architecture: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    settings: dict[str, Any] | None = None,
    pre: str | None = None,
) -> None:
    """Write a model and its tokenizer; `settings` are further ones of its architecture, `pre` names how texts are
    split."""
    writer = GGUFWriter(file, architecture)
    config = model.config
    for key, name in NAMES.items():
        value = FAMILIES[architecture].get(name, SIZES.get(name))
        if value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_parameters["rope_theta"])
    for key, value in (settings or {}).items():
        writer.add_string(f"{architecture}.{key}", value)
    write_tokenizer(writer, tokenizer, pre or ("qwen2" if architecture == "qwen2" else "gpt-2"))
    for name, tensor in gguf_tensors(architecture, model):
        writer.add_tensor(name, tensor.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, pre: str) -> None:
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    kinds = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in stored["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in stored["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def gguf_tensors(architecture: str, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors as llama.cpp stores them: pairs of rotated dimensions beside each other in
    Llama, gates and values of experts apart."""
    (kind,) = (kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stored = tensor
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            rows, columns = tensor.shape
            stored = tensor.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
        if EXPERT.fullmatch(name):
            layer = name.split(".")[2]
            gate, up = stored.chunk(2, dim=1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
            continue
        if name.endswith("mlp.experts.down_proj"):
            yield f"blk.{name.split('.')[2]}.ffn_down_exps.weight", stored
            continue
        base, _, suffix = name.rpartition(".")
        yield f"{names.get_name(base)}.{suffix}", stored
