"""Public `config.json` values of well-known models, and runs on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.plan.memory import MemoryPlan, plan_memory
from quintet.config.plan.models import find_models
from quintet.config.plan.placement import place_components

__all__ = ["CONFIGS", "PARAMETERS", "VISION_CONFIGS", "VISION_PARAMETERS", "at", "measured", "on"]


def _config(kind: str, numbers: tuple[int, int, int, int, int, int], **others: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {"model_type": kind, **dict(zip((*names, "vocab_size"), numbers, strict=True)), **others}


_VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
CONFIGS = {
    "Qwen2.5-0.5B": _config("qwen2", (896, 4864, 24, 14, 2, 151936), tie_word_embeddings=True),
    "Qwen2.5-7B": _config(
        "qwen2", (3584, 18944, 28, 28, 4, 152064), tie_word_embeddings=False, max_position_embeddings=32768
    ),
    "Llama-3-8B": _config("llama", (4096, 14336, 32, 32, 8, 128256)),
    "Mistral-7B": _config("mistral", (4096, 14336, 32, 32, 8, 32000)),
    "Mixtral-8x7B": _config("mixtral", (4096, 14336, 32, 32, 8, 32000), num_local_experts=8, num_experts_per_tok=2),
    "Qwen3-8B": _config("qwen3", (4096, 12288, 36, 32, 8, 151936), head_dim=128, tie_word_embeddings=False),
    "Qwen3-30B-A3B": _config(
        "qwen3_moe",
        (2048, 6144, 48, 32, 4, 151936),
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
    "Qwen1.5-MoE-A2.7B": _config(
        "qwen2_moe",
        (2048, 5632, 24, 16, 16, 151936),
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=60,
        num_experts_per_tok=4,
        tie_word_embeddings=False,
    ),
    "gemma-2b": _config("gemma", (2048, 16384, 18, 8, 1, 256000), head_dim=256),
    "gemma-2-9b": _config("gemma2", (3584, 14336, 42, 16, 8, 256000), head_dim=256),
    "gemma-3-1b": _config("gemma3_text", (1152, 6912, 26, 4, 1, 262144), head_dim=256),
    "DeepSeek-V2-Lite": _config(
        "deepseek_v2",
        (2048, 10944, 27, 16, 16, 102400),
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        q_lora_rank=None,
        **_LATENT,
    ),
    "DeepSeek-V3": _config(
        "deepseek_v3",
        (7168, 18432, 61, 128, 128, 129280),
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        q_lora_rank=1536,
        **_LATENT,
    ),
}
PARAMETERS = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Llama-3-8B": 8_030_261_248,
    "Mistral-7B": 7_241_732_096,
    "Mixtral-8x7B": 46_702_792_704,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "gemma-2b": 2_506_172_416,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V3": 671_026_419_200,
}
"""As the files of their weights have them."""
VISION = _config(
    "qwen2_5_vl",
    (3584, 18944, 28, 28, 4, 152064),
    tie_word_embeddings=False,
    vision_config=_VISION | {"patch_size": 14},
)
_DEEPSTACK = {"in_channels": 3, "patch_size": 16, "num_position_embeddings": 2304}
_VISION_4B = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_VISION_8B = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
VISION_CONFIGS = {
    "Qwen2-VL-2B": _config(
        "qwen2_vl",
        (1536, 8960, 28, 12, 2, 151936),
        tie_word_embeddings=True,
        vision_config={"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "num_heads": 16},
    ),
    "Qwen2.5-VL-3B": _config(
        "qwen2_5_vl",
        (2048, 11008, 36, 16, 2, 151936),
        tie_word_embeddings=True,
        vision_config=_VISION | {"out_hidden_size": 2048},
    ),
    "Qwen2.5-VL-7B": VISION,
    "Qwen3-VL-4B": _config(
        "qwen3_vl",
        (2560, 9728, 36, 32, 8, 151936),
        head_dim=128,
        tie_word_embeddings=True,
        vision_config=_VISION_4B | _DEEPSTACK | {"out_hidden_size": 2560},
    ),
    "Qwen3-VL-8B": _config(
        "qwen3_vl",
        (4096, 12288, 36, 32, 8, 151936),
        head_dim=128,
        tie_word_embeddings=False,
        vision_config=_VISION_8B | _DEEPSTACK | {"out_hidden_size": 4096},
    ),
}
VISION_PARAMETERS = {
    "Qwen2-VL-2B": 2_208_985_600,
    "Qwen2.5-VL-3B": 3_754_622_976,
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen3-VL-4B": 4_437_815_808,
    "Qwen3-VL-8B": 8_767_123_696,
}


def at(tmp_path: Path, name: str) -> str:
    """A directory with that model's `config.json` and no weights."""
    directory = tmp_path / name
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps((CONFIGS | VISION_CONFIGS)[name]))
    return str(directory)


def on(tmp_path: Path, name: str, nodes: int, devices: int, *overrides: str) -> ComposedConfig:
    """A run of that model in bfloat16 on so many devices of so many nodes; one turn an episode."""
    sizes = [f"placement.nodes={nodes}", f"placement.devices_per_node={devices}", "rollout.max_turns=1"]
    model = ["policy.preset=null", f"policy.path={at(tmp_path, name)}", "policy.dtype=bfloat16", "warm_start=null"]
    return load_experiment(None, [*model, *sizes, *overrides])


def measured(composed: ComposedConfig, device_bytes: int | None = None) -> MemoryPlan:
    """What it takes of each device."""
    config = composed.experiment
    return plan_memory(config, place_components(config), find_models(config), device_bytes)
