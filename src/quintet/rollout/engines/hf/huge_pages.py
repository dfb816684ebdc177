"""Zero tensors in huge pages: a KV cache is accessed all over, and each small page costs a TLB entry."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
"""Size of a huge page in bytes (x86-64 and arm64 Linux)."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros, on a CPU under Linux in huge pages if it fills at least two."""
    count = math.prod(shape)
    if device.type != "cpu" or count * dtype.itemsize < 2 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # kernels without huge pages: small pages work as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=dtype)
    start = -buffer.data_ptr() % HUGE_PAGE // dtype.itemsize
    return buffer[start : start + count].view(*shape)
