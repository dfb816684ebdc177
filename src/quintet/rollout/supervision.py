"""An engine that outlives its own deaths: it is opened anew, and what it was writing comes back as failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, TypeVar

from quintet.errors import MachineError
from quintet.processes.kept import told
from quintet.records import Failure, Generation, Request, StopReason
from quintet.rollout.engine import Engine

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Supervised"]

T = TypeVar("T")
MOST_RESTARTS = 3
"""Times in a row that an engine is opened anew without having finished a request in between."""
FAULTS = (RuntimeError, MemoryError)
"""What an engine dies of: an `EngineFault`, a device's fault or want of memory (which torch raises as RuntimeError),
the machine's want of memory."""


class Supervised:
    """See `Engine`. Wraps the engine that `open_engine` opens.

    Where it dies, its requests end as `StopReason.FAILED` with the cause, and another one is opened, which gets the
    present weights from `weights`.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        most_restarts: int = MOST_RESTARTS,
    ) -> None:
        self._open = open_engine
        self._weights = weights
        self._most = most_restarts
        self._engine = open_engine()
        self.weight_version = self._engine.weight_version
        self.restarts = 0
        """Engines that were opened after the first one."""
        self._in_a_row = 0
        self._running: set[int] = set()
        self._lost: list[Generation] = []
        self._measured = 0

    @property
    def present(self) -> Engine:
        """The engine that runs now."""
        return self._engine

    @property
    def context(self) -> int:
        """See `Engine.context`."""
        return self._engine.context

    @property
    def busy(self) -> bool:
        """See `Engine.busy`."""
        return bool(self._lost) or self._engine.busy

    def submit(self, request: Request) -> None:
        """See `Engine.submit`."""
        self._running.add(request.id)
        try:
            self._tried(lambda: self._engine.submit(request))
        except ValueError:
            self._running.discard(request.id)
            raise

    def step(self) -> list[Generation]:
        """See `Engine.step`.

        Raises:
            MachineError: engines keep dying.
        """
        generations = self._tried(self._engine.step) if self._engine.busy else None
        lost, self._lost = self._lost, []
        if generations is None:
            return lost
        self._running.difference_update(generation.id for generation in generations)
        if any(generation.stop is not StopReason.FAILED for generation in generations):
            self._in_a_row = 0
        return [*lost, *generations]

    def abort(self, ids: Collection[int]) -> list[Generation]:
        """See `Engine.abort`."""
        given_up = set(ids)
        self._lost = [generation for generation in self._lost if generation.id not in given_up]
        self._running -= given_up
        return self._tried(lambda: self._engine.abort(ids)) or []

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load_weights`."""
        self.weight_version = version
        self._tried(lambda: self._engine.load_weights(version, weights))

    def forget(self) -> None:
        """See `Engine.forget`."""
        self._tried(self._engine.forget)

    def sleep(self) -> None:
        """See `Engine.sleep`."""
        self._tried(self._engine.sleep)

    def wake(self) -> None:
        """See `Engine.wake`."""
        self._tried(self._engine.wake)

    def close(self) -> None:
        """See `Engine.close`."""
        self._engine.close()

    def measures(self) -> dict[str, float]:
        """Metrics since this was asked last."""
        since, self._measured = self.restarts - self._measured, self.restarts
        return {"engine/restarts": since}

    def _tried(self, call: Callable[[], T]) -> T | None:
        """What the engine gives; None where it dies of it and another one is opened."""
        try:
            return call()
        except FAULTS as error:
            failure = _failure(error)
        # not in the handler: the error's frames would keep the dead engine's memory while the next one asks for its own
        self._restart(failure)
        return None

    def _restart(self, failure: Failure) -> None:
        """Give up what ran, and open another engine.

        Raises:
            MachineError: engines keep dying.
        """
        self._lost += [_lost(number, self.weight_version, failure) for number in sorted(self._running)]
        self._running.clear()
        dead: Failure | None = failure
        while dead is not None:
            self._in_a_row += 1
            if self._in_a_row > self._most:
                raise _kept_dying(self._most, dead)
            dead = self._reopened()

    def _reopened(self) -> Failure | None:
        """Another engine in place of the dead one, with the present weights; why not, if it dies at once."""
        self.restarts += 1
        _let_go(self._engine)
        try:
            self._engine = self._open()
            self._engine.load_weights(self.weight_version, self._weights())
        except FAULTS as error:
            return _failure(error)
        return None


def _let_go(engine: Engine) -> None:
    try:
        engine.close()
    except (*FAULTS, OSError):
        # what is dead may not close either
        return


def _failure(error: BaseException) -> Failure:
    fault = told(error)
    return Failure("engine", str(fault["kind"]), str(fault["message"]))


def _lost(number: int, version: int, failure: Failure) -> Generation:
    return Generation(number, (), (), StopReason.FAILED, version, failure=failure)


def _kept_dying(most: int, failure: Failure) -> MachineError:
    message = f"the engine died {most + 1} times in a row (last, {failure.kind}: {failure.message})"
    return MachineError(
        message, "see what it wrote above; where it lacks memory, lower rollout.max_concurrent or memory_share"
    )
