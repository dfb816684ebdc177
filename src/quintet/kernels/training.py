"""What a training pass does on a CPU besides its large matrix products, forward and backward, compiled.

Tensors lie in memory as the functions say, without gaps; none looks whether it is so. `T` is float32 or bfloat16, the
type in which matrices are multiplied; states between layers are float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from quintet.kernels.build import library

__all__ = ["TrainingKernels", "training_kernels"]

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_WHOLE, _REAL, _PLACE = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_ARGUMENTS: dict[str, list[type]] = {
    "attend_forward": [_PLACE, _REAL, *[_PLACE] * 3],
    "attend_backward": [_PLACE, _REAL, *[_PLACE] * 5],
    "norm_forward": [_WHOLE, _WHOLE, _PLACE, _PLACE, _PLACE, _REAL, *[_PLACE] * 3],
    "norm_backward": [_WHOLE, _WHOLE, *[_PLACE] * 8],
    "turn_forward": [*[_WHOLE] * 3, _PLACE, _WHOLE, _PLACE, _PLACE],
    "turn_backward": [*[_WHOLE] * 4, *[_PLACE] * 5],
    "gate_forward": [_WHOLE, _WHOLE, *[_PLACE] * 2],
    "gate_backward": [_WHOLE, _WHOLE, *[_PLACE] * 4],
    "measure_forward": [_WHOLE, _WHOLE, _PLACE, _REAL, *[_PLACE] * 5],
    "measure_backward": [_WHOLE, _WHOLE, _PLACE, _REAL, *[_PLACE] * 5],
}


@lru_cache(maxsize=4)
def training_kernels(dtype: torch.dtype) -> TrainingKernels | None:
    """Those for matrices of a type; None where there are none, and torch's own operations are to be taken."""
    if dtype not in NAMES or (found := library("training")) is None:
        return None
    return TrainingKernels(found, dtype)


class TrainingKernels:
    """The functions for matrices of one type."""

    def __init__(self, found: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._functions = {}
        for name, arguments in _ARGUMENTS.items():
            function = getattr(found, f"{name}_{NAMES[dtype]}")
            function.argtypes, function.restype = arguments, None
            self._functions[name] = function
        self._product = found.product_over_rows_bfloat16
        self._product.argtypes, self._product.restype = [*[_WHOLE] * 3, *[_PLACE] * 3], ctypes.c_int

    def _call(self, name: str, *arguments: Tensor | float | None) -> None:
        self._functions[name](*[x.data_ptr() if isinstance(x, Tensor) else x for x in arguments])

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """leftᵀ · right of T [P, out] and [P, in], float32 [out, in]: a weight's gradient, not rounded in between where
        the processor multiplies tiles of bfloat16."""
        if self.dtype is torch.bfloat16:
            found = left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32)
            places = (left.data_ptr(), right.data_ptr(), found.data_ptr())
            if self._product(len(left), *found.shape, *places):
                return found
        return torch.mm(left.t(), right).float()

    def attend(self, words: Tensor, scale: float, states: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor]:
        """Attention of packed tokens: `states` T [P, (heads + 2 · kv_heads) · dim], queries before keys before values;
        `dim` is a multiple of 16. Gives T [P, heads · dim] and what each softmax was divided by, its logarithm,
        float32 [P, heads]. `words` say who sees whom, see `PackedLayout.words`."""
        out = states.new_empty(len(states), heads * dim)
        sums = states.new_empty(len(states), heads, dtype=torch.float32)
        self._call("attend_forward", words, scale, states, out, sums)
        return out, sums

    def attend_back(
        self, words: Tensor, scale: float, states: Tensor, out: Tensor, sums: Tensor, grad: Tensor
    ) -> Tensor:
        """The loss by `states`, float32, from that by `out`."""
        found = torch.empty_like(states, dtype=torch.float32)
        self._call("attend_backward", words, scale, states, out, sums, grad, found)
        return found

    def norm(self, states: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Root-mean-square norm (Zhang & Sennrich 2019) of float32 `states` [P, width] + T `more`: the sum, the normed
        in T, and one over each row's root mean square."""
        kept = states if more is None else torch.empty_like(states)
        out = states.new_empty(states.shape, dtype=self.dtype)
        scales = states.new_empty(len(states))
        self._call("norm_forward", *states.shape, states, more, weight, eps, kept, out, scales)
        return kept, out, scales

    def norm_back(
        self, grad: Tensor, states: Tensor, weight: Tensor, scales: Tensor, before: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss by the states, added to `before`, in float32 and in T, and that by the weight."""
        found, by_weight = torch.empty_like(states), torch.empty_like(weight)
        narrowed = found if self.dtype is torch.float32 else torch.empty_like(grad)
        extra = None if narrowed is found else narrowed
        self._call("norm_backward", *states.shape, grad, states, weight, scales, before, found, extra, by_weight)
        return found, narrowed, by_weight

    def turn(self, states: Tensor, heads: int, dim: int, cosine: Tensor, sine: Tensor) -> None:
        """Rotary positions (Su et al. 2021) of the first `heads` heads of T [P, width], in place; `cosine`, `sine`
        float32 [P, dim]."""
        self._call("turn_forward", len(states), heads, dim, states, states.shape[1], cosine, sine)

    def turn_back(self, grad: Tensor, heads: int, dim: int, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        """The loss by what was turned, in T, and its sum over rows; `grad` is used up."""
        out = grad if self.dtype is torch.float32 else torch.empty_like(grad, dtype=self.dtype)
        total = grad.new_empty(grad.shape[1])
        self._call("turn_backward", len(grad), heads, dim, grad.shape[1], grad, cosine, sine, out, total)
        return out, total

    def gate(self, both: Tensor) -> Tensor:
        """silu(gate) · up of T [P, 2 · width], gates before ups (Shazeer 2020)."""
        out = both.new_empty(len(both), both.shape[1] // 2)
        self._call("gate_forward", *out.shape, both, out)
        return out

    def gate_back(self, both: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The loss by `both`, and the gate's result once more."""
        found, out = torch.empty_like(both), torch.empty_like(grad)
        self._call("gate_backward", *out.shape, both, grad, found, out)
        return found, out

    def measure(self, logits: Tensor, temperature: float, targets: Tensor, out: Sequence[Tensor]) -> None:
        """Of T `logits` [m, vocabulary] over `temperature`: the targets' log-probs, entropies, the logarithms of what
        softmax divides by, and the sums of squared probabilities, into float32 [m] each."""
        self._call("measure_forward", *logits.shape, logits, 1.0 / temperature, targets, *out)

    def measure_back(
        self,
        logits: Tensor,
        temperature: float,
        targets: Tensor,
        sums: Tensor,
        entropy: Tensor,
        by_logprobs: Tensor,
        by_entropy: Tensor,
    ) -> None:
        """The loss by the logits, in their place."""
        arguments = (targets, sums, entropy, by_logprobs, by_entropy)
        self._call("measure_backward", *logits.shape, logits, 1.0 / temperature, *arguments)
