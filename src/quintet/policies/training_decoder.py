"""The forward and backward pass of Llama-like decoders on a CPU, where gradients are wanted.

The same numbers as the model's own modules, which read and write memory some thirty times a layer besides their matrix
products; here each of norm, positions, attention and gate is one pass over its data (`kernels.training`), queries, keys
and values come of one product, gates and ups of another, and weights are cast once for both passes. A model that isn't
known to the last detail, or is hooked into, keeps its modules.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quintet.kernels.training import TrainingKernels, training_kernels
from quintet.policies.attention import Layout, PackedLayout
from quintet.policies.attention_kernels import attention_kernel

__all__ = ["training_states"]

BODIES = frozenset({"LlamaModel", "MistralModel", "Qwen2Model"})
LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"})
LANES = 16
"""Numbers that the kernels take at a time: heads are as wide or a multiple of it."""


class _Pass(NamedTuple):
    """What is the same for all layers of a pass."""

    kernels: TrainingKernels
    words: Tensor
    cosine: Tensor
    sine: Tensor
    heads: int
    kv_heads: int
    dim: int
    scale: float


class _Weights(NamedTuple):
    """Of a layer, as matrices are multiplied."""

    attention: Tensor
    """[(heads + 2 · kv_heads) · dim, hidden]."""
    out: Tensor
    both: Tensor
    """Gates and ups, [2 · mlp, hidden]."""
    down: Tensor


class _Layer(torch.autograd.Function):
    """A decoder's layer: states float32 [P, hidden], and what is to be added to them in the kernels' type; gives the
    same of the states behind it."""

    @staticmethod
    def forward(
        ctx: Any, shared: _Pass, eps: tuple[float, float], states: Tensor, more: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`weights` are those of `_weights_of`, in its order."""
        kernels = shared.kernels
        first, second, bias, cast = _cast(weights, kernels.dtype)
        before, normed, scales = kernels.norm(states, more, first, eps[0])
        mixed = torch.mm(normed, cast.attention.t()) if bias is None else torch.addmm(bias, normed, cast.attention.t())
        kernels.turn(mixed, shared.heads + shared.kv_heads, shared.dim, shared.cosine, shared.sine)
        attended, sums = kernels.attend(shared.words, shared.scale, mixed, shared.heads, shared.dim)
        middle, inner, inner_scales = kernels.norm(before, torch.mm(attended, cast.out.t()), second, eps[1])
        both = torch.mm(inner, cast.both.t())
        found = torch.mm(kernels.gate(both), cast.down.t())
        ctx.shared, ctx.biased, ctx.added = shared, bias is not None, more is not None
        ctx.sizes = [len(weight) for weight in weights]
        ctx.save_for_backward(
            before, normed, scales, mixed, attended, sums, middle, inner, inner_scales, both, first, second, *cast
        )
        return middle, found

    @staticmethod
    def backward(ctx: Any, by_middle: Tensor | None, by_found: Tensor) -> tuple[Any, ...]:
        """Gradients of all that `forward` was given."""
        shared, kernels = ctx.shared, ctx.shared.kernels
        saved = ctx.saved_tensors
        before, normed, scales, mixed, attended, sums, middle, inner, inner_scales, both, first, second = saved[:12]
        cast = _Weights(*saved[12:])
        by_both, gated = kernels.gate_back(both, torch.mm(by_found, cast.down))
        by_down = kernels.product(by_found, gated)
        states, narrow, by_second = kernels.norm_back(
            torch.mm(by_both, cast.both), middle, second, inner_scales, by_middle
        )
        by_states = kernels.attend_back(shared.words, shared.scale, mixed, attended, sums, torch.mm(narrow, cast.out))
        by_mixed, by_bias = kernels.turn_back(
            by_states, shared.heads + shared.kv_heads, shared.dim, shared.cosine, shared.sine
        )
        by_out, by_inputs = kernels.product(narrow, attended), kernels.product(by_mixed, normed)
        by_gates = kernels.product(by_both, inner)
        states, narrow, by_first = kernels.norm_back(torch.mm(by_mixed, cast.attention), before, first, scales, states)
        parts = torch.split(by_inputs, ctx.sizes[2:5])
        biases = torch.split(by_bias, ctx.sizes[5:8]) if ctx.biased else (None, None, None)
        gates = torch.split(by_gates, ctx.sizes[9:11])
        return (
            None, None, states, narrow if ctx.added else None,
            by_first, by_second, *parts, *biases, by_out, *gates, by_down,
        )  # fmt: skip


class _Norm(torch.autograd.Function):
    """The norm behind the last layer."""

    @staticmethod
    def forward(ctx: Any, kernels: TrainingKernels, eps: float, states: Tensor, more: Tensor, weight: Tensor) -> Tensor:
        """In the kernels' type."""
        kept, out, scales = kernels.norm(states, more, weight, eps)
        ctx.kernels = kernels
        ctx.save_for_backward(kept, scales, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of all that `forward` was given."""
        kept, scales, weight = ctx.saved_tensors
        states, narrow, by_weight = ctx.kernels.norm_back(grad.contiguous(), kept, weight, scales, None)
        return None, None, states, narrow, by_weight


def _cast(weights: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, _Weights]:
    """Both norms' weights, the bias of queries, keys and values, and the matrices."""
    first, second, query, key, value, query_bias, key_bias, value_bias, out, gate, up, down = weights
    bias = torch.cat([query_bias, key_bias, value_bias]).to(dtype) if len(query_bias) else None
    matrices = _Weights(_joined(dtype, query, key, value), out.to(dtype), _joined(dtype, gate, up), down.to(dtype))
    return first, second, bias, matrices


def _joined(dtype: torch.dtype, *parts: Tensor) -> Tensor:
    """One below the other."""
    joined = parts[0].new_empty(sum(len(part) for part in parts), parts[0].shape[1], dtype=dtype)
    for place, part in zip(torch.split(joined, [len(part) for part in parts]), parts, strict=True):
        place.copy_(part)
    return joined


def training_states(body: nn.Module, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor | None:
    """Last hidden state of each token, [P] to [P, hidden], in the type in which matrices are multiplied; None where the
    modules themselves must be asked. See `causal_lm.hidden_states`."""
    if type(layout) is not PackedLayout or tokens.device.type != "cpu" or not len(tokens):
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    kernels = training_kernels(dtype)
    if kernels is None or not _is_known(body) or attention_kernel(body.layers[0].self_attn):  # type: ignore[index, union-attr]
        return None
    return _states(body, kernels, tokens, positions, layout)


def _states(body: Any, kernels: TrainingKernels, tokens: Tensor, positions: Tensor, layout: PackedLayout) -> Tensor:
    states: Tensor = body.embed_tokens(tokens)
    with torch.no_grad():
        cosine, sine = (x[0].float().contiguous() for x in body.rotary_emb(states[None], positions[None]))
    attention = body.layers[0].self_attn
    dim = int(attention.head_dim)
    heads, kv_heads = (len(module.weight) // dim for module in (attention.q_proj, attention.k_proj))
    words = layout.words(heads, kv_heads, dim)
    shared = _Pass(kernels, words, cosine, sine, heads, kv_heads, dim, float(attention.scaling))
    more: Tensor | None = None
    with torch.autocast("cpu", enabled=False):
        for layer in body.layers:
            eps = (layer.input_layernorm.variance_epsilon, layer.post_attention_layernorm.variance_epsilon)
            states, more = _Layer.apply(shared, eps, states, more, *_weights_of(layer))  # type: ignore[no-untyped-call]
        normed: Tensor = _Norm.apply(kernels, body.norm.variance_epsilon, states, more, body.norm.weight)  # type: ignore[no-untyped-call]
    return normed


def _weights_of(layer: Any) -> tuple[Tensor, ...]:
    """As `_Layer` takes them; a bias that isn't there is empty."""
    none = torch.empty(0)
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return (
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
        *(projection.weight for projection in projections),
        *(none if projection.bias is None else projection.bias for projection in projections),
        attention.o_proj.weight,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
    )


def _is_known(body: Any) -> bool:
    kind = type(body)
    if kind.__name__ not in BODIES or not kind.__module__.startswith("transformers.models."):
        return False
    layers = body.layers
    if not len(layers) or body.config.get_text_config().hidden_act != "silu":
        return False
    if any(_is_changed(module) for module in body.modules()) or not _is_plain(body.embed_tokens.weight):
        return False
    return all(_is_plain_layer(layer) for layer in layers) and _is_plain(body.norm.weight)


def _is_plain_layer(layer: Any) -> bool:
    """Whether it is of a known kind, with weights in float32 of which none is elsewhere, and keeps all activations."""
    if type(layer).__name__ not in LAYERS or getattr(layer, "gradient_checkpointing", False):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
    outputs = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if any(type(module) is not nn.Linear for module in (*inputs, *outputs)):
        return False
    if any(module.bias is not None for module in outputs) or len({module.bias is None for module in inputs}) > 1:
        return False
    dropped = attention.training and getattr(attention, "attention_dropout", 0.0)
    if not all(_is_plain(weight) for weight in _weights_of(layer)):
        return False
    turned = getattr(attention.config, "rope_parameters", None) or {}
    if dropped or turned.get("partial_rotary_factor", 1.0) != 1.0:
        return False
    return bool(attention.head_dim % LANES == 0) and not _slides(layer)


def _slides(layer: Any) -> bool:
    """Whether it looks back so far and no further: the modules refuse what is longer."""
    own = getattr(layer.self_attn, "sliding_window", None)
    if type(layer).__name__ == "MistralDecoderLayer":
        own = getattr(layer.self_attn.config, "sliding_window", None)
    return own is not None


def _is_changed(module: nn.Module) -> bool:
    """Whether somebody hooked into a module, or gave it another forward pass."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooked) or "forward" in vars(module) or module._compiled_call_impl is not None


def _is_plain(weight: Tensor) -> bool:
    """Whether all of it lies here, in float32."""
    kind = type(weight) in (nn.Parameter, Tensor) and weight.dtype is torch.float32
    return kind and weight.device.type == "cpu" and weight.is_contiguous()
