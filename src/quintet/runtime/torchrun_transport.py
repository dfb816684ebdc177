"""Transport between the ranks of the actor: rank 0 takes part in each call, the others are connected workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from quintet.errors import MachineError
from quintet.runtime.remote_call import RemoteCall, broadcast_tensors, encode
from quintet.runtime.standalone.connection import CALL_ERRORS, StartedCall, WorkerConnection, WorkerLostError
from quintet.runtime.standalone.messages import RemoteCallError
from quintet.runtime.worker import Worker
from quintet.training.parallel.rendezvous import RankDiedError, Rendezvous, describe_dead_ranks


class TorchrunTransport:
    """`Transport` that sends each call to all other ranks and executes it together with them. Tensors of a call are
    broadcast once over the control group."""

    def __init__(self, worker: Worker, rendezvous: Rendezvous, workers: Sequence[WorkerConnection]) -> None:
        self.workers = tuple(workers)
        """Connections to the ranks from 1 on."""
        self._worker = worker
        self._rendezvous = rendezvous
        self._in_call = False
        """Whether a call has not been completed by this rank."""
        self._started: Sequence[StartedCall] = ()
        """The last call on the other ranks, if its results were not taken."""
        self._results: list[Any] = []
        """Its results, by rank from 1 on; the list is the one that `call_others` returns."""

    @property
    def world_size(self) -> int:
        return self._rendezvous.ranks.size

    def call(self, call: RemoteCall) -> Any:
        return self._worker.execute(call)

    def broadcast(self, call: RemoteCall, except_ranks: Collection[int] = ()) -> Any:
        self._finish()
        self._in_call = True
        with self.translated_errors():
            self._start(replace(call, discards_result=True), except_ranks)
            result = self._worker.execute(call)
        self._in_call = False
        return self._read_to_end(result) if isinstance(result, Iterator) else result

    def _read_to_end(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items; read all of them even if the caller stops early, since all ranks take part in each."""
        try:
            with self.translated_errors():
                for item in items:  # noqa: UP028  `yield from` would close it with this one
                    yield item
        finally:
            for _ in items:
                pass

    def call_others(self, call: RemoteCall) -> Callable[[], Sequence[Any]]:
        self._finish()
        with self.translated_errors():
            self._start(call)
        results = self._results

        def finish() -> Sequence[Any]:
            if results is self._results:
                self._finish()
            return results

        return finish

    def _start(self, call: RemoteCall, except_ranks: Collection[int] = ()) -> None:
        """Send a call to the other ranks, its tensors to all of them at once."""
        _, tensors = encode(call)
        call = replace(call, broadcasts_tensors=bool(tensors))
        self._results = []
        self._started = [worker.start(call) for worker in self.workers if worker.rank not in except_ranks]
        broadcast_tensors(tensors, self._rendezvous.control_group)

    def _finish(self) -> None:
        """Take the results of the last call on the other ranks, unless they were taken."""
        started, self._started = self._started, ()
        with self.translated_errors():
            self._results += [each.finish() for each in started]

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Raise `RankDiedError` in place of an error that another rank's death has caused."""
        try:
            yield
        except RemoteCallError as error:
            raise _rank_died(f"a rank has failed: {error}") from error
        except (RuntimeError, WorkerLostError) as error:
            if cause := self._rendezvous.death_cause(error):
                raise _rank_died(self._reported_error() or cause) from error
            if isinstance(error, WorkerLostError):
                raise _rank_died(str(error)) from error
            raise

    def _reported_error(self) -> str | None:
        """Return the error that a rank has sent before it ended, if one has."""
        for each in self._started:
            if wait([each.worker.messages], 0):
                try:
                    each.finish()
                except (RemoteCallError, MachineError) as error:
                    return f"{each.worker.name} has failed: {error}"
                except WorkerLostError:
                    continue
        return None

    def check_alive(self) -> None:
        if dead := self._rendezvous.dead_ranks():
            raise _rank_died(describe_dead_ranks(dead))
        for worker in self.workers:
            if worker.lost_reason is not None:
                raise _rank_died(str(worker.lost_error()))

    def close(self) -> None:
        """See `Transport.close`. In the middle of a call the other ranks end because this rank does."""
        if self._in_call:
            return
        with suppress(*CALL_ERRORS):
            self._finish()
        for worker in self.workers:
            worker.stop()


def _rank_died(cause: str) -> RankDiedError:
    hint = "see its output above; rerun the same command to continue from the last checkpoint"
    return RankDiedError(f"{cause}, and a run needs all of its ranks", hint)
