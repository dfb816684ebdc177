"""Mapping between Hugging Face and Megatron weights, tensor by tensor.

Megatron stores queries, keys and values of a layer in one matrix, by query group: the queries of a group, then their
key and value. A gated MLP has the gate rows above the up rows, and a tensor-parallel rank has its part of the gate
above its part of up. The vocabulary is padded with zeros to a multiple of the ranks. The conversion only moves values,
so it is exact. It also applies to optimizer moments, which have the same shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from quintet.package_files import read_yaml

TensorLayout = Literal["replicated", "rows", "columns", "qkv", "gated", "vocabulary"]


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Dimensions of a model that determine the layout of its tensors."""

    num_heads: int
    num_groups: int
    """Number of key-value heads."""
    head_dim: int
    vocab_size: int

    @classmethod
    def from_hf_config(cls, hf_config: Any) -> ModelDims:
        """Return the dimensions of a Hugging Face model configuration."""
        dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return cls(hf_config.num_attention_heads, hf_config.num_key_value_heads, dim, hf_config.vocab_size)


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """A Megatron tensor, the Hugging Face tensors that it contains, and their layout in it."""

    megatron: str
    hugging_face: tuple[str, ...]
    layout: TensorLayout


TABLES: Final = read_yaml(__file__)
LAYER_TENSORS, EXPERT_TENSORS, OTHER_TENSORS = (
    tuple(TensorMapping(name, tuple(tensor["from"]), tensor["layout"]) for name, tensor in TABLES[part].items())
    for part in ("layer", "expert", "other")
)
FUSED_NORMS: Mapping[str, str] = TABLES["fused_norms"]
STACKED_NAMES: Mapping[str, str] = TABLES["stacked"]

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


def tensor_mapping(name: str) -> TensorMapping:
    """Return the mapping of a Megatron tensor, with layers and experts numbered globally.

    Raises:
        KeyError: the name is unknown.
    """
    match = LAYER.fullmatch(name)
    if match is None:
        return _find(name, OTHER_TENSORS, name)
    number, rest = match.groups()
    prefix = f"model.layers.{number}."
    table = LAYER_TENSORS
    rest = FUSED_NORMS.get(rest, rest)
    expert = EXPERT.fullmatch(rest)
    if expert is not None:
        prefix = f"{prefix}mlp.experts.{expert[1]}."
        table = EXPERT_TENSORS
        rest = expert[2]
    mapping = _find(rest, table, name)
    return TensorMapping(name, tuple(f"{prefix}{suffix}" for suffix in mapping.hugging_face), mapping.layout)


def stacked_experts(name: str) -> tuple[str, int] | None:
    """Return the name of the tensor in which transformers stacks an expert's tensor in memory, and the expert's index;
    None for other tensors. In files each expert has its own tensor, see `tensor_mapping`."""
    layer = LAYER.fullmatch(name)
    expert = EXPERT.fullmatch(layer[2]) if layer else None
    if layer is None or expert is None:
        return None
    return f"model.layers.{layer[1]}.mlp.experts.{STACKED_NAMES[expert[2]]}", int(expert[1])


def _find(suffix: str, table: tuple[TensorMapping, ...], name: str) -> TensorMapping:
    for mapping in table:
        if mapping.megatron == suffix:
            return mapping
    raise KeyError(f"{name} has no counterpart in a Hugging Face model")


def tensor_mappings(hugging_face: set[str], layers: int) -> Iterator[TensorMapping]:
    """Yield the mappings of the Megatron tensors that contain the Hugging Face tensors, layer by layer."""
    table = [*OTHER_TENSORS]
    for number in range(layers):
        table += [tensor_mapping(f"decoder.layers.{number}.{mapping.megatron}") for mapping in LAYER_TENSORS]
        experts = sum(name.startswith(f"model.layers.{number}.mlp.experts.") for name in hugging_face) // 3
        for expert in range(experts):
            local = f"decoder.layers.{number}.mlp.experts.local_experts.{expert}."
            table += [tensor_mapping(f"{local}{mapping.megatron}") for mapping in EXPERT_TENSORS]
    return (mapping for mapping in table if set(mapping.hugging_face) <= hugging_face)


def from_hugging_face(parts: list[Tensor], layout: TensorLayout, shape: ModelDims) -> Tensor:
    """Convert Hugging Face tensors to Megatron's full tensor: [out, in], or [out] of a bias."""
    if layout == "gated":
        return torch.cat(parts)
    if layout != "qkv":
        return parts[0]
    per_group = [part.reshape(shape.num_groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(per_group, dim=1).flatten(0, 1)


def to_hugging_face(full: Tensor, layout: TensorLayout, shape: ModelDims) -> list[Tensor]:
    """Invert `from_hugging_face`."""
    if layout == "gated":
        return list(full.chunk(2))
    if layout == "vocabulary":
        return [full[: shape.vocab_size]]
    if layout != "qkv":
        return [full]
    sizes = [shape.num_heads // shape.num_groups * shape.head_dim, shape.head_dim, shape.head_dim]
    per_group = full.reshape(shape.num_groups, -1, *full.shape[1:])
    return [part.flatten(0, 1) for part in torch.split(per_group, sizes, dim=1)]


def take_shard(full: Tensor, layout: TensorLayout, rank: int, ranks: int) -> Tensor:
    """Return a tensor-parallel rank's shard of Megatron's full tensor."""
    if ranks == 1 or layout == "replicated":
        return full
    if layout == "columns":
        return full.chunk(ranks, dim=1)[rank]
    if layout == "gated":
        return torch.cat([half.chunk(ranks)[rank] for half in full.chunk(2)])
    if layout == "vocabulary" and len(full) % ranks:
        padding = -len(full) % ranks
        full = torch.cat([full, full.new_zeros(padding, *full.shape[1:])])
    return full.chunk(ranks)[rank]


def join_shards(parts: list[Tensor], layout: TensorLayout) -> Tensor:
    """Invert `take_shard`; a vocabulary stays padded."""
    if len(parts) == 1 or layout == "replicated":
        return parts[0]
    if layout == "columns":
        return torch.cat(parts, dim=1)
    if layout == "gated":
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(parts)
