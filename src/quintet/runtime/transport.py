"""How the controller's calls reach the workers: one protocol, and its implementation for a single process.

See `torchrun_transport.py` for several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.standalone.connection import WorkerConnection
from quintet.runtime.worker import Worker


class Transport(Protocol):
    """Carries calls of the controller to the workers."""

    @property
    def world_size(self) -> int:
        """Number of workers."""

    def call(self, call: RemoteCall) -> Any:
        """Execute a call, or read a property, on the worker of rank 0 alone."""

    def broadcast(self, call: RemoteCall) -> Any:
        """Execute a call on all workers; return the result of rank 0.

        Raises:
            RankDiedError: a worker has died; the message names it.
        """

    def call_others(self, call: RemoteCall) -> Callable[[], Sequence[Any]]:
        """Start a call on all workers except rank 0; return the function that waits for their results, by rank from 1
        on.

        Raises:
            RankDiedError: a worker has died; the returned function raises it, too.
        """

    def check_alive(self) -> None:
        """Check that all workers are alive.

        Raises:
            RankDiedError: a worker has died; the message names it.
        """

    def close(self) -> None:
        """Stop all workers; workers that have already ended are ignored."""


class RankTransport(Transport, Protocol):
    """`Transport` to the ranks of the actor."""

    @property
    def workers(self) -> Sequence[WorkerConnection]:
        """Connections to all ranks but rank 0."""

    def broadcast(self, call: RemoteCall, except_ranks: Collection[int] = ()) -> Any:
        """See `Transport.broadcast`; the ranks of `except_ranks` have been called to take part in another way."""

    def translated_errors(self) -> AbstractContextManager[None]:
        """Raise errors of a call to one of the `workers` as errors that end the run."""


class InProcessTransport:
    """`Transport` to the only worker, which runs in the process of the controller."""

    world_size = 1
    workers: Sequence[WorkerConnection] = ()

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def call(self, call: RemoteCall) -> Any:
        return self._worker.execute(call)

    def broadcast(self, call: RemoteCall, except_ranks: Collection[int] = ()) -> Any:
        return self._worker.execute(call)

    def call_others(self, call: RemoteCall) -> Callable[[], Sequence[Any]]:
        """See `Transport.call_others`: there are no others."""
        return lambda: ()

    def translated_errors(self) -> AbstractContextManager[None]:
        """See `Transport.translated_errors`: there are no connections."""
        return nullcontext()

    def check_alive(self) -> None:
        """See `Transport.check_alive`: the worker lives as long as this process."""

    def close(self) -> None:
        """See `Transport.close`."""
