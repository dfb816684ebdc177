"""If this fails, a router that was to stay as it is gets a gradient."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from quintet.errors import ConfigError
from quintet.policies.routers import freeze_routers

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}


def test_routers_alone_are_frozen() -> None:
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**TINY, num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
    )
    freeze_routers(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"]


def test_a_dense_model_has_none() -> None:
    with pytest.raises(ConfigError, match="no experts"):
        freeze_routers(LlamaForCausalLM(LlamaConfig(**TINY)))
