"""The policy's weights on their way to standalone workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from quintet.runtime.remote_interface import SharedTensor, StagedTensors
from quintet.runtime.standalone.listener import StandaloneWorker
from quintet.runtime.standalone.shared_weights import SharedWeights, SharedWeightsReader
from quintet.training.parallel.rendezvous import process_namespace

if TYPE_CHECKING:
    from torch import Tensor


class StagedWeights:
    """A copy of the weights in shared memory, from where the workers of this machine load it. The workers of other
    machines receive it as tensors."""

    def __init__(self) -> None:
        self._shared = SharedWeights()
        self._reader = SharedWeightsReader()
        self._tensors: list[SharedTensor] = []

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights, over those of the last call: no worker may still be loading them."""
        self._tensors = self._shared.write(weights)

    def for_worker(self, worker: StandaloneWorker) -> StagedTensors:
        """Return what is sent to a worker for the weights."""
        if worker.host == process_namespace():
            return self._tensors
        return dict(self._reader.read(self._tensors))

    def close(self) -> None:
        """Release the memory."""
        self._shared.close()
