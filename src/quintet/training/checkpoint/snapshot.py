"""Copies of tensors in host memory, from which checkpoints are written while training continues."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostBuffers:
    """Buffers for copies of tensors, reused by each save because first writes to new memory are slow. The previous
    copies must have been written to disk before."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], owner: str) -> dict[str, Tensor]:
        """Return copies of the tensors by name; `owner` separates the buffers of several learners. Tied tensors are
        copied once, and frozen ones on the CPU are not copied because they never change."""
        copies: dict[int, Tensor] = {}
        for name, tensor in tensors.items():
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copy(tensor, f"{owner}.{name}")
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return {name: copies[id(tensor)] for name, tensor in tensors.items()}

    def _copy(self, tensor: Tensor, key: str) -> Tensor:
        source = tensor.detach()
        if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and not tensor.is_cuda:
            return source
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(source, non_blocking=source.is_cuda)
