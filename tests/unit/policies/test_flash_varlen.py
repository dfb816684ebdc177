"""If these fail, tokens on a GPU with flash-attn attend to other sequences, or not to their prompt."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.policies import attention, flash_varlen
from quintet.policies.attention import PackedLayout
from quintet.policies.attention_backends import AttentionOptions, use_attention_options
from quintet.policies.flash_varlen import supports_flash_varlen


def as_flash_does(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """By its documentation: a causal mask is aligned with the lower right corner."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    out = []
    for i in range(len(cu_seqlens_q) - 1):
        q = query[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].transpose(0, 1)
        k, v = (x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].transpose(0, 1) for x in (key, value))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        if window_size[0] >= 0:
            mask &= ~mask.tril(k.shape[1] - q.shape[1] - window_size[0] - 1)
        mixed = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (PackedLayout(torch.tensor([5, 33, 1])), 39),
        (PackedLayout(torch.tensor([5, 33, 17]), prefix=19), 74),
        (PackedLayout(torch.tensor([5, 33, 17]), 3, torch.tensor([4, 40]), torch.tensor([0, 0, 1])), 102),
        (PackedLayout(torch.tensor([5, 3]), 0, torch.tensor([9, 4]), torch.tensor([1, 0])), 21),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 4, 18])
def test_it_says_the_same_as_rows(
    layout: PackedLayout, size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(size)
    inputs = [torch.randn(size, heads, 16) for heads in (4, 2, 2)]
    rows = layout.attend(0, inputs[0], inputs[1], inputs[2], 0.3, window)
    monkeypatch.setattr(flash_varlen, "load_flash_attn", lambda: as_flash_does)
    monkeypatch.setattr(attention, "supports_flash_varlen", lambda _: True)
    torch.testing.assert_close(
        layout.attend(0, inputs[0], inputs[1], inputs[2], 0.3, window), rows, atol=1e-5, rtol=1e-5
    )


def test_a_processor_takes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_varlen, "load_flash_attn", lambda: as_flash_does)
    assert not supports_flash_varlen(torch.zeros(1, 1, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", [None, "eager", "sdpa"])
@pytest.mark.parametrize("window", [1, 2, 5, 50])
@pytest.mark.parametrize("structure", ["plain", "prefix", "stems", "prefix and stems"])
def test_a_token_attends_to_the_last_tokens_of_its_own_sequence(
    structure: str, window: int, backend: str | None
) -> None:
    prefix = 6 if "prefix" in structure else 0
    stems, parents = (torch.tensor([4, 9]), torch.tensor([1, 0, 1])) if "stems" in structure else (None, None)
    branches = torch.tensor([5, 3, 11])
    sizes = [prefix, *(stems.tolist() if stems is not None else []), *branches.tolist()]
    starts = torch.tensor([0, *sizes]).cumsum(0)
    parts = [torch.arange(starts[i], starts[i + 1]) for i in range(len(sizes))]
    torch.manual_seed(window)
    query, key, value = (torch.randn(sum(sizes), heads, 8) for heads in (4, 2, 2))
    with use_attention_options(AttentionOptions(backend)):
        out = PackedLayout(branches, prefix, stems, parents).attend(0, query, key, value, 0.3, window)
    for branch in range(len(branches)):
        stem = [] if parents is None else [parts[1 + int(parents[branch])]]
        rows = torch.cat([parts[0], *stem, parts[len(sizes) - len(branches) + branch]])
        distance = torch.arange(len(rows))[:, None] - torch.arange(len(rows))
        mask = (distance >= 0) & (distance < window)
        q, k, v = (x[rows].transpose(0, 1) for x in (query, key, value))
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(0, 1)
        torch.testing.assert_close(out[rows], expected, atol=1e-5, rtol=1e-4)
