"""Engines on other ranks, as the controller sees them.

Every step is one call that all ranks execute at the same time, together with the step of the engine on rank 0. So the
order of results does not depend on timing, and a run remains reproducible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.native.experiment import Experiment
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.engines.weight_source import WeightSource
from quintet.runtime.engines import ranks_per_engine
from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.remote_interface import ACTOR, ENGINE, WORKER, EngineAction, EngineReport
from quintet.runtime.transport import Transport

if TYPE_CHECKING:
    from torch import Tensor


class RemoteEngines:
    """The engines of all ranks but the first, which step, load weights and sleep together."""

    def __init__(self, transport: Transport, config: Experiment, policy: Path) -> None:
        """Start to build the engines; `engines` waits for them."""
        self._transport = transport
        self._engines: list[RemoteEngine] = []
        self._finish_step: Callable[[], None] | None = None
        self._built: Callable[[], Sequence[int]] = lambda: ()
        if ranks_per_engine(config) is not None:
            arguments = {"config": config, "policy": policy}
            self._built = transport.call_others(RemoteCall(WORKER, "build_engine", arguments))

    def engines(self, weights: WeightSource) -> list[RestartingEngine]:
        """Return the engines by rank, which load `weights` when they are rebuilt; see `PolicyWeights`."""
        self._engines = [RemoteEngine(self, rank, length) for rank, length in enumerate(self._built(), 1) if length]
        return [RestartingEngine(partial(self._build, engine), weights) for engine in self._engines]

    def _build(self, engine: RemoteEngine) -> RemoteEngine:
        """Return the engine, after replacing it if it has died.

        Raises:
            EngineError: it dies while it is built.
        """
        if engine.has_died:
            engine.has_died, engine.has_synced, engine.is_replacement = False, False, True
            self.call("rebuild", ranks=[engine.rank])
            engine.raise_failure()
        return engine

    def start_step(self) -> None:
        """Send new requests, and let all engines take a step, unless they are taking one."""
        if self._finish_step is None:
            requests = {str(engine.rank): engine.take_requests() for engine in self._engines}
            self._finish_step = self._start("step", requests=requests)

    def finish_step(self) -> None:
        """Wait for the end of the step."""
        if self._finish_step is not None:
            finish, self._finish_step = self._finish_step, None
            finish()
            for engine in self._engines:
                engine.has_stepped = True

    def call(self, method: str, **arguments: Any) -> None:
        """Execute a method of `EngineWorker` on all ranks but the first."""
        self.finish_step()
        self._start(method, **arguments)()

    def control(self, engine: RemoteEngine, action: EngineAction) -> None:
        """Call a method of all engines when it is called for the first one."""
        if engine is self._engines[0]:
            self.call("control", action=action)

    def gather_weights(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the actor's weights, which all ranks gather together, while the engines load them as `version`: those
        that were built anew, since the others have these weights, or else all."""
        if not self._engines:
            yield from self._transport.broadcast(RemoteCall(ACTOR, "weights"))
            return
        self.finish_step()
        loading = [engine for engine in self._engines if engine.is_replacement] or self._engines
        wait = self._start("load_weights", version=version, ranks=[engine.rank for engine in loading])
        weights: Iterator[tuple[str, Tensor]] = self._transport.call(RemoteCall(ACTOR, "weights"))
        try:
            yield from weights
        finally:
            for _ in weights:
                pass  # all ranks gather every tensor
            wait()
            for engine in loading:
                engine.has_synced = True

    def _start(self, method: str, **arguments: Any) -> Callable[[], None]:
        wait = self._transport.call_others(RemoteCall(ENGINE, method, arguments))

        def finish() -> None:
            reports = wait()
            for engine in self._engines:
                if (report := reports[engine.rank - 1]) is not None:
                    engine.receive(report)

        return finish


class RemoteEngine:
    """See `Engine`: the engine of one rank."""

    def __init__(self, group: RemoteEngines, rank: int, max_model_len: int) -> None:
        self.rank = rank
        self.max_model_len = max_model_len
        self.weight_version = 0
        self.has_synced = False
        """Whether the rank has loaded the weights of the sync for which `load_weights` has not been called yet."""
        self.is_replacement = False
        """Whether the rank has built the engine anew and not loaded weights since."""
        self.has_died = False
        self.has_stepped = False
        """Whether `step` has not yet returned the result of the last step."""
        self._group = group
        self._failure: str | None = None
        self._requests: list[Request] = []
        """Requests that have not been sent."""
        self._unfinished: set[int] = set()
        self._generations: list[Generation] = []
        """Responses that have been received."""

    @property
    def busy(self) -> bool:
        return bool(self._unfinished or self._generations or self._failure)

    def add_request(self, request: Request) -> None:
        if len(request.prompt) >= self.max_model_len:
            raise ValueError(f"the prompt has {len(request.prompt)} tokens, the context {self.max_model_len}")
        self._requests.append(request)
        self._unfinished.add(request.id)

    def take_requests(self) -> list[Request]:
        """Return the requests to send with the step that starts now."""
        requests, self._requests = self._requests, []
        self.has_stepped = False
        return requests

    def start_step(self) -> None:
        """See `ConcurrentEngine.start_step`."""
        self._group.start_step()

    def step(self) -> list[Generation]:
        if not self.has_stepped:
            self._group.start_step()
            self._group.finish_step()
        self.has_stepped = False
        self.raise_failure()
        generations, self._generations = self._generations, []
        return generations

    def abort(self, ids: Collection[int]) -> list[Generation]:
        if not self._unfinished.isdisjoint(ids):
            self._group.call("abort", ids=sorted(self._unfinished.intersection(ids)))
            self.raise_failure()
        unsent = [request.id for request in self._requests if request.id in ids]
        self._requests = [request for request in self._requests if request.id not in ids]
        self._unfinished.difference_update(unsent)
        aborted = [generation for generation in self._generations if generation.id in ids]
        self._generations = [generation for generation in self._generations if generation.id not in ids]
        return aborted + [
            Generation(request_id, (), (), FinishReason.ABORT, self.weight_version) for request_id in unsent
        ]

    def load_weights(self, version: int, weights: WeightSource) -> None:
        """See `Engine.load_weights`: the ranks load weights while they gather them, see `RemoteEngines.gather_weights`.

        Raises:
            EngineError: the engine died.
            ValueError: the ranks do not gather the tensors of `weights`.
        """
        if not self.has_synced:
            for _ in weights.tensors():
                pass
        if not self.has_synced:
            raise ValueError(f"rank {self.rank} cannot load weights that only rank 0 has")
        self.has_synced = self.is_replacement = False
        self.raise_failure()
        self.weight_version = version

    def reset_prefix_cache(self) -> None:
        self._control("reset_prefix_cache")

    def sleep(self) -> None:
        self._control("sleep")

    def wake_up(self) -> None:
        self._control("wake_up")

    def _control(self, action: EngineAction) -> None:
        """Call a method on all ranks when the first of the engines does."""
        self._group.control(self, action)
        self.raise_failure()

    def close(self) -> None:
        """See `Engine.close`: the rank releases its engine when it builds another one or ends."""

    def receive(self, report: EngineReport) -> None:
        """Store what the rank reports."""
        self._generations += report.generations
        self._unfinished.difference_update(generation.id for generation in report.generations)
        if report.failure is not None:
            self._failure = f"rank {self.rank}: {report.failure.error_type}: {report.failure.message}"

    def raise_failure(self) -> None:
        """Check that the engine lives.

        Raises:
            EngineError: it has died, with all its requests.
        """
        if self._failure is not None:
            failure, self._failure, self.has_died = self._failure, None, True
            self._unfinished.clear()
            self._requests.clear()
            self._generations.clear()
            raise EngineError(failure)
