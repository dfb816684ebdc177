"""Megatron Core's GPT on packed sequences, with attention by a `AttentionLayout`."""

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

from quintet.config.checks.megatron import has_transformer_engine
from quintet.config.native.megatron import MegatronConfig
from quintet.errors import ConfigError
from quintet.policies.attention import AttentionLayout
from quintet.policies.packed_batch import PackedBatch
from quintet.training.megatron.core_package import compute_device, emulate_cuda


@dataclass
class LayoutParams(PackedSeqParams):  # type: ignore[misc]
    """AttentionLayout of packed sequences, which Megatron's layers pass on to their attention."""

    layout: AttentionLayout | None = None
    num_tokens: int = 0
    """Number of tokens without padding."""


class Attention(nn.Module):
    """Megatron's core attention by a `AttentionLayout`, without an attention mask."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1
        self.scale = config.kv_channels**-0.5 * getattr(config, "attention_scaling", 1.0) ** 2
        self.compute_in_float32 = bool(config.attention_softmax_in_fp32) and config.params_dtype is not torch.float32

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: LayoutParams,
        **_: Any,
    ) -> Tensor:
        """Return the output, [P, 1, heads × dim], of query [P, 1, heads, dim] and key, value [P, 1, kv_heads, dim]."""
        layout, tokens = packed_seq_params.layout, packed_seq_params.num_tokens
        if layout is None:
            raise ValueError("PackedGPT needs a layout for each pass")
        ranks = parallel_state.get_context_parallel_world_size()
        q, k, v = (x[:, 0] for x in (query, key, value))
        if ranks > 1:
            q, k, v = (_shard_heads(x, ranks) for x in (q, *_repeat_kv_heads(q, k, v, ranks)))
        padded_length = len(q)
        q, k, v = (x[:tokens].float() if self.compute_in_float32 else x[:tokens] for x in (q, k, v))
        out = F.pad(layout.attend(self.layer, q, k, v, self.scale), (0, 0, 0, 0, 0, padded_length - tokens))
        out = _shard_tokens(out, ranks) if ranks > 1 else out
        return out.flatten(1).to(query.dtype)[:, None]


def _repeat_kv_heads(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Repeat heads of keys and values if ranks cannot divide them as they divide query heads."""
    repeats = query.shape[1] // key.shape[1]
    if key.shape[1] % ranks == 0:
        return key, value
    return key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)


def _shard_heads(local: Tensor, ranks: int) -> Tensor:
    """Exchange a slice of tokens with all heads, [P / ranks, heads, dim], for all tokens with a slice of heads."""
    parts = local.reshape(len(local), ranks, -1, local.shape[-1]).transpose(0, 1).flatten(0, 1)
    exchanged: Tensor = all_to_all(parallel_state.get_context_parallel_group(), parts.contiguous())
    return exchanged


def _shard_tokens(local: Tensor, ranks: int) -> Tensor:
    """Invert `_shard_heads`."""
    parts: Tensor = all_to_all(parallel_state.get_context_parallel_group(), local.contiguous())
    return parts.reshape(ranks, -1, *parts.shape[1:]).transpose(0, 1).flatten(1, 2)


class Norm:
    """torch's RMSNorm for Megatron's layers, with gradients summed over tensor-parallel ranks under sequence
    parallelism, which Megatron's own wrapper does not support."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        norm: nn.Module = nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype, device=compute_device())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def block_spec(config: TransformerConfig, options: MegatronConfig, stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of a stage by `spec_name`, with `Attention` as core attention: `te_gpt` Transformer Engine's,
    `local_gpt` Megatron's, otherwise Transformer Engine's if it is installed and there is a GPU."""
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


def padded_vocab_size(size: int, tensor: int) -> int:
    """Return the vocabulary size padded to a multiple of the tensor-parallel ranks."""
    return -(-size // tensor) * tensor


class PackedGPT(GPTModel):  # type: ignore[misc]
    """A pipeline stage of a decoder; the last one returns hidden states at predicting positions."""

    def __init__(
        self,
        hf_config: Any,
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
            vocab_size=padded_vocab_size(hf_config.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings) and not critic,
            position_embedding_type="rope",
            rotary_base=_theta(hf_config),
            vp_stage=stage,
        )
        self.frequencies = rotary_frequencies(hf_config)[0].to(compute_device())
        self.true_vocab_size = int(hf_config.vocab_size)
        self.pad_token_id: int | None = getattr(hf_config, "pad_token_id", None)
        if not last:
            return
        if critic:
            del self.output_layer
            self.value_head = nn.Linear(config.hidden_size, 1, device=compute_device(), dtype=config.params_dtype)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
            return
        # the head gets full hidden states at a few positions instead of a slice of the sequence
        self.output_layer.sequence_parallel = False
        self.output_layer.allreduce_dgrad = config.tensor_model_parallel_size > 1

    @property
    def local_vocab(self) -> range:
        """Token ids of which this rank computes logits."""
        ranks = self.config.tensor_model_parallel_size
        size = padded_vocab_size(self.true_vocab_size, ranks) // ranks
        start = size * parallel_state.get_tensor_model_parallel_rank()
        return range(min(start, self.true_vocab_size), min(start + size, self.true_vocab_size))

    def forward(self, packed: PackedBatch, min_length: int | None = None) -> Tensor:
        """Return hidden states at the predicting positions, [M, hidden]; before the last stage at all tokens,
        [P, 1, hidden]. Tokens are padded to at least `min_length`."""
        length = len(packed.tokens)
        total = max(min_length or 0, self.padded_length(length))
        tokens = F.pad(packed.tokens, (0, total - length))
        positions = F.pad(packed.position_ids, (0, total - length))
        context_ranks = self.config.context_parallel_size
        if context_ranks > 1:
            rank = parallel_state.get_context_parallel_rank()
            tokens, positions = tokens.chunk(context_ranks)[rank], positions.chunk(context_ranks)[rank]
        hidden = self._embed(tokens, positions) if self.pre_process else None
        angles = positions[:, None] * self.frequencies
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None],
            packed_seq_params=LayoutParams(qkv_format="sbhd", layout=packed.layout, num_tokens=length),
        )
        if not self.post_process:
            return cast(Tensor, hidden)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        if context_ranks > 1:
            group = parallel_state.get_context_parallel_group()
            # all context ranks compute the same loss, divided by their number: its gradients are summed here
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        states: Tensor = hidden[:, 0].index_select(0, packed.prediction_indices)
        return states

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return embeddings [P, 1, hidden], or this rank's part of them. As in transformers, the padding token's
        embedding is not trained."""
        hidden: Tensor = self.embedding(input_ids=tokens[None], position_ids=positions[None])
        if self.pad_token_id is None:
            return hidden
        is_padding = tokens == self.pad_token_id
        if self.config.sequence_parallel:
            rank = parallel_state.get_tensor_model_parallel_rank()
            is_padding = is_padding.chunk(self.config.tensor_model_parallel_size)[rank]
        return torch.where(is_padding[:, None, None], hidden.detach(), hidden)

    def padded_length(self, tokens: int) -> int:
        """Return the number of tokens padded to a multiple of the ranks that divide a sequence."""
        parts = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        parts *= self.config.context_parallel_size
        return int(-(-tokens // parts) * parts)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits of `local_vocab`, [m, slice], of hidden states [m, hidden]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits: Tensor = self.output_layer(hidden, weight=weight)[0]
        return logits[:, : len(self.local_vocab)]


def _theta(hf_config: Any) -> float:
    return float((getattr(hf_config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))


def rotary_frequencies(hf_config: Any) -> tuple[Tensor, float]:
    """Return the rotary frequency of each pair of dimensions, float32 [dim / 2], as in transformers, and its scaling
    factor of queries and keys.

    Raises:
        ConfigError: the frequencies depend on the sequence length.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(hf_config, "rope_parameters", None) or {}
    kind = str(rope.get("rope_type", "default"))
    if kind == "default":
        size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return _theta(hf_config) ** -(torch.arange(0, size, 2, dtype=torch.int64).float() / size), 1.0
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(
            f"policy.path: Megatron does not support rope type {kind!r}",
            key="policy.path",
            hint="set actor.backend=fsdp2",
        )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return frequencies, float(scaling)


def build_chunks(
    hf_config: Any,
    config: TransformerConfig,
    options: MegatronConfig,
    *,
    critic: bool = False,
    freeze_router: bool = False,
) -> list[PackedGPT]:
    """Build this process's stage of the model, or several virtual ones, without initialising weights."""
    config.attention_scaling = rotary_frequencies(hf_config)[1]
    virtual_stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    with emulate_cuda():
        for index in range(virtual_stages or 1):
            stage = index if virtual_stages else None
            first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
            last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
            spec = block_spec(config, options, stage)
            chunks.append(PackedGPT(hf_config, config, spec, first=first, last=last, stage=stage, critic=critic))
    for chunk in chunks:
        chunk.to(compute_device())
        _mark_sharded_weights(chunk)
        for name, parameter in chunk.named_parameters():
            if freeze_router and ".router." in name:
                parameter.requires_grad_(requires_grad=False)
    return chunks


def _mark_sharded_weights(chunk: PackedGPT) -> None:
    """Mark weights that are sharded by tensor parallelism, because Megatron counts other gradients once in the norm;
    Megatron itself marks them only when it initialises weights."""
    for module in chunk.modules():
        kinds = (ColumnParallelLinear, VocabParallelEmbedding, RowParallelLinear)
        weight = getattr(module, "weight", None)
        if isinstance(module, kinds) and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, int(isinstance(module, RowParallelLinear)), 1)
