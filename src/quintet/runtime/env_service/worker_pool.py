"""Worker processes of an environment service, in the event loop of the server."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quintet.envs.service.payload import Format, encode_payload
from quintet.errors import MachineError
from quintet.runtime.env_service.batch_turns import HEAD
from quintet.runtime.env_service.served_env_process import PROGRESS, RESULT_HEAD
from quintet.sandbox.worker_processes import ProcessEnd, WorkerProcess, WorkerProcesses

WORKER = "quintet.runtime.env_service.served_env_process"
CHECKS_PER_TIME_LIMIT = 8
REPLACEMENT_SECONDS = 10.0
"""How long a request waits for a worker process if all have died."""
MAX_FAST_DEATHS = 5
"""Consecutive deaths of worker processes that have executed nothing."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an env by its name in the session: a method of the worker and its arguments."""

    env: str
    method: str
    arguments: Sequence[Any] = ()
    config: str | None = None
    """Configuration of the env, for methods that create it."""


@dataclass(slots=True, eq=False)
class Batch:
    """Requests of one exchange that a worker executes, and their results."""

    form: Format
    methods: Sequence[str]
    results: list[bytes] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, result: bytes) -> None:
        """Add the result of the next request."""
        self.results.append(result)
        if len(self.results) == len(self.methods):
            self.done.set()


@dataclass(slots=True, eq=False)
class EnvWorker(WorkerProcess):
    """Handle of a worker process."""

    pool: WorkerPool
    shared: int
    """Descriptor of the memory, shared with the process, that has its `PROGRESS`."""
    envs: set[int] = field(default_factory=set)
    """Numbers of the envs that it has."""
    _batches: dict[int, Batch] = field(default_factory=dict)
    """Those without all results, by number."""
    _num_batches: int = 0
    _input: bytearray = field(default_factory=bytearray)
    _last_progress: int = 0
    _progress_at: float = field(default_factory=time.monotonic)
    _progress: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        self._progress = mmap.mmap(self.shared, PROGRESS.size)

    @property
    def num_executed(self) -> int:
        """Number of requests that the process has executed."""
        return int(PROGRESS.unpack_from(self._progress)[0])

    def execute(
        self, turn: tuple[str, str], requests: Sequence[tuple[int, Call]], form: Format, max_bytes: int
    ) -> Batch:
        """Send calls of a client and its session, each with the number of its env; it must be their `turn`. The batch
        gets their results, of at most `max_bytes` together."""
        batch = Batch(form, [call.method for _, call in requests])
        if not self._batches:
            self._progress_at = time.monotonic()
        self._num_batches += 1
        self._batches[self._num_batches] = batch
        # environments of a session have the same configuration, which is sent once
        configs = list(dict.fromkeys(call.config for _, call in requests))
        index = {config: number for number, config in enumerate(configs)}
        calls = [[number, call.method, index[call.config], *call.arguments] for number, call in requests]
        message = {"configs": configs, "requests": calls, "format": form, "max_bytes": max_bytes}
        body = json.dumps(message).encode()
        self.pool.send(self, HEAD.pack(len(body), self._num_batches, *map(hash, turn)) + body)
        return batch

    def receive(self) -> None:
        """Pass on the results that are complete."""
        while chunk := self.receive_chunk():
            self._input += chunk
        self.ended = self.ended or chunk is not None
        start = 0
        while len(self._input) - start >= RESULT_HEAD.size:
            num_bytes, number = RESULT_HEAD.unpack_from(self._input, start)
            if number not in self._batches:
                self.ended = True  # an env has written into the connection
                break
            end = start + RESULT_HEAD.size + num_bytes
            if len(self._input) < end:
                break
            self._add_result(number, bytes(self._input[start + RESULT_HEAD.size : end]))
            start = end
        del self._input[:start]
        # so has it if there is something that nobody has asked for
        self.ended = self.ended or (bool(self._input) and not self._batches)

    def _add_result(self, number: int, result: bytes) -> None:
        batch = self._batches[number]
        batch.add(result)
        if batch.done.is_set():
            del self._batches[number]

    def is_hanging(self, seconds: float) -> bool:
        """Whether it has executed no request for this time, although there are some."""
        executed, now = self.num_executed, time.monotonic()
        if executed != self._last_progress or not self._batches:
            self._last_progress, self._progress_at = executed, now
        return now - self._progress_at > seconds

    def fail(self, error_type: str, message: str) -> None:
        """Fail the request that was being executed; the results of all others are lost."""
        _, *failed = PROGRESS.unpack_from(self._progress)
        for number, batch in self._batches.items():
            for index in range(len(batch.results), len(batch.methods)):
                result: dict[str, Any] = {"lost": f"its worker process was lost with another environment: {message}"}
                if [number, index] == failed:
                    where = "reset" if batch.methods[index] in ("start", "robots_start") else "step"
                    result = {"failure": [where, error_type, message]}
                batch.add(encode_payload(result, batch.form))
        self._batches.clear()


class WorkerPool(WorkerProcesses[EnvWorker]):
    """A fixed number of worker processes; dead ones are replaced, and hanging ones killed."""

    def __init__(self, num_workers: int, modules: Sequence[str], time_limit: float, memory_bytes: int | None) -> None:
        """`modules` are imported before processes are forked; `time_limit` of one request in seconds."""
        super().__init__(f"{WORKER}:work", self._receive_results, self._worker_ended, self._fork_missing)
        self._num_workers, self._modules = num_workers, [WORKER, *modules]
        self._time_limit, self._memory_bytes = time_limit, memory_bytes
        self._num_fast_deaths = 0
        self._watch: asyncio.Task[None] | None = None
        self.error: str | None = None
        """Why no worker process can run."""

    def start(self) -> None:
        """Start the fork server and the worker processes."""
        self._fork_missing()
        # the pool's selector is readable if there is something to read or to write in one of its connections
        asyncio.get_running_loop().add_reader(self.selector, self.wait, 0.0)
        self._watch = asyncio.create_task(self._kill_hanging())

    async def wait_for_worker(self) -> None:
        """Wait until a worker process runs, for a limited time; they are being replaced if all have died."""
        deadline = time.monotonic() + REPLACEMENT_SECONDS
        while not len(self) and self.error is None and time.monotonic() < deadline:
            await asyncio.sleep(REPLACEMENT_SECONDS / 1000)

    def least_loaded(self) -> EnvWorker | None:
        """Return the worker with the fewest envs; None if none runs."""
        return min(self, key=lambda worker: (len(worker.envs), worker.number), default=None)

    def close(self) -> None:
        """End all processes."""
        if self._watch is not None:
            self._watch.cancel()
            asyncio.get_running_loop().remove_reader(self.selector)
        for worker in self:
            os.close(worker.shared)
        super().close()

    def _fork_missing(self) -> None:
        """Fork processes up to the number of workers."""
        while self.error is None and len(self) < self._num_workers:
            shared = os.memfd_create("quintet-env-worker")
            os.ftruncate(shared, PROGRESS.size)
            setup = {"memory_bytes": self._memory_bytes}
            worker = self.fork(partial(EnvWorker, pool=self, shared=shared), setup, self._modules)
            if worker is None:
                # the fork server has died, which `wait` notices
                os.close(shared)
                return
            with suppress(OSError):  # the fork server reports a process that has ended
                socket.send_fds(worker.connection, [b"\n"], [shared])

    def _receive_results(self, worker: EnvWorker) -> None:
        worker.receive()
        if worker.ended:
            self.signal(worker, signal.SIGKILL)

    def _worker_ended(self, worker: EnvWorker, end: ProcessEnd) -> None:
        """Fail the requests of a worker, and replace it."""
        limit = f"no result after {self._time_limit:g} s: its process was killed"
        message = limit if end.timed_out else end.describe("env processes")
        self._num_fast_deaths = 0 if worker.num_executed else self._num_fast_deaths + 1
        if self._num_fast_deaths > MAX_FAST_DEATHS * self._num_workers:
            self.error = f"worker processes do not start: {message}"
        worker.fail("Timeout" if end.timed_out else "ProcessDied", message)
        os.close(worker.shared)
        self._fork_missing()

    async def _kill_hanging(self) -> None:
        while True:
            await asyncio.sleep(self._time_limit / CHECKS_PER_TIME_LIMIT)
            for worker in [candidate for candidate in self if candidate.is_hanging(self._time_limit)]:
                self.end(worker, ProcessEnd(timed_out=True))
            self._fork_missing()


def check_platform() -> None:
    """
    Raises:
        MachineError: worker processes need functions of Linux.
    """
    if not hasattr(os, "memfd_create"):
        raise MachineError(
            "the environment service runs on Linux only", "start it on another machine or in a container"
        )
