"""Engine for many concurrent callers: one thread owns and steps it, and submitted requests join its running batch."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar, runtime_checkable

from quintet.errors import ConfigError
from quintet.records import FinishReason, Generation, Request, TopLogprobs
from quintet.rollout.engines.engine import Engine
from quintet.rollout.engines.request_queue import RequestQueue

T = TypeVar("T")
PartialResponse = tuple[Sequence[int], Sequence[float], Sequence[TopLogprobs]]
"""Tokens, their log-probs (nats), and the likeliest tokens as in `Generation`."""


class EngineDeadError(RuntimeError):
    """The engine died or was closed before the response was complete; the message names the cause."""


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that exposes unfinished responses. Other engines return each response only when it is complete."""

    def partial_responses(self, ids: Collection[int]) -> Mapping[int, PartialResponse]:
        """Return the responses so far of those of the requests that are running."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State and totals of an `AsyncEngine`."""

    num_unfinished: int
    """Waiting and running requests."""
    max_batch_size: int
    """Maximum number of requests in one step so far."""
    num_steps: int
    num_finished: int
    num_tokens: int
    """Response tokens of finished requests."""
    finish_reasons: Mapping[str, int]
    """Number of finished requests by `FinishReason`."""
    weight_version: int


class PendingRequests:
    """Requests that were submitted together; each joins and leaves the batch independently."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        streaming: bool = False,
        client: str = "",
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """`notify` is called in the engine's thread when all are finished, when one fails and, with `streaming`, at
        every new token."""
        self.requests = requests
        self.streaming = streaming
        self.client = client
        self._notify = notify
        self._lock = threading.Lock()
        """Held while a result or partial response is published or read, so that a reader never sees a finished request
        with a partial response."""
        self._finished: list[Generation | None] = [None] * len(requests)
        self._num_unfinished = len(requests)
        self._partial: list[PartialResponse] = [((), (), ())] * len(requests)
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether all requests are finished.

        Raises:
            ValueError: the engine rejected one of them.
            EngineDeadError: the engine is dead.
        """
        if self._error is not None:
            raise self._error
        return not self._num_unfinished

    @property
    def generations(self) -> list[Generation | None]:
        """The result of each request, in the order of submission; None while unfinished."""
        return list(self._finished)

    def partial_response(self, index: int) -> PartialResponse:
        """Return the response so far of the request at `index`."""
        with self._lock:
            finished = self._finished[index]
            if finished is None:
                return self._partial[index]
            return finished.tokens, finished.logprobs, finished.top_logprobs

    def update(self, index: int, response: PartialResponse) -> None:
        """Publish the response so far of a request."""
        with self._lock:
            self._partial[index] = (tuple(response[0]), tuple(response[1]), tuple(response[2]))
        self._notify()

    def finish(self, index: int, generation: Generation) -> None:
        """Publish the result of a request."""
        with self._lock:
            self._finished[index] = generation
            self._num_unfinished -= 1
        if self.streaming or not self._num_unfinished:
            self._notify()

    def fail(self, error: Exception) -> None:
        """Raise `error` in all that wait for these requests."""
        self._error = self._error or error
        self._notify()


@dataclass(frozen=True, slots=True)
class _Command:
    """A call for the engine's thread."""

    run: Callable[[], None]
    fail: Callable[[Exception], None]
    """Called if the engine dies before `run`."""


@dataclass(slots=True)
class _Totals:
    max_batch_size: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)


class AsyncEngine:
    """Runs an engine in a thread. All methods may be called from any thread."""

    def __init__(self, engine: Engine, max_running: int = sys.maxsize) -> None:
        """Requests beyond `max_running` wait here, where clients take turns; see `RequestQueue`."""
        self._engine = engine
        self._queue = RequestQueue(max_running)
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._unfinished: dict[int, tuple[PendingRequests, int]] = {}
        self._streaming: dict[int, tuple[PendingRequests, int]] = {}
        self._ids = itertools.count()
        self._totals = _Totals()
        self._closing = False
        self._lock = threading.Lock()
        """Held while a command is queued and while the engine's death is recorded, so that each command is executed or
        failed: none is queued after the death."""
        self._error: Exception | None = None
        self.max_model_len = engine.max_model_len
        """Maximum number of tokens of prompt and response together."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def error(self) -> Exception | None:
        """The error that the engine died of, if any."""
        return self._error if not self._closing else None

    def submit(
        self,
        requests: Sequence[Request],
        *,
        streaming: bool = False,
        client: str = "",
        notify: Callable[[], None] = lambda: None,
    ) -> PendingRequests:
        """Submit requests of a client under new ids. `streaming` publishes responses while they are generated; `notify`
        as in `PendingRequests`. Any of them may continue in later requests, see `Request.keep_kv_cache`."""
        numbered = [replace(request, id=next(self._ids), keep_kv_cache=True) for request in requests]
        pending = PendingRequests(numbered, streaming=streaming, client=client, notify=notify)
        self._enqueue(_Command(lambda: self._add_requests(pending), pending.fail))
        return pending

    def abort(self, pending: PendingRequests) -> None:
        """Abort unfinished requests; they finish as `FinishReason.ABORT`."""
        self._enqueue(_Command(lambda: self._abort(pending), lambda _: None))

    def call(self, function: Callable[[Engine], T]) -> T:
        """Call a function with the engine between two of its steps, for instance to load weights; return its result.

        Raises:
            EngineDeadError: the engine is dead.
        """
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function(self._engine))
            except Exception as error:  # noqa: BLE001 - raised in the caller's thread
                result.set_exception(error)
                return

        self._enqueue(_Command(run, result.set_exception))
        return result.result()

    def stats(self) -> EngineStats:
        """Return the engine's state and totals."""
        totals = self._totals
        return EngineStats(
            num_unfinished=len(self._unfinished),
            max_batch_size=totals.max_batch_size,
            num_steps=totals.num_steps,
            num_finished=totals.finish_reasons.total(),
            num_tokens=totals.num_tokens,
            finish_reasons=dict(totals.finish_reasons),
            weight_version=self._engine.weight_version,
        )

    def close(self) -> None:
        """Abort unfinished requests and close the engine; waiting callers get an `EngineDeadError`."""

        def stop() -> None:
            self._closing = True

        self._enqueue(_Command(stop, lambda _: None))
        self._thread.join()

    def _enqueue(self, command: _Command) -> None:
        with self._lock:
            if self._error is None:
                self._commands.put(command)
                return
        command.fail(EngineDeadError(str(self._error)))

    def _run(self) -> None:
        try:
            self._step_until_closed()
            self._fail_all(EngineDeadError("the engine was closed"))
        except Exception as error:  # noqa: BLE001 - waiting callers must be notified of any cause
            self._fail_all(error)
            return
        finally:
            self._engine.close()

    def _step_until_closed(self) -> None:
        engine = self._engine
        while not self._closing:
            self._run_commands(wait=not engine.busy and not self._queue.num_waiting)
            self._admit()
            if not engine.busy or self._closing:
                continue
            self._totals.max_batch_size = max(self._totals.max_batch_size, self._queue.num_running)
            for generation in engine.step():
                self._finish(generation)
            self._totals.num_steps += 1
            self._publish_partial_responses()
        self._abort(*{pending for pending, _ in self._unfinished.values()})

    def _run_commands(self, *, wait: bool) -> None:
        """Run all queued commands; `wait` for one if there is none."""
        try:
            while True:
                self._commands.get(block=wait).run()
                wait = False
        except Empty:
            return

    def _add_requests(self, pending: PendingRequests) -> None:
        for index, request in enumerate(pending.requests):
            self._unfinished[request.id] = (pending, index)
            if pending.streaming:
                self._streaming[request.id] = (pending, index)
            self._queue.push(pending.client, request)

    def _admit(self) -> None:
        """Pass the next waiting requests to the engine."""
        for request in self._queue.admit():
            try:
                self._engine.add_request(request)
            except (ValueError, ConfigError) as error:
                self._queue.release(request.id)
                pending, _ = self._unfinished.pop(request.id)
                self._streaming.pop(request.id, None)
                self._abort(pending)
                pending.fail(error if isinstance(error, ValueError) else ValueError(str(error)))

    def _abort(self, *aborted: PendingRequests) -> None:
        ids = {request.id for pending in aborted for request in pending.requests} & self._unfinished.keys()
        waiting = self._queue.remove(ids) if ids else []
        for number in waiting:
            self._finish(Generation(number, (), (), FinishReason.ABORT, self._engine.weight_version))
        for generation in self._engine.abort(ids.difference(waiting)) if len(ids) > len(waiting) else ():
            self._finish(generation)

    def _finish(self, generation: Generation) -> None:
        self._queue.release(generation.id)
        pending, index = self._unfinished.pop(generation.id)
        self._streaming.pop(generation.id, None)
        self._totals.num_tokens += len(generation.tokens)
        self._totals.finish_reasons[generation.finish_reason.value] += 1
        pending.finish(index, generation)

    def _publish_partial_responses(self) -> None:
        if not self._streaming or not isinstance(self._engine, StreamingEngine):
            return
        for number, response in self._engine.partial_responses(self._streaming.keys()).items():
            pending, index = self._streaming[number]
            pending.update(index, response)

    def _fail_all(self, error: Exception) -> None:
        """Fail all unfinished requests and queued commands."""
        with self._lock:
            self._error = error
        dead = error if isinstance(error, EngineDeadError) else EngineDeadError(f"the engine died: {error}")
        for pending, _ in self._unfinished.values():
            pending.fail(dead)
        while not self._commands.empty():
            self._commands.get().fail(dead)
