"""Layers that mix tokens by a recurrence: linear attention, state spaces and short convolutions.

transformers computes such a layer over one sequence, and keeps its state in a cache. The layers of a loaded model get a
subclass of their class, in which the layout of a pass (`AttentionLayout.mix`) says which tokens follow which: the
modeling code of transformers is called for each part of a sequence, with the state of the part before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintet.errors import MachineError

MIXER_CLASSES = ("GatedDeltaNet", "ShortConv", "MambaLayer", "Mixer", "DeltaAttention")
"""Endings of the names of such layers' classes."""
CACHE_ARGUMENTS = ("cache_params", "past_key_values", "cache")
"""Names by which they take a cache."""


class RecurrentState:
    """State of one layer behind some tokens, for a batch of sequences, with the interface of a cache of transformers.

    Updates replace tensors, and write into none that a backward pass may need.
    """

    record_past = True
    """Convolutions always get the last tokens and the new ones together."""

    def __init__(self) -> None:
        self.conv_states: dict[int, Tensor] = {}
        """[batch, channels, kernel size] of the last tokens, by the number of the convolution."""
        self.recurrent_states: dict[int, Tensor] = {}
        """[batch, …] by the number of the recurrence."""

    @property
    def layers(self) -> _OneLayer:
        """This state, whatever the number of the layer."""
        return _OneLayer(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there were tokens before."""
        del layer_idx, state_idx
        return bool(self.conv_states)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Return the inputs of a convolution for the last tokens and the new ones, [batch, channels, kernel size + n],
        for the new ones' [batch, channels, n]."""
        del layer_idx
        before = self.conv_states.get(state_idx)
        width = conv_kernel_size or conv_states.shape[-1]
        joined = F.pad(conv_states, (width, 0)) if before is None else torch.cat([before, conv_states], -1)
        self.conv_states[state_idx] = joined[..., -(width if before is None else before.shape[-1]) :]
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Replace the state of a recurrence."""
        del layer_idx
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def fork(self) -> RecurrentState:
        """Return a copy for other tokens that follow. Layers write the state of a recurrence in place for one token."""
        forked = RecurrentState()
        forked.conv_states = dict(self.conv_states)
        forked.recurrent_states = {index: state.clone() for index, state in self.recurrent_states.items()}
        return forked


class _OneLayer:
    def __init__(self, state: RecurrentState) -> None:
        self._state = state

    def __getitem__(self, _: int) -> RecurrentState:
        return self._state


Run: TypeAlias = Callable[[Tensor, RecurrentState], Tensor]
"""Computes a layer over [batch, n, hidden] that follow a state, and updates the state."""


class RecurrentLayout(Protocol):
    """A layout of a pass that can compute recurrent layers."""

    def mix(self, layer: int, states: Tensor, run: Run) -> Tensor:
        """Return the layer's output [N, hidden] for [N, hidden]."""


_layout: ContextVar[object] = ContextVar("layout", default=None)


@contextmanager
def _use_layout(layout: object) -> Iterator[None]:
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


class _PackedLayer:
    """Decoder layer that gives its recurrent part the layout. Some layers pass it on to attention only, and a layer is
    called again when its activations are recomputed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _use_layout(kwargs.get("layout")):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class PackedMixer:
    """Recurrent part of a decoder layer, over the sequences of a pass. Without a layout, it is transformers' own."""

    layer_idx: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return [1, N, hidden] of [1, N, hidden].

        Raises:
            MachineError: the layout distributes the tokens of a sequence over ranks.
        """
        kwargs.pop("layout", None)
        compute: Any = super().forward  # type: ignore[misc]
        layout: Any = _layout.get()
        if layout is None:
            output: Tensor = compute(hidden_states, *args, **kwargs)
            return output
        if not hasattr(layout, "mix"):
            raise MachineError(
                f"{type(self).__name__} needs whole sequences: context and Ulysses parallelism do not support that",
                "set actor.parallel.context=1 and actor.parallel.ulysses=1",
            )
        cache = _cache_argument(type(self))
        others = {name: value for name, value in kwargs.items() if name not in (cache, "attention_mask")}

        def run(states: Tensor, state: RecurrentState) -> Tensor:
            out: Tensor = compute(states, **{cache: state}, **others)
            return out

        mixed: Tensor = layout.mix(self.layer_idx, hidden_states[0], run)
        return mixed[None]


def pack_recurrent_layers(body: nn.Module) -> None:
    """Give the recurrent parts of a decoder's layers, and these layers, classes that follow the layout of a pass."""
    for layer in getattr(body, "layers", ()):
        mixers = [module for module in layer.modules() if _is_mixer(module)]
        for mixer in mixers:
            mixer.__class__ = _subclass(PackedMixer, type(mixer))
        if mixers:
            layer.__class__ = _subclass(_PackedLayer, type(layer))


def has_recurrent_layers(body: nn.Module) -> bool:
    """Return whether `pack_recurrent_layers` has found any."""
    return any(isinstance(module, PackedMixer) for module in body.modules())


def _is_mixer(module: nn.Module) -> bool:
    return hasattr(module, "layer_idx") and type(module).__name__.endswith(MIXER_CLASSES)


def _cache_argument(cls: type) -> str:
    """Return the argument of transformers' class, behind `PackedMixer`, that takes a cache."""
    base: Any = cls.__mro__[cls.__mro__.index(PackedMixer) + 1]
    return next(name for name in CACHE_ARGUMENTS if name in inspect.signature(base.forward).parameters)


def _subclass(mixin: type, cls: type) -> type:
    """Return a subclass of the same name: other code finds layers by the names of their classes."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
