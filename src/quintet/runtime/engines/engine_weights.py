"""Transfer of the policy's weights to standalone engines: shared memory, a process group, or a connection."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from quintet.config.native.experiment import Experiment
from quintet.config.plan.process_layout import process_layout
from quintet.config.plan.weight_transfer import KEY, choose_weight_transfer
from quintet.errors import ConfigError
from quintet.rollout.engines.shared_weights import StagedTensors
from quintet.runtime.calls.connection import WorkerConnection
from quintet.runtime.calls.messages import RemoteCallError
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import ENGINE
from quintet.runtime.engines.staged_weights import StagedWeights
from quintet.tracking.run_processes import process_namespace
from quintet.training.parallel.broadcast_group import BroadcastGroup, GroupAddress, create_store
from quintet.training.protocols import Actor

Member = tuple[int, int]
"""Rank and process id of a worker."""
logger = logging.getLogger(__name__)


class EngineWeights:
    """The learner's weights, copied to where standalone engines load them from, and their transfer to each engine as
    `placement.weight_transfer` says.

    If only adapters are trained, the weights that they adapt are staged once and go to each worker once.
    """

    def __init__(
        self,
        config: Experiment,
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
        adapted: Actor | None = None,
    ) -> None:
        """`weights` yields the learner's weights; `adapted` is the learner if it only trains adapters."""
        self._config = config
        self._weights = weights
        self._adapted = adapted
        self._staged = StagedWeights()
        self._base = StagedWeights()
        """The weights that adapters adapt; empty if all weights are trained."""
        self._adapter_scales: Mapping[str, float] = {}
        self._with_base: set[Member] = set()
        """Workers that have the base weights."""
        self._called: set[Member] = set()
        """Workers that were called to load the staged weights."""
        self._broadcast: _Broadcast | None = None

    def connect(self, workers: Sequence[WorkerConnection]) -> None:
        """Connect the workers to which weights are broadcast. Workers that are started again later receive weights over
        their connections, as all do if one is lost while they connect.

        Raises:
            ConfigError: shared memory was requested for a worker of another machine.
        """
        transfers = [checked_transfer(self._config, worker) for worker in workers]
        members = [
            worker
            for worker, transfer in zip(workers, transfers, strict=True)
            if transfer == "process_group" and worker.lost_reason is None
        ]
        if not members:
            return
        backend = "nccl" if torch.cuda.is_available() and not self._share_devices(members) else "gloo"
        try:
            self._broadcast = _Broadcast(members, self._config.placement.join_timeout_seconds, backend)
        except (RuntimeError, RemoteCallError) as error:
            logger.warning("weights are sent over connections instead of a process group: %s", error)

    def _share_devices(self, workers: Sequence[WorkerConnection]) -> bool:
        """Return whether two workers are on the same device, which NCCL refuses."""
        layout = process_layout(self._config)
        return len({layout.devices[worker.rank] for worker in workers}) < len(workers)

    def stage(self) -> None:
        """Copy the learner's current weights, or its adapters, and with the first of these the weights that they adapt,
        which must not change. The weights of the last call remain until the next call."""
        if self._adapted is None:
            self._stage(self._weights())
            return
        if not self._base.shared_tensors:
            self._base.stage(self._adapted.base_weights())
            self._adapter_scales = self._adapted.adapter_scales()
        self._stage(self._adapted.adapters())

    def _stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self._broadcast is not None and not self._broadcast.finish():
            self._close_broadcast()
        else:
            self._with_base |= self._called
        if self._broadcast is not None and self._broadcast.has_lost_members:
            self._close_broadcast()
        self._called.clear()
        self._staged.stage(weights)
        if self._broadcast is not None:
            base = () if self._broadcast.members <= self._with_base else self._base.buffers()
            self._broadcast.prepare([*base, *self._staged.buffers()])

    def load_call(self, worker: WorkerConnection, version: int) -> RemoteCall:
        """Return the call by which a worker's engine loads the staged weights as `version`. An engine that loads them
        once more, after a restart, does so over its connection instead of a broadcast."""
        transfer, method = checked_transfer(self._config, worker), "load_weights"
        member = (worker.rank, worker.pid)
        parts = [self._staged] if member in self._with_base else [self._base, self._staged]
        self._called.add(member)
        weights: StagedTensors = [shared_tensor for part in parts for shared_tensor in part.shared_tensors]
        if self._broadcast is not None and self._broadcast.take(member):
            method = "load_broadcast_weights"
        elif transfer != "shared_memory":
            weights = {name: tensor for part in parts for name, tensor in part.tensors().items()}
        arguments = {"version": version, "weights": weights, "adapter_scales": self._adapter_scales}
        return RemoteCall(ENGINE, method, arguments)

    def close(self) -> None:
        """Release the memory."""
        self._close_broadcast()
        self._staged.close()
        self._base.close()

    def _close_broadcast(self) -> None:
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None


def checked_transfer(config: Experiment, worker: WorkerConnection) -> str:
    """Return how weights reach a worker.

    Raises:
        ConfigError: that is shared memory, and the worker is on another machine or in another container.
    """
    shares_memory = worker.host == process_namespace()
    transfer = choose_weight_transfer(config, same_node=shares_memory)
    if transfer == "shared_memory" and not shares_memory:
        message = f"{KEY} = shared_memory: {worker.name} shares no memory with the controller"
        raise ConfigError(message, key=KEY, value="shared_memory", hint=f"set {KEY}=auto")
    return transfer


class _Broadcast:
    """A broadcast group of the controller and workers, and the broadcast of the staged weights in a thread."""

    def __init__(self, workers: Sequence[WorkerConnection], timeout_seconds: float, backend: str) -> None:
        self.members = frozenset((worker.rank, worker.pid) for worker in workers)
        self._workers = workers
        self._pending: set[Member] = set()
        """Members that have not yet been called to receive the staged weights."""
        self._buffers: Sequence[Tensor] = ()
        self._running: Future[None] | None = None
        self._lock = threading.Lock()
        """Held while `_pending`, `_buffers` or `_running` change: engines are called to load by the training thread
        and, after a restart, by the rollout thread, also while the training thread stages the next weights."""
        self._thread = ThreadPoolExecutor(1, "weights")
        store = create_store(workers[0].messages.local_host, timeout_seconds)
        address = GroupAddress(store.host, store.port, len(workers) + 1, backend)
        joins = [
            worker.start(RemoteCall(ENGINE, "join_broadcast_group", {"address": address, "rank": rank}))
            for rank, worker in enumerate(workers, 1)
        ]
        self._group = BroadcastGroup(address, 0, store)
        for join in joins:
            join.finish()

    @property
    def has_lost_members(self) -> bool:
        """Whether a member has ended or cannot be reached, so that a broadcast would fail."""
        return any(worker.lost_reason is not None for worker in self._workers)

    def prepare(self, buffers: Sequence[Tensor]) -> None:
        """Expect each member to load weights that have just been staged in `buffers`."""
        with self._lock:
            self._buffers, self._pending = buffers, set(self.members)

    def take(self, member: Member) -> bool:
        """Return whether the worker is still to receive the staged weights, and count it as called. The broadcast
        starts with the first worker, and advances when all have been called."""
        with self._lock:
            if member not in self._pending or (self._running is not None and _has_failed(self._running)):
                return False
            self._pending.discard(member)
            if self._running is None:
                self._running = self._thread.submit(self._send, self._buffers)
        return True

    def _send(self, buffers: Sequence[Tensor]) -> None:
        try:
            self._group.broadcast(buffers)
        except RuntimeError:
            self._group.close()  # the other members would wait for the next bucket until the group's timeout
            raise

    def finish(self) -> bool:
        """Wait for the end of the broadcast; return False if the group is broken. If no broadcast was started, expect
        none any more: members that are called later load the weights of the last `prepare` over their connections."""
        with self._lock:
            running = self._running
            if running is None:
                self._pending.clear()
                return True
        try:
            running.result()  # other members may still be called to take part
        except RuntimeError:
            return False
        with self._lock:
            self._running = None
        return True

    def close(self) -> None:
        """Release the connections, at once or when the running broadcast ends, because all members have received it or
        one has ended: torch cannot stop it, and would wait for it here."""
        self._thread.submit(self._group.close)
        self._thread.shutdown(wait=False)


def _has_failed(future: Future[None]) -> bool:
    return future.done() and future.exception() is not None
