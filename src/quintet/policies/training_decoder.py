"""Forward and backward pass of Llama-like decoders on a CPU with compiled kernels.

Besides matrix products, the model's own modules read and write memory some thirty times per layer. Here norm, rotary
embedding, attention and SwiGLU are one pass over their data each (`kernels.training`), queries, keys and values are one
product, gate and up projection another, and weights are cast once for both passes. Layers that FSDP shards are computed
by the kernels while their weights are gathered. Models with other layers or with other hooks use their own modules.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quintet.kernels.training import TrainingKernels, training_kernels
from quintet.policies.attention import AttentionLayout, PackedLayout
from quintet.policies.attention_backends import attention_backend

SUPPORTED_BODIES = frozenset({"LlamaModel", "MistralModel", "Qwen2Model", "Qwen2VLTextModel", "Qwen2_5_VLTextModel"})
SUPPORTED_LAYERS = frozenset(
    {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer"}
)
VECTOR_LANES = 16
"""Numbers that the kernels process at a time; the head dimension must be a multiple of it."""


class _PassContext(NamedTuple):
    """Arguments shared by all layers of a pass."""

    kernels: TrainingKernels
    kernel_descriptor: Tensor
    cosine: Tensor
    sine: Tensor
    heads: int
    kv_heads: int
    dim: int
    scale: float
    saves_matrices: bool
    """Whether the backward pass gets the concatenated matrices; else it concatenates the weights again."""


class _Weights(NamedTuple):
    """Weight matrices of a layer in the kernels' dtype."""

    attention: Tensor
    """[(heads + 2 · kv_heads) · dim, hidden]."""
    out: Tensor
    gate_up: Tensor
    """Gate before up, [2 · mlp, hidden]."""
    down: Tensor


class _Layer(torch.autograd.Function):
    """A decoder layer: maps float32 states [P, hidden] and a residual to add, in the kernels' dtype, to the same."""

    @staticmethod
    def forward(
        ctx: Any,
        context: _PassContext,
        eps: tuple[float, float],
        states: Tensor,
        residual: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`weights` are the results of `_layer_weights`."""
        kernels = context.kernels
        first_norm, second_norm, bias, matrices = _cast_weights(weights, kernels.dtype)
        attention_input, normed, scales = kernels.rms_norm(states, residual, first_norm, eps[0])
        weight = matrices.attention.t()
        qkv = torch.mm(normed, weight) if bias is None else torch.addmm(bias, normed, weight)
        kernels.rotary(qkv, context.heads + context.kv_heads, context.dim, context.cosine, context.sine)
        attended, log_sums = kernels.attention(
            context.kernel_descriptor, context.scale, qkv, context.heads, context.dim
        )
        middle, mlp_input, mlp_scales = kernels.rms_norm(
            attention_input, torch.mm(attended, matrices.out.t()), second_norm, eps[1]
        )
        gate_up = torch.mm(mlp_input, matrices.gate_up.t())
        output = torch.mm(kernels.silu_mul(gate_up), matrices.down.t())
        ctx.context = context
        ctx.has_bias = bias is not None
        ctx.has_residual = residual is not None
        ctx.sizes = [len(weight) for weight in weights]
        saved_weights = (first_norm, second_norm, *matrices) if context.saves_matrices else weights
        ctx.save_for_backward(
            attention_input, normed, scales, qkv, attended, log_sums,
            middle, mlp_input, mlp_scales, gate_up, *saved_weights,
        )  # fmt: skip
        return middle, output

    @staticmethod
    def backward(ctx: Any, grad_middle: Tensor | None, grad_output: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the arguments of `forward`."""
        context, kernels = ctx.context, ctx.context.kernels
        saved = ctx.saved_tensors
        attention_input, normed, scales, qkv, attended, log_sums = saved[:6]
        middle, mlp_input, mlp_scales, gate_up = saved[6:10]
        if context.saves_matrices:
            first_norm, second_norm, matrices = saved[10], saved[11], _Weights(*saved[12:])
        else:
            first_norm, second_norm, _, matrices = _cast_weights(saved[10:], kernels.dtype)
        grad_gate_up, gated = kernels.silu_mul_backward(gate_up, torch.mm(grad_output, matrices.down))
        grad_down = kernels.weight_gradient(grad_output, gated)
        states, grad_cast, grad_second_norm = kernels.rms_norm_backward(
            torch.mm(grad_gate_up, matrices.gate_up), middle, second_norm, mlp_scales, grad_middle
        )
        grad_qkv = kernels.attention_backward(
            context.kernel_descriptor, context.scale, qkv, attended, log_sums, torch.mm(grad_cast, matrices.out)
        )
        grad_qkv_cast, grad_bias = kernels.rotary_backward(
            grad_qkv, context.heads + context.kv_heads, context.dim, context.cosine, context.sine
        )
        grad_out = kernels.weight_gradient(grad_cast, attended)
        grad_inputs = kernels.weight_gradient(grad_qkv_cast, normed)
        grad_gates = kernels.weight_gradient(grad_gate_up, mlp_input)
        states, grad_cast, grad_first_norm = kernels.rms_norm_backward(
            torch.mm(grad_qkv_cast, matrices.attention), attention_input, first_norm, scales, states
        )
        qkv_grads = torch.split(grad_inputs, ctx.sizes[2:5])
        bias_grads = torch.split(grad_bias, ctx.sizes[5:8]) if ctx.has_bias else (None, None, None)
        gate_grads = torch.split(grad_gates, ctx.sizes[9:11])
        return (
            None, None, states, grad_cast if ctx.has_residual else None,
            grad_first_norm, grad_second_norm, *qkv_grads, *bias_grads, grad_out, *gate_grads, grad_down,
        )  # fmt: skip


class _Norm(torch.autograd.Function):
    """The norm after the last layer."""

    @staticmethod
    def forward(
        ctx: Any, kernels: TrainingKernels, eps: float, states: Tensor, residual: Tensor, weight: Tensor
    ) -> Tensor:
        """Return the normalized states in the kernels' dtype."""
        summed, out, scales = kernels.rms_norm(states, residual, weight, eps)
        ctx.kernels = kernels
        ctx.save_for_backward(summed, scales, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the arguments of `forward`."""
        summed, scales, weight = ctx.saved_tensors
        states, grad_cast, grad_weight = ctx.kernels.rms_norm_backward(grad.contiguous(), summed, weight, scales, None)
        return None, None, states, grad_cast, grad_weight


def _cast_weights(weights: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, _Weights]:
    """Return the weights of both norms, the bias of queries, keys and values, and the matrices."""
    first_norm, second_norm, query, key, value, query_bias, key_bias, value_bias, out, gate, up, down = weights
    bias = torch.cat([query_bias, key_bias, value_bias]).to(dtype) if len(query_bias) else None
    matrices = _Weights(
        _concat_rows(dtype, query, key, value), out.to(dtype), _concat_rows(dtype, gate, up), down.to(dtype)
    )
    return first_norm.float(), second_norm.float(), bias, matrices


def _concat_rows(dtype: torch.dtype, *parts: Tensor) -> Tensor:
    concatenated = parts[0].new_empty(sum(len(part) for part in parts), parts[0].shape[1], dtype=dtype)
    for target, part in zip(torch.split(concatenated, [len(part) for part in parts]), parts, strict=True):
        target.copy_(part)
    return concatenated


def training_hidden_states(
    body: nn.Module,
    tokens: Tensor,
    position_ids: Tensor,
    layout: AttentionLayout,
    embeddings: Tensor | None = None,
) -> Tensor | None:
    """Return the last hidden states [P, hidden] in the kernels' dtype, or None if the model's modules must be used.

    `embeddings` [P, hidden] replace those of the tokens; `position_ids` is [P] or [P, 3].
    """
    if type(layout) is not PackedLayout or tokens.device.type != "cpu" or not len(tokens):
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    kernels = training_kernels(dtype)
    if kernels is None or kernel_obstacle(body, dtype) or attention_backend(body.layers[0].self_attn):  # type: ignore[index, union-attr]
        return None
    states = body.embed_tokens(tokens) if embeddings is None else embeddings  # type: ignore[operator]
    return _run_layers(body, kernels, states.float(), position_ids, layout)


def batched_positions(position_ids: Tensor) -> Tensor:
    """Return positions [P] as [1, P], and [P, 3] as [3, 1, P]: as the modules of transformers read them."""
    return position_ids[None] if position_ids.dim() == 1 else position_ids.t()[:, None]


def _run_layers(
    body: Any, kernels: TrainingKernels, states: Tensor, position_ids: Tensor, layout: PackedLayout
) -> Tensor:
    with torch.no_grad():
        rotary = body.rotary_emb(states[None], batched_positions(position_ids))
        cosine, sine = (x[0].float().contiguous() for x in rotary)
    attention = body.layers[0].self_attn
    dim = int(attention.head_dim)
    heads, kv_heads = (module.out_features // dim for module in (attention.q_proj, attention.k_proj))
    kernel_descriptor = layout.kernel_descriptor(heads, kv_heads, dim)
    context = _PassContext(
        kernels, kernel_descriptor, cosine, sine, heads, kv_heads, dim, float(attention.scaling),
        saves_matrices=not is_fsdp_unit(body.layers[0]),
    )  # fmt: skip
    residual: Tensor | None = None
    with torch.autocast("cpu", enabled=False):
        for layer in body.layers:
            compute = _compute_gathered_layer if is_fsdp_unit(layer) else _compute_layer
            states, residual = compute(layer, context, states, residual)
        normed: Tensor = _Norm.apply(kernels, body.norm.variance_epsilon, states, residual, body.norm.weight.float())  # type: ignore[no-untyped-call]
    return normed


def _compute_layer(layer: Any, context: _PassContext, states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    eps = (layer.input_layernorm.variance_epsilon, layer.post_attention_layernorm.variance_epsilon)
    # FSDP may have cast the states to the type of the gathered weights
    outputs: tuple[Tensor, Tensor] = _Layer.apply(context, eps, states.float(), residual, *_layer_weights(layer))  # type: ignore[no-untyped-call]
    return outputs


def _compute_gathered_layer(
    layer: Any, context: _PassContext, states: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the layer by a call of its module, whose hooks gather the weights and reduce their gradients."""
    layer.forward = partial(_compute_layer, layer, context)
    try:
        outputs: tuple[Tensor, Tensor] = layer(states, residual)
    finally:
        del layer.forward
    return outputs


def _layer_weights(layer: Any) -> tuple[Tensor, ...]:
    """Return the weights in the order of `_Layer.forward`; missing biases are empty."""
    empty = torch.empty(0)
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return (
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
        *(projection.weight for projection in projections),
        *(empty if projection.bias is None else projection.bias for projection in projections),
        attention.o_proj.weight,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
    )


def kernel_obstacle(body: Any, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not compute the body, for a message, or None; `dtype` is the type of matrix products.

    FSDP gathers all weights in the same type: the embedding, which is gathered before the layers, has the type that
    the weights of the layers will have.
    """
    cls = type(body)
    if cls.__name__ not in SUPPORTED_BODIES or not cls.__module__.startswith("transformers.models."):
        return f"there are no kernels for {cls.__name__}"
    layers = body.layers
    if not len(layers) or body.config.get_text_config().hidden_act != "silu":
        return "its activation is not silu"
    units = {layer for layer in layers if is_fsdp_unit(layer)}
    if any(_is_modified(module) for module in body.modules() if module not in units):
        return "its modules have hooks or another forward pass"
    dtypes = {torch.float32, dtype} if units else {torch.float32}
    if any(not _is_local(weight, dtypes) for weight in (body.embed_tokens.weight, body.norm.weight)):
        return "its weights are not float32 on a CPU"
    return next((obstacle for layer in layers if (obstacle := _layer_obstacle(layer)) is not None), None)


def _layer_obstacle(layer: Any) -> str | None:
    """Return why the kernels do not compute the layer: its architecture, its weights, which are to be float32, local or
    sharded by FSDP, or the recomputation of its activations."""
    is_sharded = is_fsdp_unit(layer)
    if (name := type(layer).__name__.removeprefix("FSDP" if is_sharded else "")) not in SUPPORTED_LAYERS:
        return f"there are no kernels for {name}"
    if getattr(layer, "gradient_checkpointing", False):
        return "its activations are recomputed"
    if (obstacle := _projection_obstacle(layer)) is not None:
        return obstacle
    attention = layer.self_attn
    is_computable = _is_sharded_float32 if is_sharded else _is_local
    if not all(is_computable(weight) for weight in _layer_weights(layer)):
        return "its weights are not float32 on a CPU"
    if attention.training and getattr(attention, "attention_dropout", 0.0):
        return "its attention has dropout"
    rope = getattr(attention.config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "a part of each head has no rotary embedding"
    if attention.head_dim % VECTOR_LANES:
        return f"its heads have {attention.head_dim} numbers, not a multiple of {VECTOR_LANES}"
    return "its attention has a sliding window" if has_sliding_window(layer) else None


def _projection_obstacle(layer: Any) -> str | None:
    attention, mlp = layer.self_attn, layer.mlp
    inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
    outputs = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if any(type(module) is not nn.Linear for module in (*inputs, *outputs)):
        return "its projections have adapters, or are no plain linear layers"
    if any(module.bias is not None for module in outputs) or len({module.bias is None for module in inputs}) > 1:
        return "it has other biases than those of queries, keys and values"
    return None


def has_sliding_window(layer: Any) -> bool:
    """Return whether the attention of a decoder layer is limited to a window."""
    window = getattr(layer.self_attn, "sliding_window", None)
    if type(layer).__name__ == "MistralDecoderLayer":
        window = getattr(layer.self_attn.config, "sliding_window", None)
    return window is not None


def _is_modified(module: nn.Module) -> bool:
    """Return whether the module has hooks or a replaced forward pass."""
    has_hooks = (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
    return bool(has_hooks) or "forward" in vars(module) or module._compiled_call_impl is not None


def is_fsdp_unit(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers the module's weights. Importing `torch.distributed.fsdp` takes a second, and without
    it no module is sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _is_local(weight: Tensor, dtypes: Collection[torch.dtype] = (torch.float32,)) -> bool:
    # without contents on the device meta: a model that is not loaded yet
    is_plain = type(weight) in (nn.Parameter, Tensor) and weight.dtype in dtypes
    return is_plain and weight.device.type in ("cpu", "meta") and weight.is_contiguous()


def _is_sharded_float32(weight: Tensor) -> bool:
    """Return whether FSDP gathers the weight from CPUs. It is local in a layer that stays gathered."""
    from torch.distributed.tensor import DTensor

    if not isinstance(weight, DTensor):
        return not len(weight) or weight.device.type == "cpu"
    return weight.device_mesh.device_type == "cpu" and weight.dtype is torch.float32
