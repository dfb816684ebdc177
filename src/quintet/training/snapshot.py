"""Copies of tensors in main memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["HostMemory"]


class HostMemory:
    """Buffers that copies are put into, the same ones at each save: memory that the system hands out anew is slow to
    write. What was copied there before must have been written by then."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], place: str) -> dict[str, Tensor]:
        """The tensors as they are now, by the same names; `place` keeps those of several holders apart. One that is
        there twice is copied once, and frozen ones, which nothing changes, aren't copied at all."""
        copies: dict[int, Tensor] = {}
        for name, tensor in tensors.items():
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copied(tensor, f"{place}.{name}")
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return {name: copies[id(tensor)] for name, tensor in tensors.items()}

    def _copied(self, tensor: Tensor, key: str) -> Tensor:
        source = tensor.detach()
        if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and not tensor.is_cuda:
            return source
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(source, non_blocking=source.is_cuda)
