"""Transport to the standalone workers that have the same components."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from quintet.errors import MachineError
from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.standalone.connection import WorkerConnection, WorkerLostError
from quintet.runtime.standalone.messages import RemoteCallError
from quintet.training.parallel.rendezvous import RankDiedError

HINT = "see its log in the run directory; rerun the same command to continue from the last checkpoint"


class StandaloneTransport:
    """`Transport` to standalone workers, which execute a call at the same time. Several threads may call it."""

    def __init__(self, workers: Sequence[WorkerConnection], components: str) -> None:
        """`components` are those of the workers, for messages."""
        self.workers = tuple(workers)
        self._components = components
        self._lock = threading.Lock()
        self._failure: MachineError | None = None
        """Why no more calls are possible: a worker is lost, or waits for one that is."""

    @property
    def world_size(self) -> int:
        return len(self.workers)

    def call(self, call: RemoteCall) -> Any:
        """See `Transport.call`; raises as `call_each` does."""
        return self.call_each([call])[0]

    def broadcast(self, call: RemoteCall) -> Any:
        """See `Transport.broadcast`; raises as `call_together` does."""
        return self.call_together([call] * self.world_size)[0]

    def call_others(self, call: RemoteCall) -> Callable[[], Sequence[Any]]:
        """See `Transport.call_others`; the call has been executed when this returns."""
        others = self.workers[1:]
        with self._lock:
            self._start(others, [call] * len(others))
            results = self._finish(others)
        return lambda: results

    def call_together(self, calls: Sequence[RemoteCall]) -> list[Any]:
        """Execute one call on each worker, which wait for each other; return the results by worker.

        Raises:
            RankDiedError: a worker is lost, or a call has failed: the others may wait for it forever.
            MachineError: a call failed by an error of the user or the machine.
        """
        with self._lock:
            self._start(self.workers, calls)
            return self._finish(self.workers)

    def call_each(self, calls: Sequence[RemoteCall]) -> list[Any]:
        """Execute one call on each of the first workers, which do not wait for each other; return the results by
        worker.

        Raises:
            RankDiedError: a worker is lost.
            RemoteCallError: a call failed; the workers live on.
            MachineError: a call failed by an error of the user or the machine.
        """
        workers = self.workers[: len(calls)]
        results, errors = [], []
        with self._lock:
            self._start(workers, calls)
            for worker in workers:
                try:
                    results.append(worker.finish())
                except RemoteCallError as error:
                    errors.append(error)
                except WorkerLostError as error:
                    raise self._fail(self._lost(error)) from error
        if errors:
            raise errors[0]
        return results

    def check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        for worker in self.workers:
            if worker.lost_reason is not None:
                raise self._lost(worker.lost_error())

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()

    def _start(self, workers: Sequence[WorkerConnection], calls: Sequence[RemoteCall]) -> None:
        self.check_alive()
        for worker, call in zip(workers, calls, strict=True):
            with self._translate_errors(worker):
                worker.start(call)

    def _finish(self, workers: Sequence[WorkerConnection]) -> list[Any]:
        """Take the results in the order in which they arrive: the first error is the cause of the others."""
        results: dict[int, Any] = {}
        with DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker, EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    with self._translate_errors(key.data):
                        results[key.data.rank] = key.data.finish()
        return [results[worker.rank] for worker in workers]

    @contextmanager
    def _translate_errors(self, worker: WorkerConnection) -> Iterator[None]:
        try:
            with translate_worker_errors(worker, self._components):
                yield
        except MachineError as error:
            self._failure = error
            raise

    def _lost(self, error: WorkerLostError) -> RankDiedError:
        return _worker_died(error, self._components)

    def _fail(self, error: MachineError) -> MachineError:
        self._failure = error
        return error


@contextmanager
def translate_worker_errors(worker: WorkerConnection, components: str) -> Iterator[None]:
    """Raise errors of a worker as user errors that name its rank; `components` are the components that the run needs.

    Raises:
        RankDiedError: the worker is lost, or a call failed.
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
    return RankDiedError(f"{error}, and the run needs its {components}", HINT)
