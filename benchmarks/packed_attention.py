"""Time attention variants on packed tokens: one layer, forward and backward.

    python benchmarks/packed_attention.py

`prompts`: 16 prompts of 48 tokens with 8 responses of 48 tokens each; `ragged`: 64 sequences of 20 to 400 tokens. See
`learner.py`.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_step import clock
from quintet.kernels.training import training_kernels
from quintet.policies.attention import PackedLayout

HEADS, KV_HEADS, DIM = 8, 4, 32
SCALE = DIM**-0.5
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def layouts() -> dict[str, tuple[PackedLayout, list[list[range]]]]:
    """Return each case with the token indices of every sequence: shared prefix and remaining tokens."""
    draw = random.Random(3)
    lengths = [draw.randint(20, 400) for _ in range(64)]
    ends = [sum(lengths[: i + 1]) for i in range(64)]
    ragged = [[range(end - length, end)] for length, end in zip(lengths, ends, strict=True)]
    answers = torch.full((128,), 48)
    parents = torch.arange(16).repeat_interleave(8)
    stems = [range(48 * i, 48 * (i + 1)) for i in range(16)]
    shared = [[stems[i // 8], range(768 + 48 * i, 768 + 48 * (i + 1))] for i in range(128)]
    return {
        "prompts": (PackedLayout(answers, 0, torch.full((16,), 48), parents), shared),
        "ragged": (PackedLayout(torch.tensor(lengths)), ragged),
    }


def mask_of(sequences: list[list[range]], size: int) -> Tensor:
    """Return the attention mask, bool [P, P]."""
    seen = torch.zeros(size, size, dtype=torch.bool)
    for parts in sequences:
        for part in parts:
            seen[part.start : part.stop, part.start : part.stop] = True
        if len(parts) > 1:
            seen[parts[1].start : parts[1].stop, parts[0].start : parts[0].stop] = True
    return seen & torch.ones(size, size, dtype=torch.bool).tril()


def rows_of_heads(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def masked(mask: Tensor) -> Way:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (rows_of_heads(x) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attention


def padded(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return layout.attention(0, query, key, value, SCALE)


def per_sequence(sequences: list[list[range]]) -> Way:
    """Attend sequence by sequence; a shared prefix is recomputed for each."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = []
        for parts in sequences:
            q, k, v = (rows_of_heads(torch.cat([x[p.start : p.stop] for p in parts])) for x in (query, key, value))
            out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(out)

    return attention


def flex(mask: Tensor) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    size = len(mask)

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return mask[row, column]

    blocks = create_block_mask(sees, None, None, size, size, device="cpu")
    compiled = torch.compile(flex_attention)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (rows_of_heads(x) for x in (query, key, value))
        return compiled(q, k, v, block_mask=blocks, enable_gqa=True)[0].transpose(0, 1)  # type: ignore[no-any-return]

    return attention


def seconds_of(attend: Way, size: int, dtype: torch.dtype, times: int = 5) -> dict[str, float]:
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    inputs = [torch.randn(size, heads, DIM).to(dtype).requires_grad_() for heads in shapes]
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(times + 2):
        started = clock()
        out = attend(*inputs)
        middle = clock()
        torch.autograd.backward(out.sum())
        found["forward"].append(middle - started)
        found["backward"].append(clock() - middle)
    return {name: round(statistics.median(one[2:]), 5) for name, one in found.items()}


def kernel_seconds(layout: PackedLayout, size: int, dtype: torch.dtype, times: int = 5) -> dict[str, float] | str:
    kernels = training_kernels(dtype)
    if kernels is None:
        return "no C++ compiler"
    states, words = (
        torch.randn(size, (HEADS + 2 * KV_HEADS) * DIM).to(dtype),
        layout.kernel_descriptor(HEADS, KV_HEADS, DIM),
    )
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(times + 2):
        started = clock()
        out, sums = kernels.attention(words, SCALE, states, HEADS, DIM)
        middle = clock()
        kernels.attention_backward(words, SCALE, states, out, sums, torch.ones_like(out))
        found["forward"].append(middle - started)
        found["backward"].append(clock() - middle)
    return {name: round(statistics.median(one[2:]), 5) for name, one in found.items()}


def measure_attention() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, (layout, sequences) in layouts().items():
            size = max(part.stop for parts in sequences for part in parts)
            mask = mask_of(sequences, size)
            row: dict[str, Any] = {"case": name, "dtype": str(dtype).removeprefix("torch."), "tokens": size}
            row["kernels"] = kernel_seconds(layout, size, dtype)
            row["padded rows"] = seconds_of(partial(padded, layout), size, dtype)
            row["loop over sequences"] = seconds_of(per_sequence(sequences), size, dtype)
            row["mask over all tokens"] = seconds_of(masked(mask), size, dtype, 1)
            try:
                row["flex attention"] = seconds_of(flex(mask), size, dtype, 1)
            except (RuntimeError, NotImplementedError) as error:
                row["flex attention"] = str(error).strip().splitlines()[0][:200]
            rows.append(row)
            print(row, flush=True)
    return rows


if __name__ == "__main__":
    print(json.dumps(measure_attention()))
