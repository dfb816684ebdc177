"""How the controller's calls reach the workers that execute them together: in this process, and over connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from inspect import Signature
from typing import Any, Protocol

from quintet.errors import MachineError
from quintet.runtime.calls.connection import (
    CALL_ERRORS,
    StartedCall,
    WorkerConnection,
    WorkerLostError,
    wait_for_answer,
)
from quintet.runtime.calls.messages import RemoteCallError
from quintet.runtime.calls.remote_call import RemoteCall, RemoteRef, broadcast_tensors, encode
from quintet.runtime.calls.remote_interface import REMOTE_OBJECTS, methods_of_rank_0, properties_of, remote_methods
from quintet.training.parallel.rendezvous import RankDiedError, Rendezvous, broken_connection

HINT = "see its log in the run directory; rerun the same command to continue from the last checkpoint"
LOST_RANK_SECONDS = 3.0
"""Time in which it is noticed that another rank is lost, after a collective failed because of it."""


class CallExecutor(Protocol):
    """The worker of this process."""

    def execute(self, call: RemoteCall) -> Any:
        """Call the method, or return the property, that the call names."""


class Transport:
    """Carries calls of the controller to workers that have the same components and execute calls together.

    The ranks of the actor have one with a local worker: this process is rank 0 and executes the calls to all of them,
    too. Such a transport is for one thread. Without a local worker, several threads may call.
    """

    def __init__(
        self,
        workers: Sequence[WorkerConnection] = (),
        components: str = "",
        *,
        local: CallExecutor | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """`components` are what the run lacks without one of the workers, for messages; by default all of its ranks.
        `local` is the worker of this process and the first one, and has found the others by `rendezvous`."""
        self.workers = tuple(workers)
        """Connections to the workers of other processes, by rank."""
        self._components = components
        self._local = local
        self._rendezvous = rendezvous if self.workers else None
        self._lock = threading.Lock()
        """Held without a local worker from the start of a call until its results are taken, so that all workers execute
        the same calls in the same order."""
        self._in_call = False
        """Whether the local worker has not completed a call of all."""
        self._pending: list[StartedCall] = []
        """Calls whose results were not taken."""
        self._results: dict[int, Any] = {}
        """Results of the last call of other processes by rank, as far as they were taken."""
        self._failure: MachineError | None = None
        """Why no more calls are possible: a worker is lost, or waits for one that is."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.workers) + (self._local is not None)

    def call(self, call: RemoteCall) -> Any:
        """Execute a call, or read a property, on the first worker alone; raises as `call_each` does."""
        return self._local.execute(call) if self._local is not None else self.call_each([call])[0]

    def broadcast(self, call: RemoteCall, except_ranks: Collection[int] = ()) -> Any:
        """Execute a call on all workers, which wait for each other; return the result of the first one. Raises as
        `call_together` does.

        With a local worker, return as soon as that has executed the call: the next call waits for the other ranks, and
        raises their errors. Ranks in `except_ranks` do not get this call, since another one lets them take part.
        """
        if self._local is None:
            return self.call_together([call] * self.world_size)[0]
        self._start_on_others(replace(call, discards_result=True), except_ranks)
        self._in_call = True
        with self._errors_of_others():
            result = self._local.execute(call)
        self._in_call = False
        return self._read_to_end(result) if isinstance(result, Iterator) and self.workers else result

    def _read_to_end(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items; read all of them even if the caller stops early, since all ranks take part in each."""
        try:
            with self._errors_of_others():
                for item in items:  # noqa: UP028  `yield from` would close it with this one
                    yield item
        finally:
            for _ in items:
                pass

    def call_others(self, call: RemoteCall) -> Callable[[], Sequence[Any]]:
        """Start a call on the workers of other processes; return the function that waits for their results, by rank,
        which it keeps when another call follows. Both raise as `call_together` does."""
        self._start_on_others(call)
        results = self._results

        def finish() -> Sequence[Any]:
            if results is self._results:
                self._finish()
            self._check_failure()
            return [results[worker.rank] for worker in self.workers]

        return finish

    def call_together(self, calls: Sequence[RemoteCall]) -> list[Any]:
        """Execute one call on each worker of other processes, or on the first ones, which may wait for each other;
        return the results by rank.

        Raises:
            RankDiedError: a worker is lost, or a call has failed: the others may wait for it forever. The first error
                that arrives is the cause of the others, and ends the run.
            MachineError: a call failed by an error of the user or the machine.
        """
        with self._lock:
            self._start(calls)
            self._finish()
            return [self._results[worker.rank] for worker in self.workers[: len(calls)]]

    def call_each(self, calls: Sequence[RemoteCall]) -> list[Any]:
        """Execute one call on each of the first workers of other processes, which do not wait for each other; return
        the results by rank.

        Raises:
            RankDiedError: a worker is lost.
            RemoteCallError: a call failed; the workers live on.
            MachineError: a call failed by an error of the user or the machine; the workers live on.
        """
        results, errors = [], []
        with self._lock:
            self._start(calls)
            pending, self._pending = self._pending, []
            for started in pending:
                try:
                    results.append(started.finish())
                except WorkerLostError as error:
                    self._failure = _worker_died(error, self._components)
                    raise self._failure from error
                except (RemoteCallError, MachineError) as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        return results

    def _start_on_others(self, call: RemoteCall, except_ranks: Collection[int] = ()) -> None:
        """Send a call to all other ranks of the local worker, after they have executed the last one."""
        with self._errors_of_others():
            self._finish()
            # a rank that does not get the call would not receive its tensors
            call = replace(call, broadcasts_tensors=self._rendezvous is not None and not except_ranks)
            self._start([call] * len(self.workers), except_ranks)

    def _start(self, calls: Sequence[RemoteCall], except_ranks: Collection[int] = ()) -> None:
        """Send a call to each of the first workers; a call to several of them is encoded once, and its tensors may be
        broadcast to all of them."""
        self._check_failure()
        self._results = {}
        encoded = {id(call): encode(call) for call in {id(call): call for call in calls}.values()}
        workers = [worker for worker in self.workers if worker.rank not in except_ranks]
        for worker, call in zip(workers, calls, strict=False):
            header, tensors = encoded[id(call)]
            with self.translated_errors(worker):
                self._pending.append(worker.start_encoded(header, () if call.broadcasts_tensors else tensors))
        if calls and calls[0].broadcasts_tensors and self._rendezvous is not None:
            broadcast_tensors(encoded[id(calls[0])][1], self._rendezvous.control_group)

    def _finish(self, timeout_seconds: float | None = None) -> None:
        """Take the results of started calls in the order in which they arrive: the first error is the cause of the
        others. With a timeout, take those that arrive until then."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._pending and (started := wait_for_answer(self._pending, end)) is not None:
            self._pending.remove(started)
            with self.translated_errors(started.worker):
                self._results[started.worker.rank] = started.finish()

    @contextmanager
    def translated_errors(self, worker: WorkerConnection) -> Iterator[None]:
        """Raise errors of a call to one of the `workers` as user errors, after which no call is possible."""
        try:
            with translate_worker_errors(worker, self._components):
                yield
        except MachineError as error:
            self._pending.clear()
            self._failure = error
            raise

    @contextmanager
    def _errors_of_others(self) -> Iterator[None]:
        """Raise the error of another rank in place of an error that it has caused in this one.

        Raises:
            RankDiedError: another rank is lost, or has failed.
        """
        try:
            yield
        except RuntimeError as error:
            if self._rendezvous is None:
                raise
            self._finish(LOST_RANK_SECONDS)
            for worker in self.workers:
                if (received := worker.received_error()) is not None:  # of a call that is not one of all
                    with self.translated_errors(worker):
                        raise received from error
            self.check_alive()
            if cause := broken_connection(error):
                raise RankDiedError(f"{cause}, {_consequence(self._components)}", HINT) from error
            raise

    def check_alive(self) -> None:
        """Check that all workers are alive.

        Raises:
            RankDiedError: a worker is lost; the message names it.
            MachineError: a call of all has failed.
        """
        self._check_failure()
        for worker in self.workers:
            if worker.lost_reason is not None:
                raise _worker_died(worker.lost_error(), self._components)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop the workers of other processes. If the local one has not completed a call, they may wait for it, and end
        because it does; otherwise they complete the last call."""
        if not self._in_call:
            with suppress(*CALL_ERRORS):
                self._finish()
        for worker in self.workers:
            worker.stop()


@contextmanager
def translate_worker_errors(worker: WorkerConnection, components: str) -> Iterator[None]:
    """Raise errors of a worker as user errors that name its rank; `components` are the components that the run needs.

    Raises:
        RankDiedError: the worker is lost, or a call failed by another error, with which a rank of the actor ends.
        MachineError: a call failed by an error of the user or the machine.
    """
    worker_name = worker.name
    try:
        yield
    except WorkerLostError as error:
        raise _worker_died(error, components) from error
    except RemoteCallError as error:
        raise RankDiedError(f"{worker_name} failed: {error}", HINT) from error
    except MachineError as error:
        raise MachineError(f"{worker_name}: {error.message}", error.hint) from error


def _worker_died(error: WorkerLostError, components: str) -> RankDiedError:
    return RankDiedError(f"{error}, {_consequence(components)}", HINT)


def _consequence(components: str) -> str:
    return f"and the run needs its {components}" if components else "and a run needs all of its ranks"


class _Proxy:
    """Base of the generated classes."""

    def __init__(self, transport: Transport, target: str) -> None:
        self._transport = transport
        self._target = target


def remote_proxy(transport: Transport, target: str) -> Any:
    """Return an object with the methods of the target's protocol, which calls the remote object `target`."""
    return _proxy_class(REMOTE_OBJECTS[target])(transport, target)


@cache
def _proxy_class(protocol: type) -> type[_Proxy]:
    single = methods_of_rank_0(protocol)
    methods = {
        name: _method(name, signature, on_all=name not in single)
        for name, signature in remote_methods(protocol).items()
    }
    properties = {name: property(_getter(name)) for name in properties_of(protocol)}
    return type(f"Remote{protocol.__name__}", (_Proxy,), {**properties, **methods})


def _method(name: str, signature: Signature, *, on_all: bool) -> Callable[..., Any]:
    def method(self: _Proxy, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        call = RemoteCall(self._target, name, {key: _as_reference(value) for key, value in arguments.items()})
        return self._transport.broadcast(call) if on_all else self._transport.call(call)

    method.__name__ = name
    return method


def _getter(name: str) -> Callable[[_Proxy], Any]:
    def getter(self: _Proxy) -> Any:
        nested = f"{self._target}.{name}"
        if nested in REMOTE_OBJECTS:
            return remote_proxy(self._transport, nested)
        return self._transport.call(RemoteCall(self._target, name))

    return getter


def _as_reference(value: Any) -> Any:
    return RemoteRef(value._target) if isinstance(value, _Proxy) else value
