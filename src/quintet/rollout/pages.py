"""Memory in large pages: a cache is read and written all over, and each small page costs a look-up of its own."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

__all__ = ["zeros"]

LARGE_PAGE = 2 << 20
"""Bytes, on the processors where Linux has them."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on a CPU under Linux in large pages, where it fills some."""
    count = math.prod(shape)
    if device.type != "cpu" or count * dtype.itemsize < 2 * LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them: the memory is as good in small pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=dtype)
    start = -whole.data_ptr() % LARGE_PAGE // dtype.itemsize
    return whole[start : start + count].view(*shape)
