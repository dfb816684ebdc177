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

__all__ = ["InferenceDecoder", "lay_together"]

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

    @property
    def bias(self) -> Tensor | None:
        return self._table["bias"]

    @property
    def is_adapted(self) -> bool:
        return self._beside is not None

    def _across(self) -> Tensor:
        """The weight, [in, out]; a view, made once as long as the same memory is meant."""
        weight = self.weight
        if self._turned.data_ptr() != weight.data_ptr() or self._turned.dtype != weight.dtype:
            self._turned = weight.t()
        return self._turned

    def let_go(self) -> None:
        """Keep no memory in which the weight lay before."""
        self._turned = self.weight.t()

    def into(self, inputs: Tensor, out: Tensor) -> Tensor:
        """[n, in] to [n, out], written where `out` lies."""
        return self._adapt(inputs, _product(inputs, self._across(), self.bias, out))

    def add(self, inputs: Tensor, states: Tensor) -> None:
        """Add what [n, in] gives to [n, out]."""
        states.addmm_(inputs, self._across())
        if self.bias is not None:
            states.add_(self.bias)
        self._adapt(inputs, states)

    def _adapt(self, inputs: Tensor, out: Tensor) -> Tensor:
        """Add what the adapters give to [n, out]."""
        if self._beside:
            first, second, scale = self._beside
            out.addmm_(inputs @ first["weight"].t(), second["weight"].t(), alpha=scale)
        return out


class _Together:
    """Linear layers of the same inputs: one product where their weights lie one below the other in memory, as
    `lay_together` puts them."""

    def __init__(self, *parts: _Linear) -> None:
        self._parts = parts
        self.widths = [part.width for part in parts]
        self._addresses: tuple[int, ...] = ()
        self._joined: tuple[Tensor, Tensor | None] | None = None

    def into(self, inputs: Tensor, out: Tensor) -> None:
        """[n, in] to [n, sum of widths], written where `out` lies."""
        joined = self._look()
        if joined is not None:
            _product(inputs, *joined, out)
            return
        for part, place in zip(self._parts, torch.split(out, self.widths, 1), strict=True):
            part.into(inputs, place)

    def let_go(self) -> None:
        """Keep no memory in which the weights lay before."""
        self._addresses, self._joined = (), None
        for part in self._parts:
            part.let_go()

    def _look(self) -> tuple[Tensor, Tensor | None] | None:
        """Their weights as one, [in, sum of widths], and their bias; anew where they have moved."""
        addresses = tuple([part.weight.data_ptr() for part in self._parts])
        if addresses != self._addresses:
            self._addresses, self._joined = addresses, self._join()
        return self._joined

    def _join(self) -> tuple[Tensor, Tensor | None] | None:
        biases = [part.bias for part in self._parts if part.bias is not None]
        weight, bias = _as_one([part.weight for part in self._parts]), _as_one(biases)
        if weight is None or any(part.is_adapted for part in self._parts):
            return None
        whole = not biases or (bias is not None and len(bias) == len(weight))
        return (weight.t(), bias) if whole else None


def _product(inputs: Tensor, across: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(inputs, across, out=out)
    return torch.addmm(bias, inputs, across, out=out)


def _as_one(parts: list[Tensor]) -> Tensor | None:
    """Tensors that lie one behind the other in the same memory, as one; None where they don't."""
    if not parts or any(part.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr() for part in parts):
        return None
    place = parts[0].storage_offset()
    for part in parts:
        if part.storage_offset() != place or not part.is_contiguous() or part.shape[1:] != parts[0].shape[1:]:
            return None
        place += part.numel()
    return parts[0].detach().as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())


def lay_together(body: nn.Module) -> None:
    """Put the weights of layers that have the same inputs one below the other in memory, so that one product does for
    them: queries, keys and values, gates and ups. For a body that nobody else has put somewhere: they stay the
    parameters that they are, as views. Does nothing to layers of another kind, or with adapters."""
    for layer in getattr(body, "layers", ()):
        if type(layer).__name__ not in KNOWN:
            continue
        attention, transform = layer.self_attn, layer.mlp
        for modules in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (transform.gate_proj, transform.up_proj),
        ):
            if all(type(module) is nn.Linear for module in modules):
                _lay([module.weight for module in modules])
                _lay([module.bias for module in modules if module.bias is not None])


def _lay(parameters: list[nn.Parameter]) -> None:
    if not parameters or len({(one.dtype, one.device, one.shape[1:]) for one in parameters}) > 1:
        return
    joined = torch.cat([one.detach() for one in parameters])
    for one, place in zip(parameters, torch.split(joined, [len(one) for one in parameters]), strict=True):
        one.data = place


class _Layer:
    """The parts of a decoder's layer."""

    def __init__(self, layer: nn.Module) -> None:
        attention, transform = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        self.first = _Norm(layer.get_submodule("input_layernorm"))
        self.second = _Norm(layer.get_submodule("post_attention_layernorm"))
        self.inputs = _Together(*(_Linear(attention.get_submodule(f"{name}_proj")) for name in "qkv"))
        self.out = _Linear(attention.get_submodule("o_proj"))
        self.both = _Together(*(_Linear(transform.get_submodule(f"{name}_proj")) for name in ("gate", "up")))
        self.down = _Linear(transform.get_submodule("down_proj"))
        self.of_heads = [_Norm(x) for name in ("q_norm", "k_norm") if (x := getattr(attention, name, None)) is not None]
        """Of queries and of keys, where there are norms of each head."""
        self.dim = int(attention.head_dim)  # type: ignore[arg-type]
        self.scale = float(attention.scaling)  # type: ignore[arg-type]

    def let_go(self) -> None:
        """Keep no memory in which weights lay before."""
        for part in (self.inputs, self.out, self.both, self.down):
            part.let_go()


class _Room:
    """Memory that every layer of a pass uses again, [n, …] each."""

    def __init__(self, layer: _Layer, states: Tensor) -> None:
        """For as many tokens as there are `states`, and layers of the same widths."""
        self._dim, self._split, self._mlp = layer.dim, layer.inputs.widths, layer.both.widths[0]
        self._widths = (states.shape[1], sum(self._split), 2 * self._mlp, self._mlp)
        self.capacity = len(states)
        self._memory = [states.new_empty(self.capacity * width) for width in self._widths]

    def fits(self, states: Tensor) -> bool:
        """Whether it is of their type and device."""
        return self._memory[0].dtype == states.dtype and self._memory[0].device == states.device

    def __call__(self, count: int) -> _Parts:
        """For that many tokens, the first of those that there is room for."""
        normed, mixed, both, gated = (
            memory[: count * width].view(count, width) for memory, width in zip(self._memory, self._widths, strict=True)
        )
        query, key, value = (part // self._dim for part in self._split)
        heads = mixed.view(count, -1, self._dim)
        turned = heads[:, : query + key]
        return _Parts(
            *(normed, mixed, both, both[:, : self._mlp], both[:, self._mlp :], gated),
            *(turned, heads[:, :query], turned[:, query:], heads[:, -value:]),
        )


class _Parts(NamedTuple):
    """Views of a pass's memory."""

    normed: Tensor
    mixed: Tensor
    """[n, (heads + 2 · kv_heads) · dim], queries before keys before values."""
    both: Tensor
    """[n, 2 · mlp]: gate before up."""
    gate: Tensor
    up: Tensor
    gated: Tensor
    """[n, mlp]."""
    turned: Tensor
    """[n, heads + kv_heads, dim]: queries and keys in `mixed`."""
    queries: Tensor
    keys: Tensor
    values: Tensor


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

    def let_go(self) -> None:
        """Keep no memory in which weights lay before they were moved, nor that of passes: views would hold it."""
        self._room = None
        for layer in self._layers:
            layer.let_go()

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
        layer.inputs.into(inputs, parts.mixed)
        for norm, heads in zip(layer.of_heads, (parts.queries, parts.keys), strict=False):
            heads.copy_(self._normed(norm, heads, torch.empty_like(heads)))
        self._turn(parts.turned, turn)
        out = layout.attend(index, parts.queries, parts.keys, parts.values, layer.scale)
        layer.out.add(out.reshape(states.shape[0], -1), states)

    def _transform(self, layer: _Layer, states: Tensor, parts: _Parts) -> None:
        """Add what the feed-forward part gives to the states."""
        inputs = self._normed(layer.second, states, parts.normed)
        layer.both.into(inputs, parts.both)
        layer.down.add(self._gated(parts), states)

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

    def _gated(self, parts: _Parts) -> Tensor:
        """silu(gate) · up, [n, mlp]."""
        if self._kernels:
            return self._kernels.gate(parts.both, parts.gated)
        return torch.mul(F.silu(parts.gate), parts.up, out=parts.gated)

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
