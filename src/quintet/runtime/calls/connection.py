"""A worker as the controller calls it: calls over one connection, which the worker executes in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Literal

from torch import Tensor

from quintet.config.torchrun import describe_rank
from quintet.envs.hosted_envs import HostLostError
from quintet.errors import MachineError
from quintet.runtime.calls.messages import ConnectionLostError, MessageSocket, RemoteCallError
from quintet.runtime.calls.remote_call import STOP, RemoteCall, encode

Role = Literal["actor", "learners", "engine"]
"""Which calls a worker executes, in their order: `actor`, all calls of a rank of the actor; `learners`, those of a
standalone process to its learners; `engine`, those of a standalone process to anything else: an engine, environments,
robots or a copy of a policy. A process with the last two roles connects as two workers, which compute at the same
time."""


class WorkerLostError(HostLostError):
    """A worker has ended, hangs, or cannot be reached, whether it hosts envs or another component."""


CallError = WorkerLostError | RemoteCallError | MachineError
CALL_ERRORS = (WorkerLostError, RemoteCallError, MachineError)
"""What `WorkerConnection.finish` raises."""


@dataclass(frozen=True, slots=True)
class StartedCall:
    """A call that was sent to a worker."""

    worker: WorkerConnection
    number: int
    """Number among the calls to this worker, from 1 on."""

    def finish(self) -> Any:
        """Wait for the result, which can be taken once; raises as `WorkerConnection.finish` does."""
        return self.worker.finish(self)


def wait_for_answer(calls: Sequence[StartedCall], end: float | None = None) -> StartedCall | None:
    """Return a call whose result, or an error in its place, can be taken; None if there is none until `end`, seconds of
    the monotonic clock."""
    workers = {call.worker.fileno(): call.worker for call in calls}
    while (received := next((call for call in calls if call.worker.has_result(call)), None)) is None:
        ready = wait(list(workers), None if end is None else max(0.0, end - time.monotonic()))
        if not ready:
            return None
        for file, worker in workers.items():
            if file in ready:
                worker.receive()  # which may be the result of an earlier call
    return received


@dataclass(slots=True, eq=False)
class WorkerConnection:
    """A worker that the controller can call. Results can be taken in any order, by several threads."""

    rank: int
    pid: int
    host: str
    """PID namespace of its process, not an address; see `process_namespace`."""
    messages: MessageSocket
    role: Role = "engine"
    components: str = ""
    """Names of the components of its rank in messages."""
    lost_reason: str | None = None
    """Why the worker cannot be called any more."""
    was_stopped: bool = False
    """Whether the worker was asked to exit, so that its end is no loss."""
    called_at: float | None = None
    """When the worker was called or has answered last, while calls are in progress; seconds of the monotonic clock."""
    _count: int = 0
    _pending: deque[int] = field(default_factory=deque)
    """Numbers of the calls whose result was not received, in order."""
    _results: dict[int, Any] = field(default_factory=dict)
    """Results and errors that were received and not taken, by number."""
    _sending: threading.Lock = field(default_factory=threading.Lock)
    """Held while a call is sent, so that numbers have the order of the messages."""
    _receiving: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that receives results; a result of another thread's call is left for it."""

    @property
    def name(self) -> str:
        """Name of its rank in messages."""
        return describe_rank(self.rank, self.components)

    def fileno(self) -> int:
        """Return the file descriptor, which is readable when the result of a started call is there."""
        return self.messages.fileno()

    def start(self, call: RemoteCall) -> StartedCall:
        """Send a call; raises as `start_encoded` does."""
        return self.start_encoded(*encode(call))

    def start_encoded(self, header: bytes, tensors: Sequence[Tensor]) -> StartedCall:
        """Send a call that is encoded, with the tensors that do not reach the worker otherwise.

        Raises:
            WorkerLostError: the worker is lost.
        """
        with self._sending:
            self.called_at = self.called_at if self._pending else time.monotonic()
            try:
                self.messages.send_call(header, tensors)
            except ConnectionLostError as error:
                raise self._lost(error) from error
            self._count += 1
            self._pending.append(self._count)
            return StartedCall(self, self._count)

    def finish(self, call: StartedCall | None = None) -> Any:
        """Wait for the result of a started call; by default the first one whose result was not taken.

        Raises:
            WorkerLostError: the worker is lost.
            RemoteCallError: the call failed.
            MachineError: the call failed by an error of the user or the machine.
        """
        with self._receiving:
            number = call.number if call is not None else min([*self._results, *self._pending], default=0)
            while number not in self._results:
                self._receive(number)
            result = self._results.pop(number)
        if isinstance(result, CALL_ERRORS):
            raise result
        return result

    def receive(self) -> None:
        """Receive the next result or error, which `finish` returns or raises later."""
        with self._receiving:
            if self._pending:
                self._receive(self._pending[0])

    def received_error(self) -> CallError | None:
        """Return the error of a started call that was not taken, if its answer is there."""
        with self._receiving:
            while self._pending and wait([self.fileno()], 0):
                self._receive(self._pending[0])
            return next((result for result in self._results.values() if isinstance(result, CALL_ERRORS)), None)

    def _receive(self, number: int) -> None:
        """Receive the result of the first pending call. If no call is pending, the next message can only be an error,
        such as the end of the connection, which is kept as the result `number`."""
        received = self._received()
        self._results[self._pending.popleft() if self._pending else number] = received
        self.called_at = time.monotonic() if self._pending else None

    def has_result(self, call: StartedCall) -> bool:
        """Return whether the result of a call was received and not taken."""
        return call.number in self._results

    def _received(self) -> Any:
        """Return the next result, or its error."""
        try:
            return self.messages.receive_result()
        except RemoteCallError as error:
            return RemoteCallError(error.error_type, f"{error.message} (on {self.name})")
        except ValueError as error:
            self.mark_lost(f"cannot be understood: {error}")
            return self.lost_error()
        except ConnectionLostError as error:
            return self._lost(error)
        except MachineError as error:
            return error

    def has_answered_in(self, seconds: float) -> bool:
        """Return whether no call has been executed for longer than `seconds`."""
        called_at = self.called_at
        return called_at is None or time.monotonic() - called_at <= seconds or bool(wait([self.fileno()], 0))

    def call(self, call: RemoteCall) -> Any:
        """Execute a call and return its result; raises as `finish` does."""
        return self.start(call).finish()

    def stop(self) -> None:
        """Ask the worker to exit, unless its connection is lost."""
        self.was_stopped = True
        with suppress(ConnectionLostError):
            self.messages.send_call(*encode(STOP))

    def mark_lost(self, reason: str) -> None:
        """End the connection, so that a thread that waits for a result raises `WorkerLostError`."""
        self.lost_reason = self.lost_reason or reason
        self.messages.shutdown()

    def _lost(self, error: Exception) -> WorkerLostError:
        self.lost_reason = self.lost_reason or f"has ended, or its connection broke ({error})"
        return self.lost_error()

    def lost_error(self) -> WorkerLostError:
        """Return the error that says why the worker is lost."""
        details = ", ".join(filter(None, (self.components, f"process {self.pid}")))
        return WorkerLostError(f"the worker of {describe_rank(self.rank, details)} {self.lost_reason}")
