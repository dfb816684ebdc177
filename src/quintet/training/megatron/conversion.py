"""Hugging Face weights ↔ Megatron's, tensor by tensor.

Megatron lays queries, keys and values of one layer into one matrix, group by group: the queries that share a key, then
that key and that value. A gated feed-forward layer holds gate above up, and a tensor-parallel rank has its part of the
gate above its part of up. The vocabulary is filled up with zeros to a multiple of the ranks. Both ways are exact: no
number is computed, only moved. What holds of weights holds of the optimizer's moments, which have the same shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Entry", "Shape", "cut", "entries", "entry_of", "from_hugging_face", "join", "stack_of", "to_hugging_face"]

Kind = Literal["whole", "rows", "columns", "qkv", "gated", "vocabulary"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides how its tensors lie."""

    heads: int
    groups: int
    """Key-value heads."""
    dim: int
    """Of one head."""
    vocabulary: int

    @classmethod
    def of(cls, hf: Any) -> Shape:
        """From a Hugging Face configuration."""
        dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        return cls(hf.num_attention_heads, hf.num_key_value_heads, dim, hf.vocab_size)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of Megatron's, the Hugging Face tensors that it holds, and how it is made of them."""

    megatron: str
    hugging_face: tuple[str, ...]
    kind: Kind


IN_LAYERS: tuple[Entry, ...] = (
    Entry("input_layernorm.weight", ("input_layernorm.weight",), "whole"),
    Entry(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv",
    ),
    Entry(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "qkv",
    ),
    Entry("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "whole"),
    Entry("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "whole"),
    Entry("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
    Entry("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), "whole"),
    Entry("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "whole"),
    Entry("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated"),
    Entry("mlp.linear_fc1.bias", ("mlp.gate_proj.bias", "mlp.up_proj.bias"), "gated"),
    Entry("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"),
    Entry("mlp.linear_fc2.bias", ("mlp.down_proj.bias",), "whole"),
    Entry("mlp.router.weight", ("mlp.gate.weight",), "whole"),
)
OF_EXPERTS: tuple[Entry, ...] = (
    Entry("linear_fc1.weight", ("gate_proj.weight", "up_proj.weight"), "gated"),
    Entry("linear_fc2.weight", ("down_proj.weight",), "columns"),
)
OUTSIDE: tuple[Entry, ...] = (
    Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary"),
    Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "whole"),
    Entry("output_layer.weight", ("lm_head.weight",), "vocabulary"),
    Entry("value_head.weight", ("value_head.weight",), "whole"),
    Entry("value_head.bias", ("value_head.bias",), "whole"),
)
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Where Transformer Engine keeps norms, inside the linear layers that follow them."""

STACKS = {"linear_fc1.weight": "gate_up_proj", "linear_fc2.weight": "down_proj"}
"""What transformers calls the tensor in which it holds an expert's with those of all experts of the layer: [experts,
out, in], each as Megatron has it whole."""

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


def entry_of(name: str) -> Entry:
    """What the Megatron tensor of that name holds; layers and experts are numbered over all ranks.

    Raises:
        KeyError: nothing is known of it.
    """
    found = LAYER.fullmatch(name)
    if found is None:
        return next(entry for entry in OUTSIDE if entry.megatron == name) if name in _names(OUTSIDE) else _unknown(name)
    number, rest = found.groups()
    prefix, table, rest = f"model.layers.{number}.", IN_LAYERS, FUSED_NORMS.get(rest, rest)
    expert = EXPERT.fullmatch(rest)
    if expert is not None:
        prefix, table, rest = f"{prefix}mlp.experts.{expert[1]}.", OF_EXPERTS, expert[2]
    for entry in table:
        if entry.megatron == rest:
            return Entry(name, tuple(f"{prefix}{own}" for own in entry.hugging_face), entry.kind)
    return _unknown(name)


def stack_of(name: str) -> tuple[str, int] | None:
    """The tensor in which transformers, in memory, has an expert's Megatron tensor beside the other experts', and its
    number there; None of what is no expert's. In files each expert has its own, as `entry_of` says."""
    layer = LAYER.fullmatch(name)
    expert = EXPERT.fullmatch(layer[2]) if layer else None
    if layer is None or expert is None:
        return None
    return f"model.layers.{layer[1]}.mlp.experts.{STACKS[expert[2]]}", int(expert[1])


def _names(table: tuple[Entry, ...]) -> set[str]:
    return {entry.megatron for entry in table}


def _unknown(name: str) -> Entry:
    raise KeyError(f"{name} has no counterpart in a Hugging Face model")


def entries(hugging_face: set[str], layers: int) -> Iterator[Entry]:
    """The Megatron tensors that hold the given Hugging Face tensors, layer by layer."""
    table = [*OUTSIDE]
    for number in range(layers):
        table += [entry_of(f"decoder.layers.{number}.{entry.megatron}") for entry in IN_LAYERS]
        experts = sum(name.startswith(f"model.layers.{number}.mlp.experts.") for name in hugging_face) // 3
        for expert in range(experts):
            local = f"decoder.layers.{number}.mlp.experts.local_experts.{expert}."
            table += [entry_of(f"{local}{entry.megatron}") for entry in OF_EXPERTS]
    return (entry for entry in table if set(entry.hugging_face) <= hugging_face)


def from_hugging_face(parts: list[Tensor], kind: Kind, shape: Shape) -> Tensor:
    """Hugging Face tensors to Megatron's as one rank would hold it: [out, in], or [out] of a bias."""
    if kind == "gated":
        return torch.cat(parts)
    if kind != "qkv":
        return parts[0]
    per_group = [part.reshape(shape.groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(per_group, dim=1).flatten(0, 1)


def to_hugging_face(whole: Tensor, kind: Kind, shape: Shape) -> list[Tensor]:
    """The inverse of `from_hugging_face`."""
    if kind == "gated":
        return list(whole.chunk(2))
    if kind == "vocabulary":
        return [whole[: shape.vocabulary]]
    if kind != "qkv":
        return [whole]
    sizes = [shape.heads // shape.groups * shape.dim, shape.dim, shape.dim]
    per_group = whole.reshape(shape.groups, -1, *whole.shape[1:])
    return [part.flatten(0, 1) for part in torch.split(per_group, sizes, dim=1)]


def cut(whole: Tensor, kind: Kind, rank: int, ranks: int) -> Tensor:
    """A tensor-parallel rank's part of Megatron's whole tensor."""
    if ranks == 1 or kind == "whole":
        return whole
    if kind == "columns":
        return whole.chunk(ranks, dim=1)[rank]
    if kind == "gated":
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
    if kind == "vocabulary" and len(whole) % ranks:
        missing = -len(whole) % ranks
        whole = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
    return whole.chunk(ranks)[rank]


def join(parts: list[Tensor], kind: Kind) -> Tensor:
    """The inverse of `cut`, from the parts of all ranks; a vocabulary stays filled up."""
    if len(parts) == 1 or kind == "whole":
        return parts[0]
    if kind == "columns":
        return torch.cat(parts, dim=1)
    if kind == "gated":
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(parts)
