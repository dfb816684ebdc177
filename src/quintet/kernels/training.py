"""Compiled CPU kernels of training, forward and backward: everything except the large matrix products.

Tensors must be contiguous with the documented shapes, which is not checked. `T` is float32 or bfloat16, the dtype of
matrix products; hidden states between layers are float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from quintet.kernels.build import load_library

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_ARGUMENTS: dict[str, list[type]] = {
    "attention_forward": [_POINTER, _FLOAT, *[_POINTER] * 3],
    "attention_backward": [_POINTER, _FLOAT, *[_POINTER] * 5],
    "rms_norm_forward": [_INT, _INT, _POINTER, _POINTER, _POINTER, _FLOAT, *[_POINTER] * 3],
    "rms_norm_backward": [_INT, _INT, *[_POINTER] * 8],
    "rotary_forward": [*[_INT] * 3, _POINTER, _INT, _POINTER, _POINTER],
    "rotary_backward": [*[_INT] * 4, *[_POINTER] * 5],
    "silu_mul_forward": [_INT, _INT, *[_POINTER] * 2],
    "silu_mul_backward": [_INT, _INT, *[_POINTER] * 4],
    "token_statistics_forward": [_INT, _INT, _POINTER, _FLOAT, *[_POINTER] * 5],
    "token_statistics_backward": [_INT, _INT, _POINTER, _FLOAT, *[_POINTER] * 5],
}


@lru_cache(maxsize=4)
def training_kernels(dtype: torch.dtype) -> TrainingKernels | None:
    """Return the kernels for a dtype of matrix products, or None if torch operations must be used."""
    if dtype not in DTYPE_NAMES or (library := load_library("training")) is None:
        return None
    return TrainingKernels(library, dtype)


class TrainingKernels:
    """Training kernels for one dtype of matrix products."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._functions = {}
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, f"{name}_{DTYPE_NAMES[dtype]}")
            function.argtypes, function.restype = arguments, None
            self._functions[name] = function
        self._weight_gradient = library.weight_gradient_bfloat16
        self._weight_gradient.argtypes, self._weight_gradient.restype = [*[_INT] * 3, *[_POINTER] * 3], ctypes.c_int

    def _call(self, name: str, *arguments: Tensor | float | None) -> None:
        self._functions[name](*[x.data_ptr() if isinstance(x, Tensor) else x for x in arguments])

    def weight_gradient(self, left: Tensor, right: Tensor) -> Tensor:
        """Return leftᵀ · right for T [P, out] and [P, in], float32 [out, in].

        On CPUs with bfloat16 matrix tiles (AMX), sums are accumulated in float32 without rounding in between.
        """
        if self.dtype is torch.bfloat16:
            out = left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32)
            pointers = (left.data_ptr(), right.data_ptr(), out.data_ptr())
            if self._weight_gradient(len(left), *out.shape, *pointers):
                return out
        return torch.mm(left.t(), right).float()

    def attention(
        self, descriptor: Tensor, scale: float, states: Tensor, heads: int, dim: int
    ) -> tuple[Tensor, Tensor]:
        """Return the attention of packed tokens, T [P, heads · dim], and the log-sum-exp of scores, float32 [P, heads].

        `states` is T [P, (heads + 2 · kv_heads) · dim]: queries, keys, values. `dim` must be a multiple of 16.
        `descriptor` defines the layout, see `PackedLayout.kernel_descriptor`.
        """
        out = states.new_empty(len(states), heads * dim)
        log_sums = states.new_empty(len(states), heads, dtype=torch.float32)
        self._call("attention_forward", descriptor, scale, states, out, log_sums)
        return out, log_sums

    def attention_backward(
        self, descriptor: Tensor, scale: float, states: Tensor, out: Tensor, log_sums: Tensor, grad: Tensor
    ) -> Tensor:
        """Return the float32 gradient of `states`, given that of `out`."""
        grad_states = torch.empty_like(states, dtype=torch.float32)
        self._call("attention_backward", descriptor, scale, states, out, log_sums, grad, grad_states)
        return grad_states

    def rms_norm(
        self, states: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """RMS norm (Zhang & Sennrich 2019) of float32 `states` [P, width] + T `residual`.

        Returns the sum, the normalized sum in T and the reciprocal root mean squares [P].
        """
        summed = states if residual is None else torch.empty_like(states)
        out = states.new_empty(states.shape, dtype=self.dtype)
        scales = states.new_empty(len(states))
        self._call("rms_norm_forward", *states.shape, states, residual, weight, eps, summed, out, scales)
        return summed, out, scales

    def rms_norm_backward(
        self, grad: Tensor, states: Tensor, weight: Tensor, scales: Tensor, grad_states: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of the states plus `grad_states`, in float32 and in T, and the weight's gradient."""
        total, grad_weight = torch.empty_like(states), torch.empty_like(weight)
        grad_cast = total if self.dtype is torch.float32 else torch.empty_like(grad)
        cast_out = None if grad_cast is total else grad_cast
        self._call(
            "rms_norm_backward", *states.shape, grad, states, weight, scales, grad_states, total, cast_out, grad_weight
        )
        return total, grad_cast, grad_weight

    def rotary(self, states: Tensor, heads: int, dim: int, cosine: Tensor, sine: Tensor) -> None:
        """Apply rotary embeddings (Su et al. 2021) to the first `heads` heads of T [P, width], in place.

        `cosine` and `sine` are float32 [P, dim].
        """
        self._call("rotary_forward", len(states), heads, dim, states, states.shape[1], cosine, sine)

    def rotary_backward(
        self, grad: Tensor, heads: int, dim: int, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of `rotary`'s input in T and its sum over rows; `grad` may be overwritten."""
        out = grad if self.dtype is torch.float32 else torch.empty_like(grad, dtype=self.dtype)
        total = grad.new_empty(grad.shape[1])
        self._call("rotary_backward", len(grad), heads, dim, grad.shape[1], grad, cosine, sine, out, total)
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) · up (SwiGLU, Shazeer 2020) of T [P, 2 · width], gate before up."""
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._call("silu_mul_forward", *out.shape, gate_up, out)
        return out

    def silu_mul_backward(self, gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of `gate_up`, and the recomputed output of `silu_mul`."""
        grad_gate_up, out = torch.empty_like(gate_up), torch.empty_like(grad)
        self._call("silu_mul_backward", *out.shape, gate_up, grad, grad_gate_up, out)
        return grad_gate_up, out

    def token_statistics(self, logits: Tensor, temperature: float, targets: Tensor, out: Sequence[Tensor]) -> None:
        """Write statistics of T `logits` [m, vocabulary] / `temperature` to `out`, float32 [m] each.

        These are the targets' log-probs, entropies, log-sum-exps and sums of squared probabilities.
        """
        self._call("token_statistics_forward", *logits.shape, logits, 1.0 / temperature, targets, *out)

    def token_statistics_backward(
        self,
        logits: Tensor,
        temperature: float,
        targets: Tensor,
        log_sums: Tensor,
        entropy: Tensor,
        grad_logprobs: Tensor,
        grad_entropy: Tensor,
    ) -> None:
        """Overwrite `logits` with their gradient."""
        arguments = (targets, log_sums, entropy, grad_logprobs, grad_entropy)
        self._call("token_statistics_backward", *logits.shape, logits, 1.0 / temperature, *arguments)
