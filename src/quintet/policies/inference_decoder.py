"""Forward pass of Llama-like decoders without gradients.

It computes the same as the model's own modules, with their parameters, but adds to the residual stream in place and
reuses buffers across layers. For small models and the few rows of a decode step, it takes a third of the time. Models
with other layers use `compute_hidden_states`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintet.kernels.decode import decode_kernels
from quintet.policies.attention import AttentionLayout, PackedLayout
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.layer_kinds import num_distinct_layers
from quintet.policies.lora import adapter_parameters, has_adapters
from quintet.policies.training_decoder import batched_positions, has_sliding_window
from quintet.policies.vision.image_encoder import embed_with_images

SUPPORTED_LAYERS = frozenset(
    {
        *("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"),
        *("Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer"),
    }
)
MAX_CACHED_TOKENS = 2048
"""Largest number of tokens for which buffers are kept between passes."""
MIN_ROWS = 16
"""Number of rows to which the products of a batch-invariant pass are padded on CPUs: from there on, MKL computes a row
of a small model in the same way whatever the number of rows, so that log-probs do not depend on the other requests of a
batch."""
PROBE_TOKENS = 24
MAX_PROBE_DIFFERENCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest allowed difference from the modules' states, relative to the largest state."""

logger = logging.getLogger(__name__)


class _Norm:
    """RMS norm; looks its weight up on each call."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = module._parameters
        self.eps = float(module.variance_epsilon)  # type: ignore[arg-type]

    @property
    def weight(self) -> Tensor:
        return self._parameters["weight"]  # type: ignore[return-value]


class _Linear:
    """Linear layer with optional LoRA adapters. Looks its parameters up on each call, since they may be replaced."""

    def __init__(self, module: nn.Module) -> None:
        base = module.get_base_layer() if has_adapters(module) else module  # type: ignore[operator]
        self._parameters = base._parameters
        self._adapter = adapter_parameters(module) if has_adapters(module) else None
        self._transposed = self.weight.t()
        self.width = len(self.weight)

    @property
    def weight(self) -> Tensor:
        return self._parameters["weight"]  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self._parameters["bias"]

    @property
    def has_adapters(self) -> bool:
        return self._adapter is not None

    def _transposed_weight(self) -> Tensor:
        """Return a view [in, out] of the weight, cached while the weight's memory stays the same."""
        weight = self.weight
        if self._transposed.data_ptr() != weight.data_ptr() or self._transposed.dtype != weight.dtype:
            self._transposed = weight.t()
        return self._transposed

    def release_memory(self) -> None:
        """Drop references to a weight's former memory."""
        self._transposed = self.weight.t()

    def forward_into(self, inputs: Tensor, out: Tensor) -> Tensor:
        """Apply the layer to [n, in] and write to `out` [n, out]."""
        return self._add_adapter(inputs, _linear(inputs, self._transposed_weight(), self.bias, out))

    def forward_add(self, inputs: Tensor, states: Tensor) -> None:
        """Apply the layer to [n, in] and add the result to `states` [n, out]."""
        states.addmm_(inputs, self._transposed_weight())
        if self.bias is not None:
            states.add_(self.bias)
        self._add_adapter(inputs, states)

    def _add_adapter(self, inputs: Tensor, out: Tensor) -> Tensor:
        if self._adapter:
            lora_a, lora_b, scale = self._adapter
            out.addmm_(inputs @ lora_a["weight"].t(), lora_b["weight"].t(), alpha=scale)
        return out


class _FusedLinears:
    """Linear layers with the same inputs, computed as one product if `fuse_projections` made their weights adjacent."""

    def __init__(self, *linears: _Linear) -> None:
        self._linears = linears
        self.widths = [linear.width for linear in linears]
        self._data_ptrs: tuple[int, ...] = ()
        self._fused: tuple[Tensor, Tensor | None] | None = None

    def forward_into(self, inputs: Tensor, out: Tensor) -> None:
        """Apply the layers to [n, in] and write to `out` [n, sum of widths]."""
        fused = self._fused_weights()
        if fused is not None:
            _linear(inputs, *fused, out)
            return
        for linear, target in zip(self._linears, torch.split(out, self.widths, 1), strict=True):
            linear.forward_into(inputs, target)

    def release_memory(self) -> None:
        """Drop references to the weights' former memory."""
        self._data_ptrs, self._fused = (), None
        for linear in self._linears:
            linear.release_memory()

    def _fused_weights(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the fused weight [in, sum of widths] and bias, or None; recomputed if a weight's memory changed."""
        data_ptrs = tuple([linear.weight.data_ptr() for linear in self._linears])
        if data_ptrs != self._data_ptrs:
            self._data_ptrs, self._fused = data_ptrs, self._fuse()
        return self._fused

    def _fuse(self) -> tuple[Tensor, Tensor | None] | None:
        biases = [linear.bias for linear in self._linears if linear.bias is not None]
        weight, bias = _as_contiguous_view([linear.weight for linear in self._linears]), _as_contiguous_view(biases)
        if weight is None or any(linear.has_adapters for linear in self._linears):
            return None
        is_complete = not biases or (bias is not None and len(bias) == len(weight))
        return (weight.t(), bias) if is_complete else None


def _linear(inputs: Tensor, transposed: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(inputs, transposed, out=out)
    return torch.addmm(bias, inputs, transposed, out=out)


def _as_contiguous_view(parts: list[Tensor]) -> Tensor | None:
    """Return adjacent tensors of one storage as a single view; None if they are not adjacent."""
    if not parts or any(part.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr() for part in parts):
        return None
    offset = parts[0].storage_offset()
    for part in parts:
        if part.storage_offset() != offset or not part.is_contiguous() or part.shape[1:] != parts[0].shape[1:]:
            return None
        offset += part.numel()
    return parts[0].detach().as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())


def fuse_projections(body: nn.Module) -> None:
    """Make the weights of linear layers with the same inputs adjacent in memory, to compute them as one product.

    These are the query, key and value projections, and the gate and up projections. Parameters keep their identity and
    become views. Layers of other architectures and layers with adapters are left unchanged.
    """
    for layer in getattr(body, "layers", ()):
        if type(layer).__name__ not in SUPPORTED_LAYERS:
            continue
        attention, mlp = layer.self_attn, layer.mlp
        for modules in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (mlp.gate_proj, mlp.up_proj),
        ):
            if all(type(module) is nn.Linear for module in modules):
                _make_adjacent([module.weight for module in modules])
                _make_adjacent([module.bias for module in modules if module.bias is not None])


def _make_adjacent(parameters: list[nn.Parameter]) -> None:
    if not parameters or len({(weight.dtype, weight.device, weight.shape[1:]) for weight in parameters}) > 1:
        return
    fused = torch.cat([parameter.detach() for parameter in parameters])
    views = torch.split(fused, [len(parameter) for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view


class _Layer:
    """The modules of a decoder layer."""

    def __init__(self, layer: nn.Module) -> None:
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        self.input_norm = _Norm(layer.get_submodule("input_layernorm"))
        self.post_attention_norm = _Norm(layer.get_submodule("post_attention_layernorm"))
        self.inputs = _FusedLinears(*(_Linear(attention.get_submodule(f"{name}_proj")) for name in "qkv"))
        self.out = _Linear(attention.get_submodule("o_proj"))
        self.gate_up = _FusedLinears(*(_Linear(mlp.get_submodule(f"{name}_proj")) for name in ("gate", "up")))
        self.down = _Linear(mlp.get_submodule("down_proj"))
        self.head_norms = [
            _Norm(x) for name in ("q_norm", "k_norm") if (x := getattr(attention, name, None)) is not None
        ]
        """Per-head norms of queries and keys, if the model has them."""
        self.dim = int(attention.head_dim)  # type: ignore[arg-type]
        self.scale = float(attention.scaling)  # type: ignore[arg-type]

    def release_memory(self) -> None:
        """Drop references to the weights' former memory."""
        for part in (self.inputs, self.out, self.gate_up, self.down):
            part.release_memory()


class _Workspace:
    """Buffers [n, …] that are reused by all layers of a pass."""

    def __init__(self, layer: _Layer, states: Tensor) -> None:
        """Allocate buffers for `len(states)` tokens and layers like `layer`."""
        self._dim = layer.dim
        self._qkv_widths = layer.inputs.widths
        self._mlp_width = layer.gate_up.widths[0]
        self._widths = (states.shape[1], sum(self._qkv_widths), 2 * self._mlp_width, self._mlp_width)
        self.capacity = len(states)
        self._buffers = [states.new_empty(self.capacity * width) for width in self._widths]

    def fits(self, states: Tensor) -> bool:
        """Return whether dtype and device are those of `states`."""
        return self._buffers[0].dtype == states.dtype and self._buffers[0].device == states.device

    def __call__(self, num_tokens: int) -> _WorkspaceViews:
        """Return views of the buffers for `num_tokens` tokens."""
        normed, qkv, gate_up, gated = (
            buffer[: num_tokens * width].view(num_tokens, width)
            for buffer, width in zip(self._buffers, self._widths, strict=True)
        )
        query, key, value = (part // self._dim for part in self._qkv_widths)
        heads = qkv.view(num_tokens, -1, self._dim)
        rotated = heads[:, : query + key]
        return _WorkspaceViews(
            *(normed, qkv, gate_up, gate_up[:, : self._mlp_width], gate_up[:, self._mlp_width :], gated),
            *(rotated, heads[:, :query], rotated[:, query:], heads[:, -value:]),
        )


class _WorkspaceViews(NamedTuple):
    """Views of the buffers of a pass."""

    normed: Tensor
    qkv: Tensor
    """[n, (heads + 2 · kv_heads) · dim], queries before keys before values."""
    gate_up: Tensor
    """[n, 2 · mlp]: gate before up."""
    gate: Tensor
    up: Tensor
    gated: Tensor
    """[n, mlp]."""
    rotated: Tensor
    """[n, heads + kv_heads, dim]: queries and keys in `qkv`."""
    queries: Tensor
    keys: Tensor
    values: Tensor


class InferenceDecoder:
    """Function from tokens to hidden states that uses the current weights of a model's body."""

    def __init__(self, body: nn.Module) -> None:
        self._body = body
        weight = next(body.parameters())
        self._kernels = decode_kernels(weight.dtype, weight.device.type)
        self._layers = [_Layer(layer) for layer in body.layers]  # type: ignore[union-attr]
        self._final_norm = _Norm(body.norm)  # type: ignore[arg-type]
        self._workspace: _Workspace | None = None
        self.batch_invariant = True
        """Whether a row's numbers do not depend on the number of rows, at the cost of padding few rows."""

    @classmethod
    def from_body(cls, body: nn.Module) -> InferenceDecoder | None:
        """Return a decoder for a body with supported layers, with or without adapters, and no hooks; else None."""
        if decoder_obstacle(body):
            return None
        decoder = cls(body)
        difference = decoder._probe_difference()
        if not difference <= MAX_PROBE_DIFFERENCE.get(next(body.parameters()).dtype, 0.0):
            logger.warning(
                "%s differs from its supported architecture (by %.2g): its own, slower modules are used",
                type(body).__name__,
                difference,
            )
            return None
        return decoder

    def release_memory(self) -> None:
        """Drop buffers and references to the weights' former memory, for example when weights are offloaded."""
        self._workspace = None
        for layer in self._layers:
            layer.release_memory()

    @torch.inference_mode()
    def __call__(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        layout: AttentionLayout,
        image_inputs: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the last hidden states [P, hidden] of `tokens` [P], like `compute_hidden_states`. `image_inputs` are
        the indices of image tokens [k] and their features [k, hidden]."""
        body, num_tokens = self._body, len(tokens)
        if self.batch_invariant and num_tokens < MIN_ROWS and tokens.device.type == "cpu":
            padding = (0, MIN_ROWS - num_tokens)
            tokens = F.pad(tokens, padding)
            position_ids = F.pad(position_ids, padding if position_ids.dim() == 1 else (0, 0, *padding))
        if image_inputs is None:
            states: Tensor = body.embed_tokens(tokens)  # type: ignore[operator]
        else:
            states = embed_with_images(body, tokens, *image_inputs)
        cosine, sine = body.rotary_emb(states[None], batched_positions(position_ids))  # type: ignore[operator]
        rotary = (cosine[0], sine[0])
        views = self._workspace_views(states)
        for index, layer in enumerate(self._layers):
            self._add_attention(index, layer, states, views, rotary, layout, num_tokens)
            self._add_mlp(layer, states, views)
        return self._rms_norm(self._final_norm, states, torch.empty_like(states))[:num_tokens]

    def _add_attention(
        self,
        index: int,
        layer: _Layer,
        states: Tensor,
        views: _WorkspaceViews,
        rotary: tuple[Tensor, Tensor],
        layout: AttentionLayout,
        num_tokens: int,
    ) -> None:
        """Add the attention output of the first `num_tokens` rows to the states; the others are padding."""
        inputs = self._rms_norm(layer.input_norm, states, views.normed)
        layer.inputs.forward_into(inputs, views.qkv)
        for norm, heads in zip(layer.head_norms, (views.queries, views.keys), strict=False):
            heads.copy_(self._rms_norm(norm, heads, torch.empty_like(heads)))
        self._apply_rotary(views.rotated, rotary)
        query, key, value = (heads[:num_tokens] for heads in (views.queries, views.keys, views.values))
        out = layout.attend(index, query, key, value, layer.scale).reshape(num_tokens, -1)
        if num_tokens < len(states):
            out = F.pad(out, (0, 0, 0, len(states) - num_tokens))
        layer.out.forward_add(out, states)

    def _add_mlp(self, layer: _Layer, states: Tensor, views: _WorkspaceViews) -> None:
        """Add the MLP output to the states."""
        inputs = self._rms_norm(layer.post_attention_norm, states, views.normed)
        layer.gate_up.forward_into(inputs, views.gate_up)
        layer.down.forward_add(self._silu_mul(views), states)

    def _workspace_views(self, states: Tensor) -> _WorkspaceViews:
        """Return buffers for a pass; for few tokens, those of the previous pass."""
        num_tokens, workspace = len(states), self._workspace
        if workspace is None or workspace.capacity < num_tokens or not workspace.fits(states):
            workspace = _Workspace(self._layers[0], states)
            if num_tokens <= MAX_CACHED_TOKENS:
                self._workspace = workspace
        return workspace(num_tokens)

    def _rms_norm(self, norm: _Norm, states: Tensor, out: Tensor) -> Tensor:
        """RMS norm of the last dimension (Zhang & Sennrich 2019), in float32 as in the modules."""
        if self._kernels:
            return self._kernels.rms_norm(states, norm.weight, norm.eps, out)
        states_float = states.float()
        scale = torch.linalg.vector_norm(states_float, dim=-1, keepdim=True).square_().div_(states.shape[-1])
        return torch.mul((states_float * scale.add_(norm.eps).rsqrt_()).to(states.dtype), norm.weight, out=out)

    def _apply_rotary(self, heads: Tensor, rotary: tuple[Tensor, Tensor]) -> None:
        """Apply rotary embeddings (Su et al. 2021) in place, with halves as in Llama, to `heads` [n, heads, dim]."""
        if self._kernels:
            self._kernels.rotary(heads, *rotary)
            return
        cosine, sine = rotary[0][:, None], rotary[1][:, None]
        half = heads.shape[-1] // 2
        first, second = heads[..., :half].clone(), heads[..., half:].clone()
        heads.mul_(cosine)
        heads[..., :half].addcmul_(second, sine[..., :half], value=-1)
        heads[..., half:].addcmul_(first, sine[..., half:])

    def _silu_mul(self, views: _WorkspaceViews) -> Tensor:
        """Return silu(gate) · up, [n, mlp]."""
        if self._kernels:
            return self._kernels.silu_mul(views.gate_up, views.gated)
        return torch.mul(F.silu(views.gate), views.up, out=views.gated)

    @contextmanager
    def _few_layers(self) -> Iterator[None]:
        """Leave out all layers but the first ones of each kind inside the `with` block."""
        body: Any = self._body
        layers, views = body.layers, self._layers
        count = num_distinct_layers(layers)
        body.layers, self._layers = layers[:count], views[:count]
        try:
            yield
        finally:
            body.layers, self._layers = layers, views

    def _probe_difference(self) -> float:
        """Return the largest difference from the modules' states for a few tokens through the first layers, relative to
        the largest state."""
        device = next(self._body.parameters()).device
        vocab_size = len(self._body.embed_tokens.weight)  # type: ignore[arg-type, union-attr]
        tokens = torch.arange(PROBE_TOKENS, device=device) * 7919 % vocab_size
        position_ids = torch.arange(PROBE_TOKENS, device=device)
        layout = PackedLayout(torch.tensor([PROBE_TOKENS]))
        with torch.inference_mode(), self._few_layers():
            reference = compute_hidden_states(self._body, tokens, position_ids, layout)
            return float(
                (self(tokens, position_ids, layout) - reference).abs().max() / reference.abs().max().clamp(min=1e-6)
            )


def decoder_obstacle(body: nn.Module) -> str | None:
    """Return why `InferenceDecoder` does not compute everything that the body's forward pass does, for a message, or
    None."""
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return f"there is no decoder for {type(body).__name__}"
    if others := [name for layer in layers if (name := type(layer).__name__) not in SUPPORTED_LAYERS]:
        return f"there is no decoder for {others[0]}"
    if _hidden_act(body) != "silu":
        return "its activation is not silu"
    if any(map(has_sliding_window, layers)):
        return "its attention has a sliding window"
    if any(_is_modified(module) for module in body.modules()):
        return "its modules have hooks or another forward pass"
    linear = [module for module in layers.modules() if hasattr(module, "in_features") or hasattr(module, "base_layer")]
    if not all(type(module) is nn.Linear or has_adapters(module) for module in linear):
        return "its projections are no plain linear layers"
    return None


def _hidden_act(body: nn.Module) -> str | None:
    return getattr(body.config.get_text_config(), "hidden_act", None)  # type: ignore[union-attr, operator]


def _is_modified(module: nn.Module) -> bool:
    """Return whether the module has hooks or a replaced forward pass."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def apply_head(head: nn.Module, hidden: Tensor, *, batch_invariant: bool = True) -> Tensor:
    """Return logits [n, vocab] of hidden states [n, hidden]; `batch_invariant` as in `InferenceDecoder`."""
    num_rows = len(hidden)
    if batch_invariant and num_rows < MIN_ROWS and hidden.device.type == "cpu":
        hidden = F.pad(hidden, (0, 0, 0, MIN_ROWS - num_rows))
    logits: Tensor = head(hidden)
    return logits[:num_rows]
