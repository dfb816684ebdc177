"""An engine that is rebuilt when it dies; its unfinished requests can be submitted again, or are returned as failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from quintet.errors import MachineError
from quintet.records import Failure, FinishReason, Generation, Request
from quintet.rollout.engines.engine import Engine, take_steps
from quintet.rollout.engines.weight_source import WeightSource
from quintet.sandbox.sandboxed_process import error_message

T = TypeVar("T")
logger = logging.getLogger(__name__)
MAX_RESTARTS = 3
"""Consecutive restarts without a finished request."""
FATAL_ERRORS = (RuntimeError, MemoryError)
"""Errors that an engine dies of: `EngineError`, device errors and lack of device memory (RuntimeErrors of torch), lack
of host memory."""


@runtime_checkable
class ConcurrentEngine(Protocol):
    """An engine in another process, which computes at the same time as others. Between `start_step` and `step` it gets
    no other call; only `busy` is read."""

    def finish_calls(self) -> None:
        """Wait for the end of calls that return no responses, such as `load_weights`. Without it, the next `step` may
        only wait for them."""

    def start_step(self) -> None:
        """Start the steps whose result the next call of `step` returns."""

    def fileno(self) -> int:
        """Return the file descriptor that is readable when the result of the started steps is there, so that results
        of several engines can be waited for."""


@dataclass(frozen=True, slots=True)
class LostRequest:
    """A request that a dead engine did not finish."""

    request: Request
    failure: Failure
    """Why the engine died."""


class RestartingEngine:
    """Wraps the engine that `build_engine` returns, see `Engine`.

    When the engine dies, a new one is built, which loads the current weights from `weights`. `pop_lost` returns the
    requests of the dead engine; otherwise they finish as `FinishReason.FAILED` with the cause.
    """

    def __init__(
        self,
        build_engine: Callable[[], Engine],
        weights: WeightSource | None,
        max_restarts: int = MAX_RESTARTS,
        is_available: Callable[[], bool] = lambda: True,
        engine: Engine | None = None,
    ) -> None:
        """Without `weights`, a dead engine is replaced by the next `load_weights` and loses all requests until then.
        `is_available` tells whether the engine can be built now: one whose process has died remains dead until `revive`
        is called and its process has been started again. `engine` is the first one, if it exists."""
        self._build_engine = build_engine
        self._weights = weights
        self._max_restarts = max_restarts
        self._is_available = is_available
        self._use(build_engine() if engine is None else engine)
        self.weight_version = self._engine.weight_version
        self.restarts = 0
        """Number of engines built after the first one."""
        self._consecutive_restarts = 0
        self._unfinished: dict[int, Request] = {}
        self._lost: list[LostRequest] = []
        self._death: Failure | None = None
        self._reported_restarts = 0

    def _use(self, engine: Engine) -> None:
        self._engine = engine
        # checks of a protocol take as long as everything else that is done for a step
        self._concurrent = engine if isinstance(engine, ConcurrentEngine) else None

    @property
    def current(self) -> Engine:
        """The wrapped engine."""
        return self._engine

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def is_dead(self) -> bool:
        """Whether the engine is dead until the next `load_weights` or `revive`."""
        return self._death is not None

    @property
    def busy(self) -> bool:
        return bool(self._lost) or (self._death is None and self._engine.busy)

    def add_request(self, request: Request) -> None:
        if self._death is not None:
            self._lost.append(LostRequest(request, self._death))
            return
        self._unfinished[request.id] = request
        try:
            self._call(lambda: self._engine.add_request(request))
        except ValueError:
            self._unfinished.pop(request.id, None)
            raise

    def finish_calls(self) -> None:
        """See `ConcurrentEngine.finish_calls`, if the engine computes in another process."""
        if self._concurrent is not None:
            self._call(self._concurrent.finish_calls)

    def start_step(self) -> None:
        """Start the next step, if the engine computes in another process."""
        if self._death is None and self._concurrent is not None and self._engine.busy:
            self._call(self._concurrent.start_step)

    def result_fileno(self) -> int | None:
        """Return the descriptor that is readable when the started step has a result; None if `step` computes it."""
        return None if self._concurrent is None else self._call(self._concurrent.fileno)

    def step(self, count: int = 1) -> list[Generation]:
        """See `Engine.step`; take up to `count` steps, unless the engine computes in another process. Requests that are
        lost in this call are returned as failed by the next one.

        Raises:
            MachineError: the engine keeps dying.
        """
        steps = count if self._concurrent is None else 1
        failed = [self._failed(lost) for lost in self.pop_lost()]
        is_busy = self._death is None and self._engine.busy
        generations = self._call(lambda: take_steps(self._engine, steps)) if is_busy else None
        if generations is None:
            return failed
        for generation in generations:
            self._unfinished.pop(generation.id, None)
        if any(generation.finish_reason is not FinishReason.FAILED for generation in generations):
            self._consecutive_restarts = 0
        return [*failed, *generations]

    def pop_lost(self) -> list[LostRequest]:
        """Return the requests that the engine has lost since the last call, in the order of their ids."""
        lost, self._lost = self._lost, []
        return lost

    def _failed(self, lost: LostRequest) -> Generation:
        return failed_generation(lost.request, self.weight_version, lost.failure)

    def abort(self, ids: Collection[int]) -> list[Generation]:
        aborted = set(ids)
        self._lost = [lost for lost in self._lost if lost.request.id not in aborted]
        for number in aborted:
            self._unfinished.pop(number, None)
        return self._call(lambda: self._engine.abort(ids)) or []

    def load_weights(self, version: int, weights: WeightSource) -> None:
        """See `Engine.load_weights`: a dead engine is replaced if it is available."""
        self.weight_version = version
        if self._death is not None:
            if self._is_available():
                self._death = self._replace_engine(weights)
                self._count_restart(self._death)
            return
        self._call(lambda: self._engine.load_weights(version, weights))

    def reset_prefix_cache(self) -> None:
        self._call(self._engine.reset_prefix_cache)

    def sleep(self) -> None:
        self._call(self._engine.sleep)

    def wake_up(self) -> None:
        self._call(self._engine.wake_up)

    def close(self) -> None:
        self._engine.close()

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        restarts, self._reported_restarts = self.restarts - self._reported_restarts, self.restarts
        return {"engine/restarts": restarts}

    def _call(self, method: Callable[[], T]) -> T | None:
        """The method's result; None if the engine is dead, or died of it and was replaced."""
        if self._death is not None:
            return None
        try:
            return method()
        except FATAL_ERRORS as error:
            failure = engine_failure(error)
        # not in the handler: the traceback would keep the dead engine's memory while the next engine allocates its own
        self._restart(failure)
        return None

    def _restart(self, failure: Failure) -> None:
        """Store unfinished requests as lost and build another engine, if its weights can be read now.

        Raises:
            MachineError: the engine keeps dying.
        """
        logger.warning("an engine died: %s: %s; its requests are submitted again", failure.error_type, failure.message)
        self._lost += [LostRequest(self._unfinished[number], failure) for number in sorted(self._unfinished)]
        self._unfinished.clear()
        cause: Failure | None = failure
        while cause is not None:
            if not self._is_available():
                self._death = cause
                return
            self._count_restart(cause)
            if self._weights is None:
                self._death = cause
                return
            cause = self._replace_engine(self._weights)

    def revive(self) -> bool:
        """Replace a dead engine if it is available again; return whether it lives.

        Raises:
            MachineError: the engine keeps dying.
        """
        if self._death is not None and self._weights is not None and self._is_available():
            self._death = self._replace_engine(self._weights)
            self._count_restart(self._death)
        return self._death is None

    def _count_restart(self, cause: Failure | None) -> None:
        """
        Raises:
            MachineError: the engine keeps dying, this time of `cause`.
        """
        if cause is None:
            return
        self._consecutive_restarts += 1
        if self._consecutive_restarts > self._max_restarts:
            raise _too_many_restarts(self._max_restarts, cause)

    def _replace_engine(self, weights: WeightSource) -> Failure | None:
        """Build another engine and load the weights. Return the cause if it dies at once."""
        self.restarts += 1
        _close(self._engine)
        try:
            self._use(self._build_engine())
            self._engine.load_weights(self.weight_version, weights)
        except FATAL_ERRORS as error:
            return engine_failure(error)
        finally:
            weights.finish()
        return None


def _close(engine: Engine) -> None:
    try:
        engine.close()
    except (*FATAL_ERRORS, OSError):
        # a dead engine may fail to close
        return


def failed_generation(request: Request, version: int, failure: Failure) -> Generation:
    """Return the response to a request that failed, without tokens."""
    return Generation(request.id, (), (), FinishReason.FAILED, version, failure=failure)


def engine_failure(error: BaseException) -> Failure:
    """Return the error as data."""
    message = error_message(error)
    return Failure("engine", str(message["kind"]), str(message["message"]))


def _too_many_restarts(max_restarts: int, failure: Failure) -> MachineError:
    return MachineError(
        f"the engine died {max_restarts + 1} times in a row (last, {failure.error_type}: {failure.message})",
        "see the engine's output above; if it ran out of memory, lower rollout.max_concurrent or "
        "rollout.engine_options.memory_share",
    )
