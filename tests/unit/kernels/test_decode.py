"""If these fail, answers are written from wrong attention, or tokens drawn from wrong chances, on every CPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quintet.kernels.build import find_compiler
from quintet.kernels.decode import DecodeKernels, decode_kernels

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

pytestmark = needs_compiler


def of(dtype: torch.dtype) -> DecodeKernels:
    actual = decode_kernels(dtype, "cpu")
    assert actual is not None
    return actual


class Pool:
    """Random keys and values in blocks, as in the embedded engine's cache: [blocks, 2, kv_heads, size, dim]."""

    def __init__(self, lengths: list[int], kv_heads: int, dim: int, dtype: torch.dtype, size: int = 16) -> None:
        """One row of the block tables for each length in tokens, with blocks in random order."""
        counts = [-(-length // size) for length in lengths]
        self.size = size
        self.stored = torch.randn(sum(counts), 2, kv_heads, size, dim).to(dtype)
        blocks = torch.split(torch.randperm(sum(counts)), counts)
        self.tables = torch.full((len(lengths), max(counts) + 2), -(1 << 20), dtype=torch.int32)
        for row, own in enumerate(blocks):
            self.tables[row, : len(own)] = own

    def words(self, rows: Tensor, seen: Tensor) -> list[int]:
        keys, values = self.stored[:, 0], self.stored[:, 1]
        tables = self.tables
        return [
            *(keys.data_ptr(), values.data_ptr(), keys.stride(0), self.size),
            *(tables.data_ptr(), tables.stride(0), rows.data_ptr(), seen.data_ptr()),
        ]

    def read(self, row: Tensor | int, length: Tensor | int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first tokens of a row, [kv_heads, length, dim] each."""
        blocks = self.tables[row, : -(-int(length) // self.size)].long()
        keys, values = self.stored[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : int(length)]
        return keys, values


def plain(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of one token, in float64: query [heads, dim], keys and values [kv_heads, length, dim]."""
    k, v = keys.double(), values.double()
    group = query.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    weights = (torch.einsum("hd,hld->hl", query.double(), k) * scale).softmax(-1)
    return torch.einsum("hl,hld->hd", weights, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 20, 32, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 2), (4, 1), (14, 2)])
def test_attention_over_blocks(dtype: torch.dtype, dim: int, heads: int, kv_heads: int) -> None:
    """Every number of queries to a key, dimensions with and without vectors of their own, lengths off every border."""
    torch.manual_seed(heads * dim)
    lengths, scale = [1, 2, 64, 16, 17, 40, 31, 97], 1 / math.sqrt(dim)
    for size in (16, 32):
        query, key, value = (torch.randn(len(lengths), n, dim).to(dtype) for n in (heads, kv_heads, kv_heads))
        pool = Pool(lengths, kv_heads, dim, dtype, size)
        rows = torch.randperm(len(lengths))
        seen = torch.tensor(lengths)[rows]
        actual = of(dtype).attention(query, key, value, scale, pool.words(rows, seen), rows.argsort())
        for i, row in enumerate(rows):
            keys, values = pool.read(row, seen[i])
            assert torch.equal(keys[:, -1], key[i])
            assert torch.equal(values[:, -1], value[i])
            expected = plain(query[i], keys, values, scale)
            torch.testing.assert_close(actual[i].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_sequences_share_blocks_and_sum_in_the_same_order() -> None:
    """A token that reads shared blocks gets the bits that it gets from blocks of its own."""
    torch.manual_seed(0)
    pool = Pool([48, 48], 2, 32, torch.float32)
    query, key, value = torch.randn(2, 4, 32), torch.randn(2, 2, 32), torch.randn(2, 2, 32)
    query[1], key[1], value[1] = query[0], key[0], value[0]
    for table in pool.tables[1, :2]:
        pool.stored[table] = torch.nan
    pool.tables[1, :2] = pool.tables[0, :2]
    pool.stored[pool.tables[1, 2]] = pool.stored[pool.tables[0, 2]]
    rows, seen = torch.tensor([0, 1]), torch.tensor([40, 40])
    actual = of(torch.float32).attention(query, key, value, 1.0, pool.words(rows, seen), torch.tensor([1, 0]))
    assert torch.equal(actual[0], actual[1])


def test_tokens_of_one_sequence_see_those_before_them() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    pool = Pool([32, 32], 2, 16, torch.float32)
    rows, seen = torch.tensor([1, 1, 1, 0, 0]), torch.tensor([15, 16, 17, 1, 2])
    actual = of(torch.float32).attention(query, key, value, 0.25, pool.words(rows, seen))
    for i in range(5):
        torch.testing.assert_close(
            actual[i].double(), plain(query[i], *pool.read(rows[i], seen[i]), 0.25), atol=2e-6, rtol=0
        )
    assert torch.equal(pool.read(1, 17)[0][:, 14:17], key[:3].transpose(0, 1))


def test_attention_of_rows_with_gaps_between_them() -> None:
    """Queries and keys lie side by side in memory, as the decoder writes them."""
    torch.manual_seed(0)
    both, value = torch.randn(3, 6, 16), torch.randn(3, 2, 16)
    pool = Pool([16] * 3, 2, 16, torch.float32)
    blocks = pool.words(rows := torch.arange(3), seen := torch.full((3,), 4))
    actual = of(torch.float32).attention(both[:, :4], both[:, 4:], value, 1.0, blocks)
    again = of(torch.float32).attention(both[:, :4].contiguous(), both[:, 4:].contiguous(), value, 1.0, blocks)
    assert torch.equal(actual, again)
    del rows, seen


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    query, key, value = torch.full((1, 1, 16), 30.0), torch.full((1, 1, 16), 30.0), torch.ones(1, 1, 16)
    pool = Pool([16], 1, 16, torch.float32)
    pool.stored[:, 0], pool.stored[:, 1] = -30.0, 0.0
    rows, seen = torch.tensor([0]), torch.tensor([9])
    actual = of(torch.float32).attention(query, key, value, 1.0, pool.words(rows, seen))
    assert torch.equal(actual, torch.ones(1, 1, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 24), (200, 64), (5, 4, 20)])
def test_the_norm_is_that_of_the_models(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    torch.manual_seed(0)
    module = Qwen2RMSNorm(shape[-1], eps=1e-5).to(dtype)
    module.weight.data = torch.randn(shape[-1]).to(dtype)
    wide = torch.randn(shape[0], 3 * shape[1], *shape[2:]).to(dtype)
    states = wide[:, shape[1] : 2 * shape[1]]
    actual = of(dtype).rms_norm(states, module.weight, 1e-5, torch.empty_like(states.contiguous()))
    torch.testing.assert_close(actual, module(states), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_are_turned_as_the_models_do(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    heads, angles = torch.randn(90, 3, 20).to(dtype), torch.randn(90, 10)
    cosine, sine = (torch.cat([x, x], -1).to(dtype) for x in (angles.cos(), angles.sin()))
    there = heads.transpose(0, 1)[None]
    expected = apply_rotary_pos_emb(there, there, cosine[None], sine[None])[0][0].transpose(0, 1)
    of(dtype).rotary(heads, cosine, sine)
    torch.testing.assert_close(heads, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 15, 16, 33, 3001])
def test_gates(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    both = torch.randn(5, 2 * width).to(dtype)
    both[:, :width] *= 20
    expected = torch.nn.functional.silu(both[:, :width]) * both[:, width:]
    actual = of(dtype).silu_mul(both, both.new_empty(5, width))
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("copies", [1, 16], ids=["one by one", "sixteen at a time"])
def test_gates_far_out(copies: int) -> None:
    gate = torch.tensor([-torch.inf, -1000.0, -90.0, 0.0, 90.0, 1000.0, torch.nan]).repeat_interleave(copies)
    both = torch.cat([gate, torch.ones(len(gate))])[None]
    actual = of(torch.float32).silu_mul(both, torch.empty(1, len(gate)))[0][::copies]
    assert actual[1:6].tolist() == pytest.approx([0.0, 0.0, 0.0, 90.0, 1000.0], abs=1e-30)
    assert math.isnan(actual[0]), "silu of minus infinity is 0 · infinity in torch too"
    assert math.isnan(actual[6])


@given(st.lists(st.floats(-87, 0, width=32), min_size=1, max_size=150))
@settings(deadline=None)
def test_chances_and_their_sum(logits: list[float]) -> None:
    """The exponential is good to a few units in the last place, in whole blocks and at their ends."""
    row = torch.tensor([logits])
    expected = (row - row.max()).double().exp()
    _, logprobs, totals = of(torch.float32).sample(row, torch.ones(1), torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(row.double(), expected, atol=1e-37, rtol=4e-7)
    assert float(totals) == pytest.approx(float(expected.sum()), rel=1e-6)
    assert float(logprobs) <= 0


def test_logits_that_arent_numbers_are_told() -> None:
    logits = torch.zeros(3, 200)
    logits[1, 150] = torch.nan
    logits[2, 0] = torch.nan
    tokens, logprobs, _ = of(torch.float32).sample(
        logits, torch.tensor([1.0, 1.0, 0.0]), torch.full((3,), 0.999).double()
    )
    assert logprobs.isnan().tolist() == [False, True, True]
    assert bool(((tokens >= 0) & (tokens < 200)).all())
