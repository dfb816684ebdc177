"""Directories of OpenVLA-OFT policies as they are published, with small random weights.

The tensors are those of `model.safetensors.index.json` of `openvla/openvla-7b` and of the policies fine-tuned from it:
982 tensors with 7,541,237,184 values (`total_size` 15,082,474,368 bytes in bfloat16). Their names follow from timm's
`VisionTransformer`, whose `gamma` OpenVLA renames to `scale_factor`, and from transformers' Llama.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

DINOV2, SIGLIP = "vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"
BOUNDS = {"q01": [-0.5, -1.0, 0.0], "q99": [0.5, 1.0, 1.0], "min": [-1.0, -2.0, 0.0], "max": [1.0, 2.0, 1.0]}
STATISTICS = {
    "libero_spatial_no_noops": {
        "action": {**BOUNDS, "mask": [True, True, False]},
        "proprio": {"q01": [-1.0, -1.0, 0.0, 0.0], "q99": [1.0, 1.0, 2.0, 4.0]},
    }
}

"""Statistics of a robot with three dimensions."""


def robot_statistics(name: str) -> dict[str, Any]:
    """Return statistics of a data set of OpenVLA: six dimensions from -1 to 1, and the gripper."""
    low, high = [-1.0] * 6 + [0.0], [1.0] * 7
    mask = [True] * 6 + [False]
    return {name: {"action": {"q01": low, "q99": high, "min": low, "max": high, "mask": mask}}}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths of a policy; the numbers of layers are those of published policies."""

    dino: int = 1024
    dino_mlp: int = 4096
    siglip: int = 1152
    siglip_mlp: int = 4304
    hidden: int = 4096
    mlp: int = 11008
    vocabulary: int = 32064
    patches: int = 256
    patch: int = 14


TINY = Sizes(dino=8, dino_mlp=12, siglip=12, siglip_mlp=16, hidden=16, mlp=24, vocabulary=640, patches=4, patch=7)


def published_tensors(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its name."""
    backbone, fused = "vision_backbone.featurizer", "vision_backbone.fused_featurizer"
    width = sizes.dino + sizes.siglip
    tensors: dict[str, tuple[int, ...]] = {
        f"{backbone}.cls_token": (1, 1, sizes.dino),
        f"{backbone}.reg_token": (1, 4, sizes.dino),
        **_tower(backbone, sizes, sizes.dino),
        **_tower(fused, sizes, sizes.siglip),
        f"{fused}.attn_pool.latent": (1, 1, sizes.siglip),
        **_linear(f"{fused}.attn_pool.q", sizes.siglip, sizes.siglip),
        **_linear(f"{fused}.attn_pool.kv", sizes.siglip, 2 * sizes.siglip),
        **_linear(f"{fused}.attn_pool.proj", sizes.siglip, sizes.siglip),
        **_norm(f"{fused}.attn_pool.norm", sizes.siglip),
        **_linear(f"{fused}.attn_pool.mlp.fc1", sizes.siglip, sizes.siglip_mlp),
        **_linear(f"{fused}.attn_pool.mlp.fc2", sizes.siglip_mlp, sizes.siglip),
        **_linear("projector.fc1", width, 4 * width),
        **_linear("projector.fc2", 4 * width, sizes.hidden),
        **_linear("projector.fc3", sizes.hidden, sizes.hidden),
        "language_model.model.embed_tokens.weight": (sizes.vocabulary, sizes.hidden),
        "language_model.model.norm.weight": (sizes.hidden,),
        "language_model.lm_head.weight": (sizes.vocabulary, sizes.hidden),
    }
    for block in range(24):
        tensors |= _block(f"{backbone}.blocks.{block}", sizes.dino, sizes.dino_mlp)
        tensors |= {f"{backbone}.blocks.{block}.ls{part}.scale_factor": (sizes.dino,) for part in (1, 2)}
    for block in range(27):
        tensors |= _block(f"{fused}.blocks.{block}", sizes.siglip, sizes.siglip_mlp)
    for layer in range(32):
        tensors |= _llama_layer(f"language_model.model.layers.{layer}", sizes)
    return tensors


def _tower(name: str, sizes: Sizes, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.pos_embed": (1, sizes.patches, width),
        f"{name}.patch_embed.proj.weight": (width, 3, sizes.patch, sizes.patch),
        f"{name}.patch_embed.proj.bias": (width,),
        **_norm(f"{name}.norm", width),
    }


def _block(name: str, width: int, mlp: int) -> dict[str, tuple[int, ...]]:
    return {
        **_norm(f"{name}.norm1", width),
        **_linear(f"{name}.attn.qkv", width, 3 * width),
        **_linear(f"{name}.attn.proj", width, width),
        **_norm(f"{name}.norm2", width),
        **_linear(f"{name}.mlp.fc1", width, mlp),
        **_linear(f"{name}.mlp.fc2", mlp, width),
    }


def _llama_layer(name: str, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    hidden, mlp = sizes.hidden, sizes.mlp
    return {
        **{f"{name}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"},
        f"{name}.mlp.gate_proj.weight": (mlp, hidden),
        f"{name}.mlp.up_proj.weight": (mlp, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, mlp),
        f"{name}.input_layernorm.weight": (hidden,),
        f"{name}.post_attention_layernorm.weight": (hidden,),
    }


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def write_openvla_directory(
    directory: Path,
    *,
    parts: Mapping[str, Mapping[str, Tensor]] | None = None,
    statistics: Mapping[str, Any] = STATISTICS,
) -> None:
    """Write a directory with tiny weights in the layout of published policies; `parts` are files of `.pt` weights."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {name: _random(shape, generator) for name, shape in published_tensors(TINY).items()}
    names = sorted(tensors)
    files = {f"model-0000{part + 1}-of-00003.safetensors": names[part::3] for part in range(3)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": {name: file for file in files for name in files[file]}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(_config()))
    (directory / "dataset_statistics.json").write_text(json.dumps(statistics))
    (directory / "preprocessor_config.json").write_text(json.dumps(_preprocessor()))
    write_llama_tokenizer(directory)
    for name, weights in (parts or {}).items():
        torch.save(dict(weights), directory / name)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    scale = 0.4 if len(shape) == 1 else float(torch.Size(shape[1:]).numel()) ** -0.5
    return (torch.randn(shape, generator=generator) * scale + (len(shape) == 1)).to(torch.bfloat16)


def _config() -> dict[str, Any]:
    """Return the settings of published policies, with the sizes of the towers, which timm's names would give."""
    tower = {"patch": TINY.patch, "image": 14, "heads": 2}
    dino = {"hidden": TINY.dino, "mlp": TINY.dino_mlp, "depth": 24, "registers": 4, "has_class_token": True}
    siglip = {"hidden": TINY.siglip, "mlp": TINY.siglip_mlp, "depth": 27, "has_attention_pool": True}
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "arch_specifier": "no-align+fused-gelu-mlp",
        "auto_map": {"AutoModelForVision2Seq": "modeling_prismatic.OpenVLAForActionPrediction"},
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [224, 224],
        "llm_backbone_id": "llama2-7b-pure",
        "llm_max_length": 2048,
        "model_type": "openvla",
        "n_action_bins": 256,
        "norm_stats": {"bridge_orig": {"action": BOUNDS}},
        "output_projector_states": False,
        "pad_to_multiple_of": 64,
        "pad_token_id": TINY.vocabulary - 64,
        "text_config": {
            "model_type": "llama",
            "pad_token_id": TINY.vocabulary - 64,
            "torch_dtype": "bfloat16",
            "vocab_size": TINY.vocabulary,
            "hidden_size": TINY.hidden,
            "intermediate_size": TINY.mlp,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
        "timm_model_ids": [DINOV2, SIGLIP],
        "timm_override_act_layers": [None, None],
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "vision_towers": [{**tower, **dino, "has_layer_scale": True}, {**tower, **siglip}],
    }


def _preprocessor() -> dict[str, Any]:
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, 224, 224], [3, 224, 224]],
        "interpolations": ["bicubic", "bicubic"],
        "means": [[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]],
        "stds": [[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]],
    }


def write_llama_tokenizer(directory: Path) -> None:
    """Write a tokenizer of characters that treats spaces as Llama's: `▁` is the empty word."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    characters = ["▁", "\n", *(chr(code) for code in range(33, 127))]
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *characters, "<PAD>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"unk_token": "<unk>", "pad_token": "<PAD>", "padding_side": "left"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
