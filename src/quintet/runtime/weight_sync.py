"""Weight sync: the learner's new weights replace the engines' after every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quintet import trace
from quintet.config.native.experiment import Experiment
from quintet.runtime.groups import EngineGroup, PolicyGroup
from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.remote_engines import RemoteEngines
from quintet.runtime.standalone.connection import WorkerConnection
from quintet.runtime.standalone.engines import StandaloneEngines
from quintet.runtime.weight_sources import GatheredWeights

if TYPE_CHECKING:
    from torch import Tensor


class PolicyWeights(GatheredWeights):
    """See `StagedWeightSource`: the weights of a run's policy, by whichever way they reach an engine.

    An engine on rank 0 computes with the learner's module, or gathers the tensors together with all ranks, whose
    engines load them at the same time. A standalone engine loads what `stage` has staged.
    """

    def __init__(self, policy: PolicyGroup, remote: RemoteEngines, standalone: StandaloneEngines | None = None) -> None:
        super().__init__(policy)
        self._remote = remote
        self._standalone = standalone
        self._version = 0

    def stage(self, version: int) -> None:
        """Copy the weights to where standalone engines load them from. The learner must not be updated until the
        engines of the ranks have loaded them as `version`."""
        self._version = version
        if self._standalone is not None and self._standalone.has_engines:
            self._standalone.weights.stage()

    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        return self._remote.gather_weights(self._version)

    def load_call(self, worker: WorkerConnection, version: int) -> RemoteCall:
        """
        Raises:
            ValueError: the run has no standalone engines.
        """
        if self._standalone is None:
            raise ValueError("weights were not staged, since the run has no standalone engines")
        return self._standalone.weights.load_call(worker, version)


class WeightSync:
    """Puts engines to sleep while the policy is trained, and wakes them up with its new weights."""

    def __init__(self, weights: PolicyWeights, engines: EngineGroup, config: Experiment) -> None:
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
            self._weights.stage(version)
        if self._is_asleep:
            with trace.span("wake_up"):
                self._engines.wake_up()
            self._is_asleep = False
        self._engines.load_weights(version, self._weights)
