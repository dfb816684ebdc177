"""An engine that is rebuilt when it dies; its unfinished requests are returned as failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from quintet.errors import MachineError
from quintet.records import Failure, FinishReason, Generation, Request
from quintet.rollout.engines.engine import Engine, take_steps
from quintet.sandbox.sandboxed_process import error_message

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
MAX_RESTARTS = 3
"""Consecutive restarts without a finished request."""
FATAL_ERRORS = (RuntimeError, MemoryError)
"""Errors that an engine dies of: `EngineError`, device errors and lack of device memory (RuntimeErrors of torch), lack
of host memory."""


@runtime_checkable
class ConcurrentEngine(Protocol):
    """An engine in another process, which computes at the same time as others."""

    def start_step(self) -> None:
        """Start the steps whose result the next call of `step` returns."""


class RestartingEngine:
    """Wraps the engine that `build_engine` returns, see `Engine`.

    When the engine dies, its requests finish as `FinishReason.FAILED` with the cause, and a new engine is built, which
    loads the current weights from `weights`.
    """

    def __init__(
        self,
        build_engine: Callable[[], Engine],
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        self._build_engine = build_engine
        self._weights = weights
        self._max_restarts = max_restarts
        self._engine = build_engine()
        self.weight_version = self._engine.weight_version
        self.restarts = 0
        """Number of engines built after the first one."""
        self._consecutive_restarts = 0
        self._unfinished: set[int] = set()
        self._failed: list[Generation] = []
        self._reported_restarts = 0

    @property
    def current(self) -> Engine:
        """The wrapped engine."""
        return self._engine

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def busy(self) -> bool:
        return bool(self._failed) or self._engine.busy

    def add_request(self, request: Request) -> None:
        self._unfinished.add(request.id)
        try:
            self._call(lambda: self._engine.add_request(request))
        except ValueError:
            self._unfinished.discard(request.id)
            raise

    def start_step(self) -> None:
        """Start the next step, if the engine computes in another process."""
        if isinstance(self._engine, ConcurrentEngine) and self._engine.busy:
            self._call(self._engine.start_step)

    def step(self, count: int = 1) -> list[Generation]:
        """See `Engine.step`; take up to `count` steps, unless the engine computes in another process.

        Raises:
            MachineError: the engine keeps dying.
        """
        steps = 1 if isinstance(self._engine, ConcurrentEngine) else count
        generations = self._call(lambda: take_steps(self._engine, steps)) if self._engine.busy else None
        failed, self._failed = self._failed, []
        if generations is None:
            return failed
        self._unfinished.difference_update(generation.id for generation in generations)
        if any(generation.finish_reason is not FinishReason.FAILED for generation in generations):
            self._consecutive_restarts = 0
        return [*failed, *generations]

    def abort(self, ids: Collection[int]) -> list[Generation]:
        aborted = set(ids)
        self._failed = [generation for generation in self._failed if generation.id not in aborted]
        self._unfinished -= aborted
        return self._call(lambda: self._engine.abort(ids)) or []

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.weight_version = version

        def load() -> None:
            try:
                self._engine.load_weights(version, weights)
            finally:
                if isinstance(weights, Generator):
                    weights.close()  # other ranks wait for the rest

        self._call(load)

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
        """The method's result; None if the engine died of it and was replaced."""
        try:
            return method()
        except FATAL_ERRORS as error:
            failure = engine_failure(error)
        # not in the handler: the traceback would keep the dead engine's memory while the next engine allocates its own
        self._restart(failure)
        return None

    def _restart(self, failure: Failure) -> None:
        """Fail unfinished requests and build another engine.

        Raises:
            MachineError: the engine keeps dying.
        """
        for number in sorted(self._unfinished):
            self._failed.append(Generation(number, (), (), FinishReason.FAILED, self.weight_version, failure=failure))
        self._unfinished.clear()
        cause: Failure | None = failure
        while cause is not None:
            self._consecutive_restarts += 1
            if self._consecutive_restarts > self._max_restarts:
                raise _too_many_restarts(self._max_restarts, cause)
            cause = self._replace_engine()

    def _replace_engine(self) -> Failure | None:
        """Build another engine with the current weights. Return the cause if it dies at once."""
        self.restarts += 1
        _close(self._engine)
        try:
            self._engine = self._build_engine()
            self._engine.load_weights(self.weight_version, self._weights())
        except FATAL_ERRORS as error:
            return engine_failure(error)
        return None


def _close(engine: Engine) -> None:
    try:
        engine.close()
    except (*FATAL_ERRORS, OSError):
        # a dead engine may fail to close
        return


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
