"""Engines of standalone workers, as the controller sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.native.experiment import Experiment
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.remote_interface import STANDALONE_ENGINE, EngineAction
from quintet.runtime.standalone.listener import StandaloneWorker
from quintet.runtime.standalone.weight_staging import WeightStaging

if TYPE_CHECKING:
    from torch import Tensor


class StandaloneEngines:
    """The engines of all standalone workers, and the weights that they load."""

    def __init__(
        self,
        workers: Sequence[StandaloneWorker],
        config: Experiment,
        policy: Path,
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:
        """Start to build engines with the model at `policy` on the workers; `weights` yields those of the learner."""
        self._config = config
        self._policy = policy
        self.staging = WeightStaging(config, weights)
        self._engines = [StandaloneEngine(self, worker) for worker in workers]
        for engine in self._engines:
            engine.start_build()

    def engines(self) -> list[RestartingEngine]:
        """Return the engines by rank of their worker."""
        for engine in self._engines:
            engine.finish_build()
        self.staging.connect(STANDALONE_ENGINE, [engine.worker for engine in self._engines])
        return [RestartingEngine(partial(self._rebuild, engine), tuple) for engine in self._engines]

    def build_call(self) -> RemoteCall:
        """Return the call that builds an engine."""
        return RemoteCall(STANDALONE_ENGINE, "build", {"config": self._config, "policy": self._policy})

    def _rebuild(self, engine: StandaloneEngine) -> StandaloneEngine:
        """Return the engine, after replacing it if it has died.

        Raises:
            EngineError: it dies while it is built.
        """
        if engine.has_died:
            engine.rebuild()
        return engine

    def stage(self) -> None:
        """Copy the learner's current weights to where the engines load them from."""
        if self._engines:
            self.finish()
            self.staging.stage()

    def finish(self) -> None:
        """Wait until the engines have executed their calls.

        Raises:
            EngineError: an engine has died.
        """
        for engine in self._engines:
            engine.finish()

    def close(self) -> None:
        """Release the memory of the weights."""
        self.staging.close()


class StandaloneEngine:
    """See `Engine` and `WaitableEngine`: the engine of a standalone worker.

    Calls are executed in the order in which they are sent. The result of a step or of `load_weights` is taken later, so
    that several engines compute at the same time.
    """

    def __init__(self, group: StandaloneEngines, worker: StandaloneWorker) -> None:
        self.worker = worker
        self.max_model_len = 0
        self.weight_version = 0
        self.has_died = False
        self._group = group
        self._started: str | None = None
        """Method whose result has not been taken."""
        self._failure: str | None = None
        self._requests: list[Request] = []
        """Requests that have not been sent."""
        self._unfinished: set[int] = set()
        self._generations: list[Generation] = []
        """Responses that have been received."""

    @property
    def busy(self) -> bool:
        return bool(self._unfinished or self._generations or self._failure)

    def fileno(self) -> int:
        """See `WaitableEngine.fileno`."""
        return self.worker.fileno()

    def start_build(self) -> None:
        """Start to build the engine in the worker."""
        self.worker.start(self._group.build_call())

    def finish_build(self) -> None:
        """Wait until the engine is built.

        Raises:
            MachineError: the worker cannot build it.
        """
        self.max_model_len = int(self.worker.finish())

    def rebuild(self) -> None:
        """Replace the dead engine in the worker.

        Raises:
            EngineError: the new one dies, too.
        """
        self.has_died = False
        self._call("rebuild")

    def add_request(self, request: Request) -> None:
        if len(request.prompt) >= self.max_model_len:
            raise ValueError(f"the prompt has {len(request.prompt)} tokens, the context {self.max_model_len}")
        self._requests.append(request)
        self._unfinished.add(request.id)

    def start_step(self) -> None:
        """See `ConcurrentEngine.start_step`."""
        if self._started is None:
            requests, self._requests = self._requests, []
            self._start(RemoteCall(STANDALONE_ENGINE, "step", {"requests": requests}))

    def step(self) -> list[Generation]:
        self.start_step()
        self.finish()
        generations, self._generations = self._generations, []
        return generations

    def abort(self, ids: Collection[int]) -> list[Generation]:
        unsent = [request.id for request in self._requests if request.id in ids]
        self._requests = [request for request in self._requests if request.id not in ids]
        self._unfinished.difference_update(unsent)
        if sent := sorted(self._unfinished.intersection(ids)):
            self._call("abort", ids=sent)
        aborted = [generation for generation in self._generations if generation.id in ids]
        self._generations = [generation for generation in self._generations if generation.id not in ids]
        return aborted + [Generation(each, (), (), FinishReason.ABORT, self.weight_version) for each in unsent]

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load_weights`: the engine loads the staged weights of its group, so `weights` are not read. A
        failure is raised by the next call."""
        self.finish()
        self._start(self._group.staging.load_call(STANDALONE_ENGINE, self.worker, version))
        self.weight_version = version

    def weights(self) -> Iterable[tuple[str, Tensor]] | None:
        """See `ReadableEngine.weights`: received from the worker."""
        self.finish()
        weights = self.worker.call(RemoteCall(STANDALONE_ENGINE, "weights"))
        return None if weights is None else weights.items()

    def reset_prefix_cache(self) -> None:
        self._control("reset_prefix_cache")

    def sleep(self) -> None:
        self._control("sleep")

    def wake_up(self) -> None:
        self._control("wake_up")

    def _control(self, action: EngineAction) -> None:
        self._call("control", action=action)

    def close(self) -> None:
        """See `Engine.close`: the worker releases its engine when it ends."""

    def finish(self) -> None:
        """Wait for the result of the started call, if there is one.

        Raises:
            EngineError: the engine has died.
        """
        if self._started is not None:
            self._started = None
            report = self.worker.finish()
            if report is not None:
                self._generations += report.generations
                self._unfinished.difference_update(generation.id for generation in report.generations)
                if report.failure is not None:
                    self._failure = f"{report.failure.error_type}: {report.failure.message}"
        self._raise_failure()

    def _call(self, method: str, **arguments: Any) -> None:
        self.finish()
        self._start(RemoteCall(STANDALONE_ENGINE, method, arguments))
        self.finish()

    def _start(self, call: RemoteCall) -> None:
        self.worker.start(call)
        self._started = call.method

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure, self.has_died = self._failure, None, True
            self._unfinished.clear()
            self._requests.clear()
            self._generations.clear()
            raise EngineError(failure)
