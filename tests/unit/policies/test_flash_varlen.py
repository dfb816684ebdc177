"""If these fail, tokens on a GPU with flash-attn attend to other sequences, or not to their prompt."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.policies import attention, flash_varlen
from quintet.policies.attention import PackedLayout
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
def test_it_says_the_same_as_rows(layout: PackedLayout, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(size)
    inputs = [torch.randn(size, heads, 16) for heads in (4, 2, 2)]
    rows = layout.attend(0, inputs[0], inputs[1], inputs[2], 0.3)
    monkeypatch.setattr(flash_varlen, "load_flash_attn", lambda: as_flash_does)
    monkeypatch.setattr(attention, "supports_flash_varlen", lambda _: True)
    torch.testing.assert_close(layout.attend(0, inputs[0], inputs[1], inputs[2], 0.3), rows, atol=1e-5, rtol=1e-5)


def test_a_processor_takes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_varlen, "load_flash_attn", lambda: as_flash_does)
    assert not supports_flash_varlen(torch.zeros(1, 1, 16, dtype=torch.bfloat16))
