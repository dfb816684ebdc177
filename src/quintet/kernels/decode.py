"""Compiled CPU kernels of decoding: attention over KV caches, RMS norm, rotary embedding, SwiGLU and sampling.

Tensors are float32 or bfloat16 with the documented memory layout, which is not checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from quintet.kernels.build import load_library

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_ATTENTION = [*[_INT] * 4, *[_POINTER] * 4, _FLOAT, _POINTER, _POINTER, _POINTER]
_RMS_NORM = [_INT, _INT, _INT, _POINTER, _INT, _POINTER, _FLOAT, _POINTER, _INT]
_ROTARY = [_INT, _INT, _INT, _POINTER, _INT, _POINTER, _POINTER]
_SILU_MUL = [_INT, _INT, _POINTER, _POINTER]
_SAMPLE = [_INT, _INT, *[_POINTER] * 6]


@lru_cache(maxsize=4)
def decode_kernels(dtype: torch.dtype, device: str) -> DecodeKernels | None:
    """Return the kernels for a dtype and device, or None if torch operations must be used."""
    if device != "cpu" or dtype not in DTYPE_NAMES or (library := load_library()) is None:
        return None
    return DecodeKernels(library, DTYPE_NAMES[dtype])


class DecodeKernels:
    """Decode kernels for one dtype."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._attention = _function(library, f"attention_{name}", _ATTENTION)
        self._rms_norm = _function(library, f"rms_norm_{name}", _RMS_NORM)
        self._rotary = _function(library, f"rotary_{name}", _ROTARY)
        self._silu_mul = _function(library, f"silu_mul_{name}", _SILU_MUL)
        self._sample = _function(library, "sample_float32", _SAMPLE)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        blocks: Sequence[int],
        order: Tensor | None = None,
    ) -> Tensor:
        """Return the attention [n, heads, dim] of new tokens over cached keys and values and their own.

        Query is [n, heads, dim], key and value are [n, kv_heads, dim], contiguous in the last dimension.

        `blocks` holds eight numbers: addresses of the keys and values of block 0, [kv_heads, size, dim] each; elements
        from one block to the next; `size`, the tokens of a block, a multiple of 16; address of the block tables, int32,
        and elements of a row; addresses of int64 [n] with the row of each token and the number of positions that it
        attends to. Key and value of a token are written to the last of these positions, for all tokens before the
        first one attends. `order`, int64 [n], processes tokens with the same blocks next to each other; it requires
        that no token attends to another new one.
        """
        n, heads, dim = query.shape
        out = query.new_empty(n, heads, dim)
        strides = (_INT * 6)(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
        self._attention(
            n,
            heads,
            key.shape[1],
            dim,
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            strides,
            scale,
            (_INT * 8)(*blocks),
            None if order is None else order.data_ptr(),
            out.data_ptr(),
        )
        return out

    def rms_norm(self, states: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """Write the RMS norm of the last dimension of [n, width] or [n, parts, width] to `out`; rows of any stride."""
        parts = states.shape[1] if states.dim() == 3 else 1
        width = states.shape[-1]
        pointer, stride = states.data_ptr(), states.stride(0)
        self._rms_norm(
            len(states), parts, width, pointer, stride, weight.data_ptr(), eps, out.data_ptr(), out.stride(0)
        )
        return out

    def rotary(self, heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
        """Apply rotary embeddings to `heads` [n, heads, dim] in place; `cosine` and `sine` [n, dim] are contiguous."""
        n, num_heads, dim = heads.shape
        self._rotary(n, num_heads, dim, heads.data_ptr(), heads.stride(0), cosine.data_ptr(), sine.data_ptr())

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> Tensor:
        """Write silu(gate) · up of contiguous [n, 2 · width], gate before up, to contiguous [n, width]."""
        self._silu_mul(*out.shape, gate_up.data_ptr(), out.data_ptr())
        return out

    def sample(self, logits: Tensor, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample tokens from float32 `logits` [n, vocabulary], which are overwritten with unnormalized probabilities.

        Returns tokens int64 [n], their log-probs float32 [n] and the sums of these probabilities float64 [n].
        """
        n, vocabulary = logits.shape
        tokens = torch.empty(n, dtype=torch.int64)
        logprobs, totals = torch.empty(n, dtype=torch.float32), torch.empty(n, dtype=torch.float64)
        pointers = [x.data_ptr() for x in (logits, temperature, uniforms, tokens, logprobs, totals)]
        self._sample(n, vocabulary, *pointers)
        return tokens, logprobs, totals


def _function(library: ctypes.CDLL, name: str, arguments: Sequence[type]) -> Callable[..., None]:
    function = getattr(library, name)
    function.argtypes, function.restype = list(arguments), None
    return function  # type: ignore[no-any-return]
