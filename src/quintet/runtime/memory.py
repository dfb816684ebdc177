"""Memory allocator of this process."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Option numbers of glibc's mallopt(3)."""


def keep_freed_memory() -> None:
    """Configure glibc to keep the large blocks that tensors free instead of returning each to the kernel.

    An update allocates and frees the same blocks again and again, and the kernel would clear them each time: a quarter
    of the time of an update on a CPU. Does nothing on other systems.
    """
    if _has_glibc():
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def use_one_arena() -> None:
    """Configure glibc to give later threads its main arena: `return_freed_memory` cannot shrink others."""
    if _has_glibc():
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return free memory of glibc to the kernel. Does nothing on other systems."""
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _has_glibc() -> bool:
    return sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "malloc_trim")
