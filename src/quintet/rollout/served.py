"""One engine for many who ask: a thread owns it and steps it, and what others hand in joins its running batch."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar, runtime_checkable

from quintet.records import Generation, Request
from quintet.rollout.engine import Engine

__all__ = ["EngineGone", "EngineThread", "Errand", "Load", "Watched", "finished"]

T = TypeVar("T")
Written = tuple[Sequence[int], Sequence[float]]
"""Tokens and their log-probs (nats)."""


class EngineGone(RuntimeError):
    """The engine died or was closed before the answer was whole; the message names the cause."""


@runtime_checkable
class Watched(Protocol):
    """An engine that shows what it is writing. One that can't shows each answer once it is whole."""

    def written(self, ids: Collection[int]) -> Mapping[int, Written]:
        """Tokens and log-probs so far of those of the requests that run."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine's thread did so far."""

    open: int
    """Requests that wait or run."""
    most_together: int
    """Most requests that were open in one step."""
    steps: int
    requests: int
    """Ended ones."""
    tokens: int
    """Tokens of the ended ones."""
    stops: Mapping[str, int]
    """How they ended, by `StopReason`."""
    weight_version: int


class Errand:
    """Requests that somebody handed in together. They share nothing else: each joins and leaves the batch by itself."""

    def __init__(self, requests: Sequence[Request], *, watched: bool) -> None:
        self.requests = requests
        self.watched = watched
        self._news = threading.Condition()
        self._changes = 0
        self._ended: list[Generation | None] = [None] * len(requests)
        self._written: list[Written] = [((), ())] * len(requests)
        self._fault: Exception | None = None

    def wait(self, seconds: float, seen: int = -1) -> int:
        """Until there is news beyond the `seen`, at most so long; gives the number of the latest.

        Raises:
            ValueError: the engine doesn't take one of the requests.
            EngineGone: nothing more will come.
        """
        with self._news:
            self._news.wait_for(lambda: self._changes > seen or self._fault is not None, seconds)
            if self._fault is not None:
                raise self._fault
            return self._changes

    @property
    def done(self) -> bool:
        """Every request has ended."""
        return all(generation is not None for generation in self._ended)

    @property
    def generations(self) -> list[Generation | None]:
        """Of each request, in the order in which they were handed in; None while it waits or runs."""
        return list(self._ended)

    def written(self, place: int) -> Written:
        """What the request at that place has written so far."""
        with self._news:
            ended = self._ended[place]
            return self._written[place] if ended is None else (ended.tokens, ended.logprobs)

    def show(self, place: int, written: Written) -> None:
        """Say what a request has written so far."""
        with self._news:
            self._written[place] = (tuple(written[0]), tuple(written[1]))
            self._tell()

    def end(self, place: int, generation: Generation) -> None:
        """Say how a request ended."""
        with self._news:
            self._ended[place] = generation
            self._tell()

    def fail(self, fault: Exception) -> None:
        """Say that no more will come."""
        with self._news:
            self._fault = self._fault or fault
            self._tell()

    def _tell(self) -> None:
        self._changes += 1
        self._news.notify_all()


@dataclass(frozen=True, slots=True)
class _Order:
    """Something that the engine's thread is to do."""

    do: Callable[[], None]
    fail: Callable[[Exception], None]
    """Called where it never will."""


@dataclass(slots=True)
class _Counts:
    most_together: int = 0
    steps: int = 0
    tokens: int = 0
    stops: Counter[str] = field(default_factory=Counter)


class EngineThread:
    """Owns an engine. All methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        self._open: dict[int, tuple[Errand, int]] = {}
        self._numbers = itertools.count()
        self._counts = _Counts()
        self._closing = False
        self._gate = threading.Lock()
        self._gone: Exception | None = None
        self.context = engine.context
        """Most tokens of prompt and answer together."""
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> Exception | None:
        """Why the engine is gone, where it died."""
        return self._gone if not self._closing else None

    def number(self) -> int:
        """A number that no request has."""
        return next(self._numbers)

    def begin(self, requests: Sequence[Request], *, watched: bool = False, number: int | None = None) -> Errand:
        """Hand in requests; their ids are given anew. `watched` wants to see what is written before it is whole. A
        single request may come under a `number` of its dialogue's (see `Request.keep`), which none that is open has."""
        if number is not None and len(requests) == 1:
            numbered = [replace(requests[0], id=number, keep=True)]
        else:
            numbered = [replace(request, id=self.number()) for request in requests]
        errand = Errand(numbered, watched=watched)
        self._order(_Order(lambda: self._submit(errand), errand.fail))
        return errand

    def abort(self, errand: Errand) -> None:
        """Drop what of it still waits or runs: it ends as `StopReason.ABORT`."""
        self._order(_Order(lambda: self._drop(errand), lambda _: None))

    def run(self, work: Callable[[Engine], T]) -> T:
        """Do something with the engine between two of its steps, such as loading weights; gives what that gives.

        Raises:
            EngineGone: the engine is gone.
        """
        result: Future[T] = Future()

        def do() -> None:
            try:
                result.set_result(work(self._engine))
            except Exception as error:  # noqa: BLE001 - goes to the one who asked for it
                result.set_exception(error)
                return

        self._order(_Order(do, result.set_exception))
        return result.result()

    def load(self) -> Load:
        """What it does, and did so far."""
        counts = self._counts
        return Load(
            open=len(self._open),
            most_together=counts.most_together,
            steps=counts.steps,
            requests=counts.stops.total(),
            tokens=counts.tokens,
            stops=dict(counts.stops),
            weight_version=self._engine.weight_version,
        )

    def close(self) -> None:
        """End what runs, and close the engine; those who wait are told so."""

        def stop() -> None:
            self._closing = True

        self._order(_Order(stop, lambda _: None))
        self._thread.join()

    def _order(self, order: _Order) -> None:
        with self._gate:
            if self._gone is None:
                self._orders.put(order)
                return
        order.fail(EngineGone(str(self._gone)))

    def _serve(self) -> None:
        try:
            self._step_on()
            self._dismiss(EngineGone("the engine was closed"))
        except Exception as error:  # noqa: BLE001 - those who wait are told, whatever ended it
            self._dismiss(error)
            return
        finally:
            self._engine.close()

    def _step_on(self) -> None:
        engine = self._engine
        while not self._closing:
            self._take(wait=not engine.busy)
            if not engine.busy or self._closing:
                continue
            self._counts.most_together = max(self._counts.most_together, len(self._open))
            for generation in engine.step():
                self._deliver(generation)
            self._counts.steps += 1
            self._show()
        self._drop(*{errand for errand, _ in self._open.values()})

    def _take(self, *, wait: bool) -> None:
        """Do what was ordered since; with nothing else to do, wait for an order."""
        try:
            while True:
                self._orders.get(block=wait).do()
                wait = False
        except Empty:
            return

    def _submit(self, errand: Errand) -> None:
        for place, request in enumerate(errand.requests):
            try:
                self._engine.submit(request)
            except ValueError as error:
                self._drop(errand)
                errand.fail(error)
                return
            self._open[request.id] = (errand, place)

    def _drop(self, *errands: Errand) -> None:
        wanted = {request.id for errand in errands for request in errand.requests} & self._open.keys()
        for generation in self._engine.abort(wanted) if wanted else ():
            self._deliver(generation)

    def _deliver(self, generation: Generation) -> None:
        errand, place = self._open.pop(generation.id)
        self._counts.tokens += len(generation.tokens)
        self._counts.stops[generation.stop.value] += 1
        errand.end(place, generation)

    def _show(self) -> None:
        """Show what is being written to those who want to see it."""
        watched = {number: known for number, known in list(self._open.items()) if known[0].watched}
        if not watched or not isinstance(self._engine, Watched):
            return
        for number, written in self._engine.written(watched.keys()).items():
            errand, place = watched[number]
            errand.show(place, written)

    def _dismiss(self, error: Exception) -> None:
        """Tell all who wait that nothing more comes."""
        with self._gate:
            self._gone = error
        gone = error if isinstance(error, EngineGone) else EngineGone(f"the engine is gone: {error}")
        for errand, _ in self._open.values():
            errand.fail(gone)
        while not self._orders.empty():
            self._orders.get().fail(gone)


def finished(errand: Errand, gone: Callable[[], bool], seconds: float) -> list[Generation] | None:
    """All answers of an errand; None once `gone`, asked every so many seconds, says that nobody wants them.

    Raises:
        ValueError: the engine doesn't take one of the requests.
        EngineGone: the engine is gone.
    """
    seen = -1
    while not errand.done:
        seen = errand.wait(seconds, seen)
        if not errand.done and gone():
            return None
    return [generation for generation in errand.generations if generation is not None]
