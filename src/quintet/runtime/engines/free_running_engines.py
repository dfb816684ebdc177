"""Engines that do not wait for one another, for rollouts that overlap with training."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from selectors import EVENT_READ, DefaultSelector
from threading import Lock

from quintet import trace
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.restarting_engine import LostRequest, RestartingEngine, engine_failure
from quintet.rollout.engines.weight_source import WeightSource
from quintet.runtime.calls.remote_interface import EngineAction
from quintet.runtime.engines.engine_group import RoutedEngines, engine_track, requests_track

MAX_WAIT_SECONDS = 1.0
"""Time after which a step returns without a result, so that its thread can be stopped."""
WAKE_UP = -1
"""Key of the pipe in the selector."""


class FreeRunningEngines(RoutedEngines):
    """See `RoutedEngines`. A step starts a step of every engine that is idle and has requests, and returns as soon as
    one result is there.

    One thread submits requests and takes steps; another may call `load_weights` and `load_missing_weights` at the same
    time, which interrupts only the engine that loads. Requests and aborts are sent before an engine's next step. A dead
    engine is rebuilt when it loads weights the next time, since they cannot be read while the learner trains.
    """

    def __init__(self, engines: Sequence[RestartingEngine], max_wait_seconds: float = 300.0) -> None:
        """The engines must not read the learner's weights: they are created without `weights`, or with staged ones."""
        super().__init__(engines, max_wait_seconds)
        self._weights: WeightSource | None = None
        """Source of the last `load_weights`."""
        self._locks = [Lock() for _ in engines]
        """Of each engine, held by the thread that calls it. The rollout thread never waits for one, and holds one at a
        time: it leaves an engine that is locked to the thread that holds its lock. That thread appends the engine to
        `_taken` after it has released the lock and then wakes `step` up, so no result and no idle engine is forgotten.
        What is busy, dead or unsent is changed by the rollout thread alone."""
        self._stepping: set[int] = set()
        """Engines whose step has been started and whose result has not been taken. The thread that holds the lock of an
        engine adds and removes it."""
        self._step_started: dict[int, int] = {}
        """When their last steps were started, of `time.perf_counter_ns`."""
        self._startable: set[int] = set()
        """Busy engines without a started step."""
        self._unsent: dict[int, list[Request]] = defaultdict(list)
        self._unsent_aborts: dict[int, list[int]] = defaultdict(list)
        self._ready: list[int] = []
        """Engines that compute in `step`."""
        self._taken: deque[tuple[int, list[Generation]]] = deque()
        """Engines that another thread has called, and the results that it has taken. Any thread appends; only `step`
        removes."""
        self._aborting: set[int] = set()
        """Requests whose engine has not aborted them yet."""
        self._selector = DefaultSelector()
        self._watched: dict[int, int] = {}
        """Descriptors in the selector by engine."""
        self._wake_up_reader, self._wake_up_writer = os.pipe()
        os.set_blocking(self._wake_up_writer, False)
        self._selector.register(self._wake_up_reader, EVENT_READ, WAKE_UP)

    @property
    def busy(self) -> bool:
        return bool(self._busy or self._failed or self._unplaced or self._taken)

    def add_request(self, request: Request) -> None:
        self._check_length(request)
        index = self._router.select(request)
        if index is None:
            self._unplaced.append(request)
            return
        self._unsent[index].append(request)
        self._router.add(request, index)
        trace.start_request(request.id, requests_track(index), prompt_tokens=len(request.prompt))
        self._set_busy(index)

    def _set_busy(self, index: int) -> None:
        self._busy.add(index)
        if index not in self._stepping:
            self._startable.add(index)

    def step(self) -> list[Generation]:
        self._revive_dead()
        for index in list(self._startable):
            self._start_step(index)
        generations: list[Generation] = []
        for index in self._wait():
            generations += self._take_result(index)
        while self._taken:
            index, results = self._taken.popleft()
            generations += results
            if index not in self._stepping:
                self._unwatch(index)
            self._settle(index)
        self._count_completed(generations)
        if self._aborting:
            self._aborting.difference_update(generation.id for generation in generations)
        lost, self._failed = self._failed, []
        return generations + lost

    def _start_step(self, index: int) -> None:
        """Send an engine its requests and start its step, unless another thread calls it."""
        engine = self._engines[index]
        if not self._locks[index].acquire(blocking=False):
            return  # that thread wakes the selector up
        try:
            self._startable.discard(index)
            self._send(index)
            engine.start_step()
            descriptor = engine.result_fileno()
            if engine.busy and not engine.is_dead:
                self._stepping.add(index)
                self._step_started[index] = time.perf_counter_ns()
        finally:
            self._locks[index].release()
        if index not in self._stepping:
            self._settle(index)
        elif descriptor is None:
            self._ready.append(index)
        else:
            self._unwatch(index)
            self._watched[index] = descriptor
            self._selector.register(descriptor, EVENT_READ, index)

    def _unwatch(self, index: int) -> None:
        """Stop waiting for an engine's result. A file descriptor is watched for one step only, because a rebuilt engine
        may have a descriptor of the same number."""
        if (descriptor := self._watched.pop(index, None)) is not None:
            self._selector.unregister(descriptor)

    def _send(self, index: int) -> None:
        engine = self._engines[index]
        aborts = self._unsent_aborts.pop(index, None)
        if aborts:
            self._taken.append((index, engine.abort(aborts)))
        for request in self._unsent.pop(index, ()):
            try:
                engine.add_request(request)
            except ValueError as error:
                self._router.complete(request.id)
                self._fail(request, engine_failure(error))

    def _wait(self) -> list[int]:
        """Wait for results; return the engines that have one, at once if another thread has called an engine."""
        ready, self._ready = self._ready, []
        is_waiting = (self._stepping or self._startable or self._unplaced) and not (
            ready or self._taken or self._failed
        )
        for key, _ in self._selector.select(MAX_WAIT_SECONDS if is_waiting else 0):
            if key.data == WAKE_UP:
                os.read(self._wake_up_reader, 4096)
            else:
                self._unwatch(key.data)
                ready.append(key.data)
        return ready

    def _take_result(self, index: int) -> list[Generation]:
        if not self._locks[index].acquire(blocking=False):
            return []  # the thread that holds it takes the result
        try:
            generations = self._finish_step(index)
        finally:
            self._locks[index].release()
        self._settle(index)
        return generations

    def _finish_step(self, index: int) -> list[Generation]:
        """Take the result of an engine's started step, if there is one; hold the engine's lock."""
        if index not in self._stepping:
            return []
        self._stepping.discard(index)
        generations = self._engines[index].step()
        trace.add_span("step", self._step_started[index], engine_track(index))
        return generations

    def _settle(self, index: int) -> None:
        """Reassign lost requests of an engine after calls, and update in which state it is."""
        if not self._locks[index].acquire(blocking=False):
            return  # the thread that holds it appends the engine to `_taken`
        try:
            self._update_dead(index)
            self._reassign_lost(index)
            if self._unsent.get(index) or self._unsent_aborts.get(index) or self._engines[index].busy:
                self._set_busy(index)
            else:
                self._busy.discard(index)
                self._startable.discard(index)
        finally:
            self._locks[index].release()

    def _update_dead(self, index: int) -> None:
        super()._update_dead(index)
        if index in self._dead:
            for request in self._unsent.pop(index, ()):
                self._router.remove(request.id)
                self.add_request(request)

    def _revive(self, index: int) -> bool:
        """See `RoutedEngines._revive`; an engine that another thread calls is left to it."""
        if not self._locks[index].acquire(blocking=False):
            return False
        try:
            return super()._revive(index)
        finally:
            self._locks[index].release()

    def _reassign(self, lost: LostRequest) -> None:
        if lost.request.id in self._aborting:
            self._aborting.discard(lost.request.id)
        else:
            super()._reassign(lost)

    def abort(self, ids: Collection[int]) -> list[Generation]:
        """See `Engine.abort`. Requests that an engine has are aborted before its next step, which returns them."""
        self._failed = [generation for generation in self._failed if generation.id not in ids]
        self._unplaced = [request for request in self._unplaced if request.id not in ids]
        aborted = []
        for index, numbers in self._ids_by_engine(ids).items():
            unsent = [request.id for request in self._unsent.get(index, ()) if request.id in ids]
            if unsent:
                self._unsent[index] = [request for request in self._unsent[index] if request.id not in ids]
            aborted += [
                Generation(request_id, (), (), FinishReason.ABORT, self.weight_version) for request_id in unsent
            ]
            if sent := set(numbers).difference(unsent):
                self._unsent_aborts[index] += sorted(sent)
                self._aborting |= sent
                self._set_busy(index)
        self._count_completed(aborted)
        return aborted

    def load_weights(self, version: int, weights: WeightSource) -> None:
        """See `Engine.load_weights`: first the engines whose step is complete, the dead ones last."""
        self.weight_version = version
        self._weights = weights
        self._router.forget_prompts()
        pending = sorted(range(len(self._engines)), key=self._dead.__contains__)
        while pending:
            for index in [engine for engine in pending if self._is_between_steps(engine)] or pending[:1]:
                self._load_weights(index, weights)
                pending.remove(index)

    def _is_between_steps(self, index: int) -> bool:
        """Return whether the engine can be interrupted without waiting for the end of its step."""
        descriptor = self._watched.get(index)
        return index not in self._stepping or (descriptor is not None and bool(wait([descriptor], 0)))

    def load_missing_weights(self) -> None:
        """Rebuild dead engines with the weights of the other engines, those of the last `load_weights`; the learner
        must not have been updated since."""
        if self._weights is not None:
            for index in sorted(self._dead):
                self._load_weights(index, self._weights)

    def _load_weights(self, index: int, weights: WeightSource) -> None:
        with self._interrupted(index) as engine:
            engine.load_weights(self.weight_version, weights)
            weights.finish()

    @contextmanager
    def _interrupted(self, index: int) -> Iterator[RestartingEngine]:
        """Yield an engine between two of its steps; `step` then resumes it."""
        results: list[Generation] = []
        try:
            with self._locks[index]:
                results = self._finish_step(index)
                yield self._engines[index]
        finally:
            self._taken.append((index, results))
            self._notify()

    def _notify(self) -> None:
        try:
            os.write(self._wake_up_writer, b"1")
        except BlockingIOError:
            return  # the pipe is full: it wakes `step` up anyway

    def _control(self, action: EngineAction) -> None:
        for index in range(len(self._engines)):
            with self._interrupted(index) as engine:
                getattr(engine, action)()

    def close(self) -> None:
        super().close()
        self._selector.close()
        os.close(self._wake_up_reader)
        os.close(self._wake_up_writer)
