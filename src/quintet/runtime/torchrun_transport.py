"""Transport between ranks that torchrun started: a gloo process group carries the calls.

Rank 0 runs the controller and a worker; the other ranks run `run_worker` of `worker.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from quintet.runtime.remote_call import STOP, RemoteCall, receive_results, send
from quintet.runtime.worker import Worker
from quintet.training.parallel.rendezvous import RankDiedError, Rendezvous, describe_dead_ranks


class TorchrunTransport:
    """`Transport` that sends each call to all other ranks and executes it together with them."""

    def __init__(self, worker: Worker, rendezvous: Rendezvous) -> None:
        self._worker = worker
        self._rendezvous = rendezvous
        self._in_call = False
        """Whether a call has not been completed by all ranks."""
        self._wait_for_others: Callable[[], Sequence[Any]] = lambda: ()
        """Waits for the results of the last `call_others`."""

    @property
    def world_size(self) -> int:
        return self._rendezvous.ranks.size

    def call(self, call: RemoteCall) -> Any:
        return self._worker.execute(call)

    def broadcast(self, call: RemoteCall) -> Any:
        self._wait_for_others()
        self._in_call = True
        with self._translate_rank_loss():
            send(call, self._rendezvous.control_group)
            result = self._worker.execute(call)
        self._in_call = False
        return self._read_to_end(result) if isinstance(result, Iterator) else result

    def _read_to_end(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items; read all of them even if the caller stops early, since all ranks take part in each."""
        try:
            with self._translate_rank_loss():
                for item in items:  # noqa: UP028  `yield from` would close it with this one
                    yield item
        finally:
            for _ in items:
                pass

    def call_others(self, call: RemoteCall) -> Callable[[], Sequence[Any]]:
        self._wait_for_others()
        self._in_call = True
        with self._translate_rank_loss():
            send(replace(call, returns_results=True), self._rendezvous.control_group)
        results: list[Any] | None = None

        def wait() -> Sequence[Any]:
            nonlocal results
            if results is None:
                results = []  # the next call must not receive them again if one is corrupted
                with self._translate_rank_loss():
                    results = receive_results(self._rendezvous.control_group)
                self._in_call = False
            return results

        self._wait_for_others = wait
        return wait

    @contextmanager
    def _translate_rank_loss(self) -> Iterator[None]:
        """Raise `RankDiedError` in place of an error that another rank's death has caused."""
        try:
            yield
        except RuntimeError as error:
            if cause := self._rendezvous.death_cause(error):
                raise _rank_died(cause) from error
            raise

    def check_alive(self) -> None:
        if dead := self._rendezvous.dead_ranks():
            raise _rank_died(describe_dead_ranks(dead))

    def close(self) -> None:
        """See `Transport.close`. In the middle of a call the other ranks end because this rank does."""
        if self._in_call:
            return
        try:
            send(STOP, self._rendezvous.control_group)
        except RuntimeError:  # a rank that has already ended
            return


def _rank_died(cause: str) -> RankDiedError:
    hint = "see its output above; rerun the same command to continue from the last checkpoint"
    return RankDiedError(f"{cause}, and a run needs all of its ranks", hint)
