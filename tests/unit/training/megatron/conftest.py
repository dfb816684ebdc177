"""Tiny models of each family that the Megatron learner knows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quintet.training.megatron.core_package import require_megatron

pytest.importorskip("megatron.core", reason="pip install -e '.[megatron]'")
require_megatron()

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


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one Hugging Face model for each kind."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("megatron")
    for name, (model_type, options) in KINDS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**COMMON, **options}))
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    """Use one thread, and destroy all process groups afterwards."""
    from megatron.core import parallel_state

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
