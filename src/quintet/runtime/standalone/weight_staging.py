"""Weights of a learner in host memory, from where components of other processes load them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from quintet.config.native.experiment import Experiment
from quintet.config.plan.weight_transfer import KEY, choose_weight_transfer
from quintet.errors import ConfigError
from quintet.rollout.engines.shared_weights import SharedTensor, SharedWeights, SharedWeightsReader
from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.standalone.listener import StandaloneWorker
from quintet.training.parallel.broadcast_group import BroadcastGroup, GroupAddress, create_store
from quintet.training.parallel.rendezvous import process_namespace

if TYPE_CHECKING:
    from torch import Tensor


class WeightStaging:
    """Copies a learner's weights once, so that each component loads them when it has finished its other calls, while
    the others continue and the learner is free."""

    def __init__(self, config: Experiment, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        """`weights` yields the learner's weights: full tensors under Hugging Face names."""
        self._config = config
        self._weights = weights
        self._shared = SharedWeights()
        self._reader = SharedWeightsReader()
        self._staged: Sequence[SharedTensor] = ()
        self._broadcast: _Broadcast | None = None

    def connect(self, target: str, workers: Sequence[StandaloneWorker]) -> None:
        """Connect the component `target` of the workers to which weights are broadcast; call it again if they change.

        Raises:
            ConfigError: shared memory was requested for a worker of another machine.
        """
        transfers = [checked_transfer(self._config, worker) for worker in workers]
        members = [each for each, transfer in zip(workers, transfers, strict=True) if transfer == "process_group"]
        self._close_broadcast()
        if members:
            self._broadcast = _Broadcast(target, members, self._config.placement.join_timeout_seconds)

    def stage(self) -> None:
        """Copy the learner's current weights over those of the last call, which must have been loaded."""
        if self._broadcast is not None and not self._broadcast.finish():
            self._close_broadcast()
        self._staged = self._shared.write(self._weights())
        if self._broadcast is not None:
            self._broadcast.prepare()

    def load_call(self, target: str, worker: StandaloneWorker, version: int) -> RemoteCall:
        """Return the call by which the component `target` of a worker loads the staged weights as `version`. A worker
        that loads them once more, after a restart, does so over its connection instead of a broadcast."""
        arguments: dict[str, Any] = {"version": version, "weights": self._staged}
        if checked_transfer(self._config, worker) == "shared_memory":
            return RemoteCall(target, "load_shared_weights", arguments)
        if self._broadcast is not None and self._broadcast.take(worker):
            self._broadcast.start(list(self._reader.buffers(self._staged)))
            return RemoteCall(target, "load_broadcast_weights", arguments)
        return RemoteCall(target, "load_weights", arguments | {"weights": dict(self._reader.read(self._staged))})

    def close(self) -> None:
        """Release the memory."""
        self._close_broadcast()
        self._shared.close()

    def _close_broadcast(self) -> None:
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None


def checked_transfer(config: Experiment, worker: StandaloneWorker) -> str:
    """Return how weights reach a worker.

    Raises:
        ConfigError: that is shared memory, and the worker is on another machine or in another container.
    """
    shares_memory = worker.host == process_namespace()
    transfer = choose_weight_transfer(config, same_node=shares_memory)
    if transfer == "shared_memory" and not shares_memory:
        message = f"{KEY} = shared_memory: rank {worker.rank} shares no memory with the controller"
        raise ConfigError(message, key=KEY, value="shared_memory", hint=f"set {KEY}=auto")
    return transfer


class _Broadcast:
    """A broadcast group of the controller and workers, and the broadcast of the staged weights in a thread."""

    def __init__(self, target: str, workers: Sequence[StandaloneWorker], timeout_seconds: float) -> None:
        self._ranks = frozenset(worker.rank for worker in workers)
        self._pending: set[int] = set()
        """Workers that have not yet been called to receive the staged weights."""
        self._running: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "weights")
        store = create_store(workers[0].messages.local_host, timeout_seconds)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        address = GroupAddress(store.host, store.port, len(workers) + 1, backend)
        for rank, worker in enumerate(workers, 1):
            worker.start(RemoteCall(target, "join_broadcast_group", {"address": address, "rank": rank}))
        self._group = BroadcastGroup(address, 0, store)
        for worker in workers:
            worker.finish()

    def prepare(self) -> None:
        """Expect each worker to load weights that have just been staged."""
        self._pending = set(self._ranks)

    def take(self, worker: StandaloneWorker) -> bool:
        """Return whether the worker is still to receive the staged weights, and count it as called."""
        is_pending = worker.rank in self._pending
        self._pending.discard(worker.rank)
        return is_pending

    def start(self, buffers: Sequence[Tensor]) -> None:
        """Start the broadcast, unless it runs; it advances when all workers have been called."""
        if self._running is None:
            self._running = self._thread.submit(self._group.broadcast, buffers)

    def finish(self) -> bool:
        """Wait for the end of the broadcast; return False if the group is broken."""
        running, self._running = self._running, None
        try:
            if running is not None:
                running.result()
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Close the connections, which ends a running broadcast."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._group.close()
