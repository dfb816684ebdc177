"""If these fail, every learner on a CPU attends wrongly, or learns from a wrong gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quintet.kernels.build import find_compiler
from quintet.kernels.training import TrainingKernels, training_kernels
from quintet.policies.attention import PackedLayout

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def of(dtype: torch.dtype) -> TrainingKernels:
    actual = training_kernels(dtype)
    assert actual is not None
    return actual


def mask_of(prefix: int, stems: list[int], parents: list[int], branches: list[int]) -> Tensor:
    """Who sees whom, by the meaning of a packed layout."""
    size = prefix + sum(stems) + sum(branches)
    seen = torch.zeros(size, size, dtype=torch.bool)
    seen[:, :prefix] = True
    begins = [prefix + sum(stems[:i]) for i in range(len(stems))]
    for begin, length in zip(begins, stems, strict=True):
        seen[begin : begin + length, begin : begin + length] = True
    at = prefix + sum(stems)
    for i, length in enumerate(branches):
        seen[at : at + length, at : at + length] = True
        if stems:
            begin = begins[parents[i]]
            seen[at : at + length, begin : begin + stems[parents[i]]] = True
        at += length
    return seen.tril()


def plain(states: Tensor, heads: int, kv_heads: int, dim: int, seen: Tensor, scale: float) -> Tensor:
    query, key, value = states.view(len(states), -1, dim).split([heads, kv_heads, kv_heads], 1)
    key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    chances = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", chances, value).flatten(1)


CASES: dict[str, tuple[int, list[int], list[int], list[int]]] = {
    "alone, one longer than what is computed at a time": (0, [], [], [5, 33, 130, 1]),
    "one prompt": (19, [], [], [5, 33, 64]),
    "prompts that begin alike": (3, [4, 40], [0, 0, 1, 1], [5, 33, 17, 70]),
    "whole tiles": (0, [48, 48], [0, 0, 1], [48, 48, 47]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradient(name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """With vectors and with tiles of the processor, where it has them."""
    torch.manual_seed(dim)
    prefix, stems, parents, branches = CASES[name]
    layout = PackedLayout(
        torch.tensor(branches), prefix, torch.tensor(stems) if stems else None, torch.tensor(parents) if stems else None
    )
    size, scale = prefix + sum(stems) + sum(branches), dim**-0.5
    states = torch.randn(size, (heads + 2 * kv_heads) * dim).to(dtype)
    grad = torch.randn(size, heads * dim).to(dtype)
    words, kernels = layout.kernel_descriptor(heads, kv_heads, dim), of(dtype)
    out, sums = kernels.attention(words, scale, states, heads, dim)
    actual = kernels.attention_backward(words, scale, states, out, sums, grad)
    exact = states.double().requires_grad_()
    whole = plain(exact, heads, kv_heads, dim, mask_of(prefix, stems, parents, branches), scale)
    (expected,) = torch.autograd.grad(whole, exact, grad.double())
    for ours, theirs in ((out, whole.detach()), (actual, expected)):
        assert float((ours - theirs).abs().max()) <= TOLERANCE[dtype] * float(theirs.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 32, 100])
def test_a_gate_and_its_gradient(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    both, grad = (6 * torch.randn(7, 2 * width)).to(dtype), torch.randn(7, width).to(dtype)
    actual, out = of(dtype).silu_mul_backward(both, grad)
    exact = both.double().requires_grad_()
    whole = torch.nn.functional.silu(exact[:, :width]) * exact[:, width:]
    (expected,) = torch.autograd.grad(whole, exact, grad.double())
    torch.testing.assert_close(out, of(dtype).silu_mul(both))
    for ours, theirs in ((out, whole.detach()), (actual, expected)):
        assert float((ours - theirs).abs().max()) <= TOLERANCE[dtype] * float(theirs.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_and_its_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    states, more, weight = torch.randn(9, 40), torch.randn(9, 40).to(dtype), torch.randn(40)
    grad, before = torch.randn(9, 40).to(dtype), torch.randn(9, 40)
    kernels = of(dtype)
    kept, out, scales = kernels.rms_norm(states, more, weight, 1e-6)
    actual, narrow, by_weight = kernels.rms_norm_backward(grad, kept, weight, scales, before)
    exact, factor = (states.double() + more.double()).requires_grad_(), weight.double().requires_grad_()
    whole = factor * exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected, wanted_weight = torch.autograd.grad(whole, [exact, factor], grad.double())
    torch.testing.assert_close(kept.double(), exact.detach(), atol=1e-6, rtol=1e-6)
    for ours, theirs in ((out, whole.detach()), (narrow, expected + before)):
        assert float((ours - theirs).abs().max()) <= TOLERANCE[dtype] * float(theirs.abs().max())
    torch.testing.assert_close(actual.double(), expected + before, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(by_weight.double(), wanted_weight, atol=1e-5, rtol=1e-5)


def test_turns_come_back() -> None:
    """The gradient of a rotation is the rotation back."""
    torch.manual_seed(2)
    angles = torch.randn(6, 8)
    cosine, sine = (torch.cat([f(angles)] * 2, 1) for f in (torch.cos, torch.sin))
    states = torch.randn(6, 3 * 16)
    turned = states.clone()
    kernels = of(torch.float32)
    kernels.rotary(turned, 2, 16, cosine, sine)
    assert torch.equal(turned[:, 32:], states[:, 32:])
    assert not torch.allclose(turned[:, :32], states[:, :32])
    back, total = kernels.rotary_backward(turned.clone(), 2, 16, cosine, sine)
    torch.testing.assert_close(back, states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total, states.sum(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "out", "inputs"),
    [(1, 32, 32), (31, 64, 96), (257, 96, 32), (700, 32, 352), (700, 352, 32), (40, 33, 32), (40, 32, 48), (0, 32, 32)],
)
def test_a_weights_gradient_is_the_sum_over_rows(dtype: torch.dtype, rows: int, out: int, inputs: int) -> None:
    """Whatever doesn't fill the tiles, and whichever side is the broader one; NaN in memory that is used again must not
    come in."""
    torch.manual_seed(0)
    left, right = torch.randn(rows, out).to(dtype), torch.randn(rows, inputs).to(dtype)
    torch.full((out, inputs), torch.nan)
    actual = of(dtype).weight_gradient(left, right)
    assert (actual.dtype, actual.shape) == (torch.float32, (out, inputs))
    torch.testing.assert_close(actual.double(), left.double().t() @ right.double(), atol=rows * 5e-3, rtol=1e-2)
    if dtype is torch.bfloat16 and not (out % 32 or inputs % 32) and tiles_here():
        torch.testing.assert_close(actual.double(), left.double().t() @ right.double(), atol=1e-4, rtol=1e-5)


def tiles_here() -> bool:
    return "amx_bf16" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False
