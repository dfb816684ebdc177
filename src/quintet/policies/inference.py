"""The forward pass of Llama-like decoders where no gradient is wanted.

It computes what the model's own modules compute, with their own parameters, and nothing else: products that add to the
residual stream where it lies, and memory that is used again by every layer. At the widths of small models, and at the
few rows of a decoding step, that is a third of the time. A model that isn't known to the last detail takes
`causal_lm.hidden_states`.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintet.kernels.decoding import kernels
from quintet.policies.adapters import adapter_tables, is_adapted
from quintet.policies.attention import Layout, PackedLayout
from quintet.policies.causal_lm import hidden_states

__all__ = ["InferenceDecoder"]

KNOWN = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
ROOM_ROWS = 2048
"""Tokens up to which memory is kept between passes."""
TRIAL_TOKENS = 24
TRIAL_GAP = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far states may be from those of the modules, relative to their largest."""

logger = logging.getLogger(__name__)


class _Norm:
    """A root-mean-square norm."""

    def __init__(self, module: nn.Module) -> None:
        self._table = module._parameters
        self.eps = float(module.variance_epsilon)  # type: ignore[arg-type]

    @property
    def weight(self) -> Tensor:
        return self._table["weight"]  # type: ignore[return-value]


class _Linear:
    """A linear layer, and adapters beside it. Its parameters are looked up at each call: they may be put anew, or
    elsewhere."""

    def __init__(self, module: nn.Module) -> None:
        plain = module.get_base_layer() if is_adapted(module) else module  # type: ignore[operator]
        self._table = plain._parameters
        self._beside = adapter_tables(module) if is_adapted(module) else None
        self._turned = self.weight.t()
        self.width = len(self.weight)

    @property
    def weight(self) -> Tensor:
        return self._table["weight"]  # type: ignore[return-value]

    def _across(self) -> Tensor:
        """The weight, [in, out]; a view, made once as long as the same memory is meant."""
        weight = self.weight
        if self._turned.data_ptr() != weight.data_ptr() or self._turned.dtype != weight.dtype:
            self._turned = weight.t()
        return self._turned

    def into(self, inputs: Tensor, out: Tensor) -> Tensor:
        """[n, in] to [n, out], written where `out` lies."""
        bias = self._table["bias"]
        if bias is None:
            torch.mm(inputs, self._across(), out=out)
        else:
            torch.addmm(bias, inputs, self._across(), out=out)
        return self._adapt(inputs, out)

    def add(self, inputs: Tensor, states: Tensor) -> None:
        """Add what [n, in] gives to [n, out]."""
        states.addmm_(inputs, self._across())
        bias = self._table["bias"]
        if bias is not None:
            states.add_(bias)
        self._adapt(inputs, states)

    def _adapt(self, inputs: Tensor, out: Tensor) -> Tensor:
        """Add what the adapters give to [n, out]."""
        if self._beside:
            first, second, scale = self._beside
            out.addmm_(inputs @ first["weight"].t(), second["weight"].t(), alpha=scale)
        return out


class _Layer:
    """The parts of a decoder's layer."""

    def __init__(self, layer: nn.Module) -> None:
        attention, transform = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        self.first = _Norm(layer.get_submodule("input_layernorm"))
        self.second = _Norm(layer.get_submodule("post_attention_layernorm"))
        self.query, self.key, self.value, self.out = (
            _Linear(attention.get_submodule(f"{name}_proj")) for name in ("q", "k", "v", "o")
        )
        self.gate, self.up, self.down = (
            _Linear(transform.get_submodule(f"{name}_proj")) for name in ("gate", "up", "down")
        )
        self.of_heads = [_Norm(x) for name in ("q_norm", "k_norm") if (x := getattr(attention, name, None)) is not None]
        """Of queries and of keys, where there are norms of each head."""
        self.dim = int(attention.head_dim)  # type: ignore[arg-type]
        self.scale = float(attention.scaling)  # type: ignore[arg-type]


class _Room:
    """Memory that every layer of a pass uses again, [n, …] each."""

    def __init__(self, layer: _Layer, states: Tensor) -> None:
        """For as many tokens as there are `states`, and layers of the same widths."""
        split, count = layer.query.width, len(states)
        self._both = states.new_empty(count, split + layer.key.width)
        self._value = states.new_empty(count, layer.value.width)
        self._rest = states.new_empty(3, count * max(layer.gate.width, states.shape[1]))
        self._split, self._dim, self._widths = split, layer.dim, (states.shape[1], layer.gate.width)
        self.capacity = count

    def fits(self, states: Tensor) -> bool:
        """Whether it is of their type and device."""
        return self._value.dtype == states.dtype and self._value.device == states.device

    def __call__(self, count: int) -> _Parts:
        """For that many tokens, the first of those that there is room for."""
        both, value = self._both[:count], self._value[:count]
        normed, gate, up = (
            memory[: count * width].view(count, width)
            for memory, width in zip(self._rest, (self._widths[0], self._widths[1], self._widths[1]), strict=True)
        )
        heads, split = both.view(count, -1, self._dim), self._split // self._dim
        turned = [both[:, : self._split], both[:, self._split :], heads[:, :split], heads[:, split:]]
        return _Parts(normed, gate, up, heads, value, value.view(count, -1, self._dim), *turned)


class _Parts(NamedTuple):
    """Views of a pass's memory."""

    normed: Tensor
    gate: Tensor
    up: Tensor
    heads: Tensor
    """[n, heads + kv_heads, dim], queries before keys."""
    value: Tensor
    values: Tensor
    """[n, kv_heads, dim], the same memory."""
    query: Tensor
    key: Tensor
    queries: Tensor
    keys: Tensor


class InferenceDecoder:
    """A decoder without its head, as a function of tokens; the weights are the model's own, as they are at a call."""

    def __init__(self, body: nn.Module) -> None:
        self._body = body
        weight = next(body.parameters())
        self._kernels = kernels(weight.dtype, weight.device.type)
        self._layers = [_Layer(layer) for layer in body.layers]  # type: ignore[union-attr]
        self._last = _Norm(body.norm)  # type: ignore[arg-type]
        self._room: _Room | None = None

    @classmethod
    def of(cls, body: nn.Module) -> InferenceDecoder | None:
        """For a body of a known kind, as it was loaded, with adapters or without: plain linear layers, no hooks; None
        for another one."""
        if not _is_known(body):
            return None
        decoder = cls(body)
        gap = decoder._gap()
        if not gap <= TRIAL_GAP.get(next(body.parameters()).dtype, 0.0):
            logger.warning(
                "%s computes something else than is known of its kind (by %.2g): its own modules are used, slower",
                type(body).__name__,
                gap,
            )
            return None
        return decoder

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Last hidden state of each token, [P] to [P, hidden]; as `causal_lm.hidden_states`."""
        body = self._body
        states: Tensor = body.embed_tokens(tokens)  # type: ignore[operator]
        cosine, sine = body.rotary_emb(states[None], positions[None])  # type: ignore[operator]
        turn = (cosine[0], sine[0])
        parts = self._memory(states)
        for index, layer in enumerate(self._layers):
            self._attend(index, layer, states, parts, turn, layout)
            self._transform(layer, states, parts)
        return self._normed(self._last, states, torch.empty_like(states))

    def _attend(
        self, index: int, layer: _Layer, states: Tensor, parts: _Parts, turn: tuple[Tensor, Tensor], layout: Layout
    ) -> None:
        """Add what attention gives to the states."""
        inputs = self._normed(layer.first, states, parts.normed)
        layer.query.into(inputs, parts.query)
        layer.key.into(inputs, parts.key)
        layer.value.into(inputs, parts.value)
        for norm, heads in zip(layer.of_heads, (parts.queries, parts.keys), strict=False):
            heads.copy_(self._normed(norm, heads, torch.empty_like(heads)))
        self._turn(parts.heads, turn)
        out = layout.attend(index, parts.queries, parts.keys, parts.values, layer.scale)
        layer.out.add(out.reshape(states.shape[0], -1), states)

    def _transform(self, layer: _Layer, states: Tensor, parts: _Parts) -> None:
        """Add what the feed-forward part gives to the states."""
        inputs = self._normed(layer.second, states, parts.normed)
        gate, up = layer.gate.into(inputs, parts.gate), layer.up.into(inputs, parts.up)
        layer.down.add(self._gated(gate, up), states)

    def _memory(self, states: Tensor) -> _Parts:
        """Memory for a pass; for few tokens, that of the pass before."""
        count, room = len(states), self._room
        if room is None or room.capacity < count or not room.fits(states):
            room = _Room(self._layers[0], states)
            if count <= ROOM_ROWS:
                self._room = room
        return room(count)

    def _normed(self, norm: _Norm, states: Tensor, out: Tensor) -> Tensor:
        """Root-mean-square norm of the last dimension (Zhang & Sennrich 2019), in float32 as the modules do."""
        if self._kernels:
            return self._kernels.norm(states, norm.weight, norm.eps, out)
        wide = states.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(states.shape[-1])
        return torch.mul((wide * scale.add_(norm.eps).rsqrt_()).to(states.dtype), norm.weight, out=out)

    def _turn(self, heads: Tensor, turn: tuple[Tensor, Tensor]) -> None:
        """Rotary positions (Su et al. 2021) in place, halves as in Llama: `heads` [n, heads, dim], `turn` [n, dim]."""
        if self._kernels:
            self._kernels.turn(heads, *turn)
            return
        cosine, sine = turn[0][:, None], turn[1][:, None]
        half = heads.shape[-1] // 2
        first, second = heads[..., :half].clone(), heads[..., half:].clone()
        heads.mul_(cosine)
        heads[..., :half].addcmul_(second, sine[..., :half], value=-1)
        heads[..., half:].addcmul_(first, sine[..., half:])

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) · up; `gate` is used up."""
        return self._kernels.gate(gate, up) if self._kernels else F.silu(gate, inplace=True).mul_(up)

    def _gap(self) -> float:
        """Largest difference from what the modules give for a few tokens, relative to the largest state."""
        device = next(self._body.parameters()).device
        vocabulary = len(self._body.embed_tokens.weight)  # type: ignore[arg-type, union-attr]
        tokens = torch.arange(TRIAL_TOKENS, device=device) * 7919 % vocabulary
        positions = torch.arange(TRIAL_TOKENS, device=device)
        layout = PackedLayout(torch.tensor([TRIAL_TOKENS]))
        with torch.inference_mode():
            theirs = hidden_states(self._body, tokens, positions, layout)
            return float((self(tokens, positions, layout) - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))


def _is_known(body: nn.Module) -> bool:
    """Whether nothing but what is written here happens in a forward pass."""
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList) or body.config.get_text_config().hidden_act != "silu":  # type: ignore[union-attr, operator]
        return False
    if any(type(layer).__name__ not in KNOWN or _slides(layer) for layer in layers):
        return False
    if any(_is_changed(module) for module in body.modules()):
        return False
    linear = [module for module in layers.modules() if hasattr(module, "in_features") or hasattr(module, "base_layer")]
    return all(type(module) is nn.Linear or is_adapted(module) for module in linear)


def _slides(layer: nn.Module) -> bool:
    """Whether it looks back so far and no further: the modules refuse what is longer."""
    attention: nn.Module = layer.self_attn  # type: ignore[assignment]
    own = getattr(attention, "sliding_window", None)
    if type(layer).__name__ == "MistralDecoderLayer":
        own = getattr(attention.config, "sliding_window", None)
    return own is not None


def _is_changed(module: nn.Module) -> bool:
    """Whether somebody hooked into a module, or gave it another forward pass."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
