"""Weights of a learner in host memory, from where components of other processes load them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from quintet.rollout.engines.shared_weights import SharedTensor, SharedWeights, SharedWeightsReader
from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.standalone.listener import StandaloneWorker
from quintet.tracking.run_processes import process_namespace

if TYPE_CHECKING:
    from torch import Tensor


class WeightStaging:
    """Copies a learner's weights once, so that each component loads them when it has finished its other calls, while
    the others continue and the learner is free."""

    def __init__(self, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        """`weights` yields the learner's weights: full tensors under Hugging Face names."""
        self._weights = weights
        self._buffers = (SharedWeights(), SharedWeights())
        """Written in turns: components may still load the weights of the last call."""
        self._reader = SharedWeightsReader()
        self._staged: Sequence[SharedTensor] = ()

    def stage(self) -> None:
        """Copy the learner's current weights. Those of the last call remain until the next one."""
        self._buffers = self._buffers[::-1]
        self._staged = self._buffers[0].write(self._weights())

    def load_call(self, target: str, worker: StandaloneWorker, version: int) -> RemoteCall:
        """Return the call by which the component `target` of a worker loads the staged weights as `version`: from
        shared memory on this node, from the connection on other nodes."""
        if worker.host == process_namespace():
            return RemoteCall(target, "load_shared_weights", {"version": version, "weights": self._staged})
        weights = dict(self._reader.read(self._staged))
        return RemoteCall(target, "load_weights", {"version": version, "weights": weights})

    def close(self) -> None:
        """Release the memory."""
        for buffer in self._buffers:
            buffer.close()
