"""What decoding does on a CPU besides its matrix products, compiled: one pass over the data for each.

The functions take tensors of float32 or bfloat16 that lie in memory as they say; none looks whether it is so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from quintet.kernels.build import library

__all__ = ["Kernels", "kernels"]

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_WHOLE, _REAL, _PLACE = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_ATTEND = [*[_WHOLE] * 4, *[_PLACE] * 4, _REAL, _PLACE, _WHOLE, _PLACE, _PLACE]
_NORM = [_WHOLE, _WHOLE, _WHOLE, _PLACE, _WHOLE, _PLACE, _REAL, _PLACE, _WHOLE]
_TURN = [_WHOLE, _WHOLE, _WHOLE, _PLACE, _WHOLE, _PLACE, _PLACE]
_GATE = [_WHOLE, _WHOLE, _PLACE, _PLACE]
_DRAW = [_WHOLE, _WHOLE, *[_PLACE] * 6]


@lru_cache(maxsize=4)
def kernels(dtype: torch.dtype, device: str) -> Kernels | None:
    """Those for a type on a device; None where there are none, and torch's own operations are to be taken."""
    if device != "cpu" or dtype not in NAMES or (found := library()) is None:
        return None
    return Kernels(found, NAMES[dtype])


class Kernels:
    """The functions for numbers of one type."""

    def __init__(self, found: ctypes.CDLL, name: str) -> None:
        self._attend = _function(found, f"attend_{name}", _ATTEND)
        self._norm = _function(found, f"norm_{name}", _NORM)
        self._turn = _function(found, f"turn_{name}", _TURN)
        self._gate = _function(found, f"gate_{name}", _GATE)
        self._draw = _function(found, "draw_float32", _DRAW)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        pieces: Sequence[int],
        order: Tensor | None = None,
    ) -> Tensor:
        """Attention of tokens over what each sees: query [n, heads, dim], key and value [n, kv_heads, dim], the last
        dimension without gaps; gives [n, heads, dim].

        `pieces` are six words for each piece of what is seen: addresses of keys and values [slots, kv_heads, length,
        dim], elements from slot to slot and from head to head, and addresses of int64 [n] that tell each token's slot
        and how many of its places it sees. The last piece is the tokens' own: key and value are put into the last of
        the places that are seen there. `order`, int64 [n], takes tokens that see the same next to each other; with it,
        no two tokens may lie in one slot.
        """
        n, heads, dim = query.shape
        out = query.new_empty(n, heads, dim)
        strides = (_WHOLE * 6)(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
        self._attend(
            n,
            heads,
            key.shape[1],
            dim,
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            strides,
            scale,
            (_WHOLE * len(pieces))(*pieces),
            len(pieces) // 6,
            None if order is None else order.data_ptr(),
            out.data_ptr(),
        )
        return out

    def norm(self, states: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """Root-mean-square norm of the last dimension, [n, width] or [n, parts, width], rows of any stride."""
        parts = states.shape[1] if states.dim() == 3 else 1
        width = states.shape[-1]
        place, stride = states.data_ptr(), states.stride(0)
        self._norm(len(states), parts, width, place, stride, weight.data_ptr(), eps, out.data_ptr(), out.stride(0))
        return out

    def turn(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
        """Rotary positions in place: `heads` [n, heads, dim], `cosine`, `sine` [n, dim] without gaps."""
        n, count, dim = heads.shape
        self._turn(n, count, dim, heads.data_ptr(), heads.stride(0), cosine.data_ptr(), sine.data_ptr())

    def gate(self, both: Tensor, out: Tensor) -> Tensor:
        """silu(gate) · up of [n, 2 · width], gates before ups, into [n, width]; both without gaps."""
        self._gate(*out.shape, both.data_ptr(), out.data_ptr())
        return out

    def draw(self, logits: Tensor, temperature: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, int64 [n], their log-probs, float32 [n], and what the chances add up to, float64 [n]; see
        `rollout.sampling.sample`. The chances take the place of the logits, float32 [n, vocab]."""
        n, vocabulary = logits.shape
        tokens = torch.empty(n, dtype=torch.int64)
        logprobs, totals = torch.empty(n, dtype=torch.float32), torch.empty(n, dtype=torch.float64)
        places = [x.data_ptr() for x in (logits, temperature, draws, tokens, logprobs, totals)]
        self._draw(n, vocabulary, *places)
        return tokens, logprobs, totals


def _function(found: ctypes.CDLL, name: str, arguments: Sequence[type]) -> Callable[..., None]:
    function = getattr(found, name)
    function.argtypes, function.restype = list(arguments), None
    return function  # type: ignore[no-any-return]
