"""A copy of the policy's weights in shared memory."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quintet.rollout.engines.shared_weights import SharedTensor, SharedWeights, SharedWeightsReader, StagedTensors
from quintet.runtime.calls.connection import WorkerConnection
from quintet.tracking.run_processes import process_namespace


class StagedWeights:
    """A copy of the weights in shared memory, from where the workers of this machine load it. The workers of other
    machines receive it as tensors. Each worker loads it when it has finished its other calls, while the others continue
    and the learner is free."""

    def __init__(self, *, num_buffers: int = 2) -> None:
        """Create the buffers; one suffices if all workers load the weights before the next call of `stage`."""
        self._buffers = tuple(SharedWeights() for _ in range(num_buffers))
        """Written in turns: workers may still load the weights of the last call."""
        self._reader = SharedWeightsReader()
        self.shared_tensors: list[SharedTensor] = []
        """Where the weights of the last call of `stage` are."""

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights. The weights of the last call remain until the next call."""
        self._buffers = self._buffers[::-1]
        self.shared_tensors = self._buffers[0].write(weights)

    def for_worker(self, worker: WorkerConnection) -> StagedTensors:
        """Return the weights as they are sent to a worker: descriptors of shared memory on this machine, otherwise
        tensors."""
        return self.shared_tensors if worker.host == process_namespace() else self.tensors()

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights, in shared memory, by name."""
        return dict(self._reader.map(self.shared_tensors))

    def buffers(self) -> list[Tensor]:
        """Return the memory of the weights, as `SharedWeightsReader.buffers` yields it in other processes."""
        return list(self._reader.buffers(self.shared_tensors))

    def close(self) -> None:
        """Release the memory."""
        for buffer in self._buffers:
            buffer.close()
