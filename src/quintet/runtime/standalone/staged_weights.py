"""The policy's weights on their way to standalone workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from quintet.rollout.engines.shared_weights import SharedTensor, SharedWeights, SharedWeightsReader, StagedTensors
from quintet.runtime.standalone.listener import StandaloneWorker
from quintet.tracking.run_processes import process_namespace

if TYPE_CHECKING:
    from torch import Tensor


class StagedWeights:
    """A copy of the weights in shared memory, from where the workers of this machine load it. The workers of other
    machines receive it as tensors. Each worker loads it when it has finished its other calls, while the others continue
    and the learner is free."""

    def __init__(self) -> None:
        self._buffers = (SharedWeights(), SharedWeights())
        """Written in turns: workers may still load the weights of the last call."""
        self._reader = SharedWeightsReader()
        self._tensors: list[SharedTensor] = []

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights. Those of the last call remain until the next one."""
        self._buffers = self._buffers[::-1]
        self._tensors = self._buffers[0].write(weights)

    def for_worker(self, worker: StandaloneWorker) -> StagedTensors:
        """Return what is sent to a worker for the weights."""
        return self._tensors if worker.host == process_namespace() else dict(self._reader.map(self._tensors))

    def close(self) -> None:
        """Release the memory."""
        for buffer in self._buffers:
            buffer.close()
