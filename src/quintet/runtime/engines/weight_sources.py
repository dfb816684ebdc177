"""Weight sync: how the learner's new weights replace those of engines on several ranks and in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from quintet import trace
from quintet.config.native.experiment import Experiment
from quintet.rollout.engines.weight_source import WeightSource
from quintet.runtime.calls.connection import WorkerConnection
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import ACTOR, ENGINE
from quintet.runtime.calls.transport import Transport
from quintet.runtime.engines.engine_group import RoutedEngines
from quintet.runtime.engines.engine_weights import EngineWeights
from quintet.runtime.groups import PolicyGroup


@runtime_checkable
class RemoteWeightSource(WeightSource, Protocol):
    """A source whose weights reach engines in other processes."""

    def load_call(self, worker: WorkerConnection, version: int) -> RemoteCall:
        """Return the call by which a worker's engine loads the weights as `version`."""


class PolicyWeights:
    """See `RemoteWeightSource`: the weights of a run's policy, by whichever way they reach an engine.

    All ranks with learners gather the tensors together, and their engines load them at the same time, unless they
    compute with the learner's module. A standalone engine loads the weights that `stage` has staged.
    """

    def __init__(self, policy: PolicyGroup, transport: Transport, staged: EngineWeights) -> None:
        """`transport` calls the ranks with learners."""
        self._policy = policy
        self._transport = transport
        self._staged = staged
        self._has_standalone_engines = False
        self._loading: set[int] = set()
        """Ranks that were called to load the weights that are gathered next."""
        self._gathered: Iterator[tuple[str, Tensor]] | None = None
        """Tensors of the load in progress that rank 0 has not read."""

    def connect(self, workers: Sequence[WorkerConnection]) -> None:
        """Prepare for engines of these workers; see `EngineWeights.connect`."""
        standalone = [worker for worker in workers if worker not in self._transport.workers]
        self._has_standalone_engines = bool(standalone)
        self._staged.connect(standalone)

    def stage(self) -> None:
        """Copy the weights to where standalone engines load them from. The learner must not be updated until the
        engines of the ranks have been called to load them."""
        if self._has_standalone_engines:
            self._staged.stage()

    @property
    def module(self) -> nn.Module | None:
        return self._policy.actor.model if self._policy.has_full_weights else None

    def load_call(self, worker: WorkerConnection, version: int) -> RemoteCall:
        """See `RemoteWeightSource.load_call`: a rank with learners waits in this call until `tensors` or `finish` is
        called."""
        if worker not in self._transport.workers:
            return self._staged.load_call(worker, version)
        self._loading.add(worker.rank)
        return RemoteCall(ENGINE, "load_gathered_weights", {"version": version})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource.tensors`. Starts a collective: all ranks with learners gather each tensor, and wait
        until all are read here, or `finish` is called."""
        self._read_rest()
        loading, self._loading = self._loading, set()
        self._gathered = self._transport.broadcast(RemoteCall(ACTOR, "weights"), except_ranks=loading)
        return self._gathered

    def finish(self) -> None:
        if self._loading and self.module is None:
            self.tensors()
        self._loading.clear()
        self._read_rest()

    def _read_rest(self) -> None:
        gathered, self._gathered = self._gathered, None
        for _ in gathered or ():
            pass

    def close(self) -> None:
        """Release the memory of staged weights."""
        self._staged.close()


class WeightSync:
    """Puts engines to sleep while the policy is trained, and wakes them up with its new weights."""

    def __init__(self, weights: PolicyWeights, engines: RoutedEngines, config: Experiment) -> None:
        self._weights = weights
        self._engines = engines
        options = config.rollout.engine_options
        self._should_sleep = options.sleep_between_steps or options.offload
        self._is_asleep = False

    def sleep(self) -> None:
        """If configured, free the engines' caches and weights until the next `sync`."""
        if self._should_sleep:
            self._engines.sleep()
            self._is_asleep = True

    def sync(self, version: int) -> None:
        """Load the learner's weights into the engines, as `version`: the number of the step that trained them."""
        with trace.span("stage_weights"):
            self._weights.stage()
        if self._is_asleep:
            with trace.span("wake_up"):
                self._engines.wake_up()
            self._is_asleep = False
        self._engines.load_weights(version, self._weights)
