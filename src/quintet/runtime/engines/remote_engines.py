"""Engines in the processes of workers, as the controller sees them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch import Tensor

from quintet.config.native.experiment import Experiment
from quintet.config.plan.process_layout import process_layout
from quintet.errors import MachineError
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.engines.weight_source import WeightSource
from quintet.rollout.sampling_params import max_model_len
from quintet.runtime.calls.connection import StartedCall, WorkerConnection, WorkerLostError
from quintet.runtime.calls.messages import RemoteCallError
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import ENGINE, EngineAction, EngineReport
from quintet.runtime.calls.transport import HINT, Transport
from quintet.runtime.engines.weight_sources import PolicyWeights, RemoteWeightSource

TranslatedErrors = Callable[[], AbstractContextManager[None]]
TakeConnectedWorkers = Callable[[Collection[int]], Sequence[WorkerConnection]]
"""Returns the workers of these ranks that have connected since the last call: their processes were started again."""
logger = logging.getLogger(__name__)


class RemoteEngines:
    """The engines of all workers, colocated and standalone, and the weights that they load."""

    def __init__(
        self,
        transport: Transport,
        standalone: Sequence[WorkerConnection],
        config: Experiment,
        policy: Path,
        weights: PolicyWeights,
        take_connected_workers: TakeConnectedWorkers = lambda ranks: (),
    ) -> None:
        """Start to build engines with the model at `policy` on the workers of the transport, which the run needs, and
        on `standalone` ones, which may be started again."""
        self._build_call = RemoteCall(ENGINE, "build", {"config": config, "policy": policy})
        self._take_connected_workers = take_connected_workers
        self._max_model_len = max_model_len(config)
        self.weights = weights
        colocated = [RemoteEngine(worker, partial(transport.translated_errors, worker)) for worker in transport.workers]
        self._engines = {engine.worker.rank: engine for engine in (*colocated, *map(RemoteEngine, standalone))}
        self._builds = _one_per_device(list(self._engines.values()), process_layout(config).devices)
        for engine in self._builds[0] if self._builds else ():
            engine.start_build(self._build_call)

    def engines(self) -> list[RestartingEngine]:
        """Return the engines by rank of their worker. Engines on the same device are built one after another, since
        vLLM measures the free memory of its device when it starts. A standalone engine whose worker is lost meanwhile
        is dead until the worker has been started again.

        Raises:
            MachineError: a worker cannot build its engine, or is lost although the run needs it.
        """
        for index, builds in enumerate(self._builds):
            for engine in builds if index else ():
                engine.start_build(self._build_call)
            for engine in builds:
                self._finish_first_build(engine)
        built = [engine for engine in self._engines.values() if engine.max_model_len]
        self.weights.connect([engine.worker for engine in built])
        return [
            RestartingEngine(
                engine.rebuilt, self.weights, is_available=partial(self._is_available, engine), engine=engine
            )
            for engine in built
        ]

    def _finish_first_build(self, engine: RemoteEngine) -> None:
        try:
            engine.finish_build()
        except WorkerLostError as error:
            logger.warning("%s; its engine is missing until the process has been started again", error)
            engine.max_model_len = self._max_model_len
        except RemoteCallError as error:
            raise MachineError(f"{engine.worker.name} cannot build its engine: {error}", HINT) from error

    def _is_available(self, engine: RemoteEngine) -> bool:
        """Return whether a dead engine can be replaced now. Start to build it if its worker was started again, or could
        not build it; no other engine is changed, since another thread may call it."""
        if engine.worker.lost_reason is not None:
            for worker in self._take_connected_workers([engine.worker.rank]):
                engine.use(worker)
        if engine.needs_build:
            engine.start_build(self._build_call)
        return engine.is_available

    def close(self) -> None:
        """Release the memory of the weights."""
        self.weights.close()


def _one_per_device(engines: Sequence[RemoteEngine], devices: Sequence[int]) -> list[list[RemoteEngine]]:
    """Divide engines into lists, each with at most one of every device."""
    lists: list[list[RemoteEngine]] = []
    counts: Counter[int] = Counter()
    for engine in engines:
        device = devices[engine.worker.rank]
        if counts[device] == len(lists):
            lists.append([])
        lists[counts[device]].append(engine)
        counts[device] += 1
    return lists


class RemoteEngine:
    """See `Engine` and `ConcurrentEngine`: the engine of a worker.

    Calls are executed in the order in which they are sent. The result of a call that returns no responses, or of a
    started step, is taken later, so that several engines compute at the same time.
    """

    def __init__(self, worker: WorkerConnection, translated_errors: TranslatedErrors = nullcontext) -> None:
        """`translated_errors` raises errors of the worker's calls as the errors that end the run, if it needs the
        worker."""
        self.worker = worker
        self.max_model_len = 0
        self.weight_version = 0
        self._translated_errors = translated_errors
        self._has_died = False
        """Whether the engine has died, and its worker lives."""
        self._is_built = False
        """Whether the worker's process has built the engine, which may have died since."""
        self._started: StartedCall | None = None
        """The last call, if its result has not been taken."""
        self._method = ""
        """Method of the last call."""
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
        return self.worker.fileno()

    @property
    def is_available(self) -> bool:
        """Whether `rebuilt` returns without waiting for another process."""
        if self.worker.lost_reason is not None:
            return False
        return not self._is_building or bool(wait([self.fileno()], 0))

    @property
    def _is_building(self) -> bool:
        return self._started is not None and self._method == "build"

    @property
    def needs_build(self) -> bool:
        """Whether the worker has not built the engine and does not build it now."""
        return not self._is_built and not self._is_building and self.worker.lost_reason is None

    def use(self, worker: WorkerConnection) -> None:
        """Use the worker whose process was started in place of a lost one."""
        self.worker, self._started, self._is_built, self._has_died = worker, None, False, False

    def start_build(self, call: RemoteCall) -> None:
        """Start to build the engine in the worker; `finish_build` raises errors."""
        self._requests.clear()
        with suppress(WorkerLostError):
            self._start(call)

    def finish_build(self) -> None:
        """Wait until the engine is built.

        Raises:
            MachineError: the worker cannot build it, by an error of the user or the machine.
            RemoteCallError: the worker cannot build it.
            WorkerLostError: the worker is lost.
        """
        if self._is_built:
            return
        if not self._is_building:
            raise self.worker.lost_error()
        self.max_model_len = int(self._take_result())
        self._is_built = True

    def rebuilt(self) -> RemoteEngine:
        """Return this engine, after it was built again if it had died.

        Raises:
            EngineError: the worker cannot build it.
            WorkerLostError: the worker is lost.
        """
        try:
            self.finish_build()
            if self._has_died:
                self._call("rebuild")
        except RemoteCallError as error:
            raise EngineError(str(error)) from error
        self._has_died = False
        return self

    def add_request(self, request: Request) -> None:
        if len(request.prompt) >= self.max_model_len:
            raise ValueError(f"the prompt has {len(request.prompt)} tokens, the context {self.max_model_len}")
        self._requests.append(request)
        self._unfinished.add(request.id)

    def finish_calls(self) -> None:
        """See `ConcurrentEngine.finish_calls`; raises as `finish` does."""
        if self._method != "step":
            self.finish()

    def start_step(self) -> None:
        if self._started is None:
            requests, self._requests = self._requests, []
            self._start_call("step", requests=requests)

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
        return aborted + [
            Generation(request_id, (), (), FinishReason.ABORT, self.weight_version) for request_id in unsent
        ]

    def load_weights(self, version: int, weights: WeightSource) -> None:
        """See `Engine.load_weights`: the engine loads what the source stages, gathers or has. A failure is raised by
        the next call."""
        self.finish()
        if isinstance(weights, RemoteWeightSource):
            self._start(weights.load_call(self.worker, version))
        else:
            self._start_call("load_weights", version=version, weights=dict(weights.tensors()), adapter_scales={})
        self.weight_version = version

    def weights(self) -> Iterable[tuple[str, Tensor]] | None:
        """See `ReadableEngine.weights`: received from the worker."""
        self.finish()
        self._start_call("weights")
        weights = self._take_result()
        return None if weights is None else weights.items()

    def reset_prefix_cache(self) -> None:
        self._control("reset_prefix_cache")

    def sleep(self) -> None:
        self._control("sleep")

    def wake_up(self) -> None:
        self._control("wake_up")

    def _control(self, action: EngineAction) -> None:
        """Start a call without arguments; a failure is raised by the next call."""
        self.finish()
        self._start_call("control", action=action)

    def close(self) -> None:
        """See `Engine.close`: the worker releases its engine when it builds another one or ends."""

    def finish(self) -> None:
        """Wait for the result of the started call, if there is one.

        Raises:
            EngineError: the engine has died.
            WorkerLostError: the worker is lost.
        """
        if self._started is not None:
            self._receive(self._take_result())
        if self._failure is not None:
            cause = self._failure
            self._failure = None
            self._has_died = True
            self._drop_requests()
            raise EngineError(cause)

    def _receive(self, report: EngineReport | None) -> None:
        if report is None:
            return
        self._generations += report.generations
        self._unfinished.difference_update(generation.id for generation in report.generations)
        if report.failure is not None:
            failure = report.failure
            self._failure = f"{self.worker.name}: {failure.error_type}: {failure.message}"

    def _drop_requests(self) -> None:
        self._unfinished.clear()
        self._requests.clear()
        self._generations.clear()

    def _call(self, method: str, **arguments: Any) -> None:
        self.finish()
        self._start_call(method, **arguments)
        self.finish()

    def _start_call(self, method: str, **arguments: Any) -> None:
        self._start(RemoteCall(ENGINE, method, arguments))

    def _start(self, call: RemoteCall) -> None:
        with self._dropped_requests():
            self._started = self.worker.start(call)
        self._method = call.method

    def _take_result(self) -> Any:
        started, self._started = self._started, None
        with self._dropped_requests():
            return None if started is None else started.finish()

    @contextmanager
    def _dropped_requests(self) -> Iterator[None]:
        """Drop all requests if the worker is lost."""
        try:
            with self._translated_errors():
                yield
        except WorkerLostError:
            self._drop_requests()
            raise
