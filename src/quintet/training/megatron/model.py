"""Megatron Core's GPT on packed tokens, with attention that follows a `Layout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    all_to_all,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from quintet.config.megatron import has_transformer_engine
from quintet.config.native.megatron import MegatronConfig
from quintet.errors import ConfigError
from quintet.policies.attention import Layout
from quintet.policies.causal_lm import Packed
from quintet.training.megatron.package import at_home, device

__all__ = ["PackedGPT", "block_spec", "build_chunks", "padded_vocabulary"]


@dataclass
class LaidOut(PackedSeqParams):  # type: ignore[misc]
    """How the tokens of a pass lie, on its way through Megatron's layers to their attention."""

    layout: Layout | None = None
    tokens: int = 0
    """Without those that fill the row up."""


class Attention(nn.Module):
    """Megatron's core attention by a `Layout`: no mask is built, nothing is padded but rows of different length."""

    def __init__(self, config: TransformerConfig, layer_number: int, **given: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1
        self.scale = config.kv_channels**-0.5 * getattr(config, "attention_scaling", 1.0) ** 2
        self.wide = bool(config.attention_softmax_in_fp32) and config.params_dtype is not torch.float32

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: LaidOut,
        **_: Any,
    ) -> Tensor:
        """query [P, 1, heads, dim], key and value [P, 1, kv_heads, dim] to [P, 1, heads × dim]."""
        layout, tokens = packed_seq_params.layout, packed_seq_params.tokens
        if layout is None:
            raise ValueError("a pass of a PackedGPT has a layout")
        ranks = parallel_state.get_context_parallel_world_size()
        q, k, v = (x[:, 0] for x in (query, key, value))
        if ranks > 1:
            q, k, v = (_by_heads(x, ranks) for x in (q, *_as_many(q, k, v, ranks)))
        filled = len(q)
        q, k, v = (x[:tokens].float() if self.wide else x[:tokens] for x in (q, k, v))
        out = F.pad(layout.attend(self.layer, q, k, v, self.scale), (0, 0, 0, 0, 0, filled - tokens))
        out = _by_tokens(out, ranks) if ranks > 1 else out
        return out.flatten(1).to(query.dtype)[:, None]


def _as_many(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Keys and values that ranks can share out by heads, as queries are."""
    each = query.shape[1] // key.shape[1]
    if key.shape[1] % ranks == 0:
        return key, value
    return key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)


def _by_heads(mine: Tensor, ranks: int) -> Tensor:
    """A part of the tokens with all heads, [P / ranks, heads, dim], to all tokens with a part of the heads."""
    parts = mine.reshape(len(mine), ranks, -1, mine.shape[-1]).transpose(0, 1).flatten(0, 1)
    own: Tensor = all_to_all(parallel_state.get_context_parallel_group(), parts.contiguous())
    return own


def _by_tokens(mine: Tensor, ranks: int) -> Tensor:
    """The inverse of `_by_heads`."""
    parts: Tensor = all_to_all(parallel_state.get_context_parallel_group(), mine.contiguous())
    return parts.reshape(ranks, -1, *parts.shape[1:]).transpose(0, 1).flatten(1, 2)


class Norm:
    """torch's norms for Megatron's layers, which sum their gradients over tensor-parallel ranks where each has a part
    of the sequence; Megatron's own wrapper refuses those."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        norm: nn.Module = nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype, device=device())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def block_spec(config: TransformerConfig, options: MegatronConfig, stage: int | None) -> TransformerBlockSubmodules:
    """The layers of a stage as `spec_name` has them, with `Attention` in their middle: `te_gpt` Transformer Engine's,
    `local_gpt` Megatron's own, `decoder_gpt` or none the former where they are installed on a GPU."""
    experts, grouped = config.num_moe_experts, config.moe_grouped_gemm
    fused = options.spec_name == "te_gpt" or (
        options.spec_name != "local_gpt" and has_transformer_engine() and torch.cuda.is_available()
    )
    if fused:
        layer = get_gpt_layer_with_transformer_engine_spec(experts, grouped, qk_layernorm=config.qk_layernorm)
    else:
        layer = get_gpt_layer_local_spec(experts, grouped, config.qk_layernorm, normalization=config.normalization)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = Attention
    if config.qk_layernorm and not fused:
        attention.q_layernorm = attention.k_layernorm = Norm
    number = get_num_layers_to_build(config, vp_stage=stage)
    return TransformerBlockSubmodules([layer] * number, layer_norm=TENorm if fused else Norm)


def padded_vocabulary(size: int, tensor: int) -> int:
    """The vocabulary filled up to a multiple of the ranks that share it."""
    return -(-size // tensor) * tensor


class PackedGPT(GPTModel):  # type: ignore[misc]
    """A stage of a decoder; the last gives hidden states at the places where something is predicted."""

    def __init__(
        self,
        hf: Any,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules,
        *,
        first: bool,
        last: bool,
        stage: int | None,
        critic: bool,
    ) -> None:
        super().__init__(
            config,
            spec,
            vocab_size=padded_vocabulary(hf.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=bool(hf.tie_word_embeddings) and not critic,
            position_embedding_type="rope",
            rotary_base=_theta(hf),
            vp_stage=stage,
        )
        self.frequencies = rotary_frequencies(hf)[0].to(device())
        self.vocabulary = int(hf.vocab_size)
        self.padding: int | None = getattr(hf, "pad_token_id", None)
        if not last:
            return
        if critic:
            del self.output_layer
            self.value_head = nn.Linear(config.hidden_size, 1, device=device(), dtype=config.params_dtype)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
            return
        # the head is given whole hidden states at a few places rather than a part of the sequence
        self.output_layer.sequence_parallel = False
        self.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1

    @property
    def own_tokens(self) -> range:
        """Those of the vocabulary whose logits this rank makes."""
        ranks = self.config.tensor_model_parallel_size
        each = padded_vocabulary(self.vocabulary, ranks) // ranks
        start = each * parallel_state.get_tensor_model_parallel_rank()
        return range(min(start, self.vocabulary), min(start + each, self.vocabulary))

    def forward(self, packed: Packed, width: int | None = None) -> Tensor:
        """Hidden states at the packed's sources, [M, hidden]; before the last stage, at all tokens [P, 1, hidden]. The
        row is filled up to `width` tokens."""
        length = len(packed.tokens)
        total = max(width or 0, self.row(length))
        filled = F.pad(packed.tokens, (0, total - length))
        positions = F.pad(packed.positions, (0, total - length))
        shares = self.config.context_parallel_size
        if shares > 1:
            rank = parallel_state.get_context_parallel_rank()
            filled, positions = filled.chunk(shares)[rank], positions.chunk(shares)[rank]
        hidden = self._embedded(filled, positions) if self.pre_process else None
        angles = positions[:, None] * self.frequencies
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None],
            packed_seq_params=LaidOut(qkv_format="sbhd", layout=packed.layout, tokens=length),
        )
        if not self.post_process:
            return cast(Tensor, hidden)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        if shares > 1:
            group = parallel_state.get_context_parallel_group()
            # all of them go on with the same loss, divided by their number: its gradients are summed here
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        states: Tensor = hidden[:, 0].index_select(0, packed.sources)
        return states

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[P] to [P, 1, hidden], or this rank's part of it. The padding token's embedding isn't learnt, as in
        transformers."""
        hidden: Tensor = self.embedding(input_ids=tokens[None], position_ids=positions[None])
        if self.padding is None:
            return hidden
        padding = tokens == self.padding
        if self.config.sequence_parallel:
            rank = parallel_state.get_tensor_model_parallel_rank()
            padding = padding.chunk(self.config.tensor_model_parallel_size)[rank]
        return torch.where(padding[:, None, None], hidden.detach(), hidden)

    def row(self, tokens: int) -> int:
        """Tokens of a row that can be shared out."""
        parts = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        parts *= self.config.context_parallel_size
        return int(-(-tokens // parts) * parts)

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [m, hidden] to logits of `own_tokens`, [m, slice]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: Tensor = self.output_layer(hidden, weight=weight)[0]
        return logits[:, : len(self.own_tokens)]


def _theta(hf: Any) -> float:
    return float((getattr(hf, "rope_parameters", None) or {}).get("rope_theta", 10000.0))


def rotary_frequencies(hf: Any) -> tuple[Tensor, float]:
    """Angle of each pair of dimensions for one position, float32 [dim / 2], as transformers makes them, and the
    factor by which it scales queries and keys.

    Raises:
        ConfigError: they depend on the length of the sequence.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(hf, "rope_parameters", None) or {}
    kind = str(rope.get("rope_type", "default"))
    if kind == "default":
        size = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        return _theta(hf) ** -(torch.arange(0, size, 2, dtype=torch.int64).float() / size), 1.0
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(
            f"positions of kind {kind!r} aren't there under Megatron", key="policy.path", hint="actor.backend=fsdp2"
        )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return frequencies, float(scaling)


def build_chunks(
    hf: Any, config: TransformerConfig, options: MegatronConfig, *, critic: bool = False, freeze_router: bool = False
) -> list[PackedGPT]:
    """This process's part of the model: one stage, or several where the pipeline is virtual. Weights aren't set."""
    config.attention_scaling = rotary_frequencies(hf)[1]
    parts = config.virtual_pipeline_model_parallel_size
    chunks = []
    with at_home():
        for stage in range(parts or 1):
            own = stage if parts else None
            first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=own)
            last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=own)
            spec = block_spec(config, options, own)
            chunks.append(PackedGPT(hf, config, spec, first=first, last=last, stage=own, critic=critic))
    for chunk in chunks:
        chunk.to(device())
        _mark_cut(chunk)
        for name, parameter in chunk.named_parameters():
            if freeze_router and ".router." in name:
                parameter.requires_grad_(requires_grad=False)
    return chunks


def _mark_cut(chunk: PackedGPT) -> None:
    """Say which weights are parts, which Megatron does only where it initialises them: norms of gradients count
    others once."""
    for module in chunk.modules():
        kinds = (ColumnParallelLinear, VocabParallelEmbedding, RowParallelLinear)
        weight = getattr(module, "weight", None)
        if isinstance(module, kinds) and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, int(isinstance(module, RowParallelLinear)), 1)
