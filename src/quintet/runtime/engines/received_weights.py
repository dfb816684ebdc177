"""The policy's weights in a standalone worker: read from shared memory or a message, or received by a broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from quintet.policies.lora import BaseWeights
from quintet.rollout.engines.shared_weights import SharedTensor, SharedWeightsReader, StagedTensors
from quintet.training.parallel.broadcast_group import BroadcastGroup

if TYPE_CHECKING:
    from torch import Tensor


class ReceivedWeights:
    """Reads weights from shared memory, from a message, or from the process group over which they are broadcast.

    With the scales of adapters, by layer, the weights are adapters and, in the first load, the weights that these
    adapt; see `BaseWeights`.
    """

    def __init__(self) -> None:
        self._shared = SharedWeightsReader()
        self._base = BaseWeights()
        self._group: BroadcastGroup | None = None
        self._memory = SharedWeightsReader()
        """Memory that receives what is broadcast, in the layout of the shared memory."""

    def read(self, weights: StagedTensors, adapter_scales: Mapping[str, float]) -> Iterable[tuple[str, Tensor]]:
        """Return full tensors, which are valid until the controller stages the next ones."""
        return self._merged(self._shared.read(weights), adapter_scales)

    def join(self, group: BroadcastGroup) -> None:
        """Receive over this group from now on."""
        self._group = group
        self._memory = _empty_memory(group.device)

    def receive(
        self, weights: Sequence[SharedTensor], adapter_scales: Mapping[str, float]
    ) -> Iterator[tuple[str, Tensor]]:
        """Receive full tensors, which are valid until the next call. All are received before the first one is read,
        since the other members wait for this one, whatever its engine does. Memory of a GPU is released at the end.

        Raises:
            ValueError: no group was joined.
            RuntimeError: the connection to another process broke.
        """
        if self._group is None:
            raise ValueError("weights were broadcast before the process group was joined")
        self._group.broadcast(self._memory.buffers(weights))
        return self._received(self._group, weights, adapter_scales)

    def _received(
        self, group: BroadcastGroup, weights: Sequence[SharedTensor], adapter_scales: Mapping[str, float]
    ) -> Iterator[tuple[str, Tensor]]:
        yield from self._merged(self._memory.read(weights), adapter_scales)
        if group.device.type != "cpu":
            self._memory = _empty_memory(group.device)

    def _merged(
        self, weights: Iterable[tuple[str, Tensor]], adapter_scales: Mapping[str, float]
    ) -> Iterable[tuple[str, Tensor]]:
        return self._base.merge(weights, adapter_scales) if adapter_scales else weights


def _empty_memory(device: torch.device) -> SharedWeightsReader:
    return SharedWeightsReader(lambda _, size: torch.empty(size, dtype=torch.uint8, device=device))
