"""Worker processes of an environment service, in the event loop of the server."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from quintet.envs.service.payload import Format, encode_payload
from quintet.errors import MachineError
from quintet.runtime.env_service.env_worker import LENGTH, PROGRESS
from quintet.sandbox.sandboxed_process import ForkServer, describe_exit

WORKER = "quintet.runtime.env_service.env_worker"
CHECKS_PER_TIME_LIMIT = 8
LAST_RESULT_SECONDS = 0.5
"""How long the last results of a process may take to arrive after its end."""
REPLACEMENT_SECONDS = 10.0
"""How long a request waits for a worker process if all have died."""
MAX_FAST_DEATHS = 5
"""Consecutive deaths of worker processes that have executed nothing."""


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


class EnvWorker(asyncio.Protocol):
    """Connection to a worker process."""

    def __init__(self, number: int, pool: WorkerPool) -> None:
        self.number = number
        self.envs: set[int] = set()
        """Numbers of the envs that it has."""
        self.status: int | None = None
        """Exit status, if it has ended."""
        self.is_closed = False
        """Whether the last of its results has arrived."""
        self._pool = pool
        self._batches: deque[Batch] = deque()
        self._input = bytearray()
        self._num_received = self._last_progress = 0
        self._progress_at = time.monotonic()
        self._shared = os.memfd_create("quintet-env-worker")
        os.ftruncate(self._shared, PROGRESS.size)
        self._progress = mmap.mmap(self._shared, PROGRESS.size)
        self._transport: asyncio.Transport | None = None

    @property
    def progress_path(self) -> str:
        """Path of the shared memory for a process of the same user."""
        return f"/proc/{os.getpid()}/fd/{self._shared}"

    @property
    def num_executed(self) -> int:
        """Number of requests that the process has executed."""
        return int(PROGRESS.unpack_from(self._progress)[0])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport  # type: ignore[assignment]  # a socket's transport

    def execute(self, requests: Sequence[Sequence[Any]], form: Format) -> Batch:
        """Send requests; the batch gets their results."""
        batch = Batch(form, [request[1] for request in requests])
        if not self._batches:
            self._progress_at = time.monotonic()
        self._batches.append(batch)
        body = json.dumps({"requests": requests, "format": form}).encode()
        if self._transport is not None:
            self._transport.write(LENGTH.pack(len(body)) + body)
        return batch

    def data_received(self, data: bytes) -> None:
        """Pass on the results that are complete."""
        self._input += data
        start = 0
        while len(self._input) - start >= LENGTH.size:
            end = start + LENGTH.size + LENGTH.unpack_from(self._input, start)[0]
            if len(self._input) < end:
                break
            self._add_result(bytes(self._input[start + LENGTH.size : end]))
            start = end
        del self._input[:start]

    def _add_result(self, result: bytes) -> None:
        self._num_received += 1
        self._batches[0].add(result)
        if self._batches[0].done.is_set():
            self._batches.popleft()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`; the fork server reports the exit status."""
        self.is_closed = True
        self._pool.connection_ended(self)

    def is_hanging(self, seconds: float) -> bool:
        """Whether it has executed no request for this time, although there are some."""
        executed, now = self.num_executed, time.monotonic()
        if executed != self._last_progress or not self._batches:
            self._last_progress, self._progress_at = executed, now
        return now - self._progress_at > seconds

    def fail(self, error_type: str, message: str) -> None:
        """Fail the request that was being executed; the results of all others are lost."""
        failed_request = self.num_executed
        while self._batches:
            batch = self._batches[0]
            result: dict[str, Any] = {"lost": f"its worker process was lost with another environment: {message}"}
            if self._num_received == failed_request:
                where = "reset" if batch.methods[len(batch.results)] in ("start", "robots_start") else "step"
                result = {"failure": [where, error_type, message]}
            self._add_result(encode_payload(result, batch.form))

    def close(self) -> None:
        """Close the connection and the shared memory."""
        if self._transport is not None:
            self._transport.abort()
        with suppress(OSError):
            os.close(self._shared)


class WorkerPool:
    """A fixed number of worker processes; dead ones are replaced, and hanging ones killed."""

    def __init__(self, num_workers: int, modules: Sequence[str], time_limit: float, memory_bytes: int | None) -> None:
        """`modules` are imported before processes are forked; `time_limit` of one request in seconds."""
        self._num_workers, self._modules = num_workers, [WORKER, *modules]
        self._time_limit, self._memory_bytes = time_limit, memory_bytes
        self.workers: dict[int, EnvWorker] = {}
        self._num_forked = self._num_fast_deaths = 0
        self._fork_server: ForkServer | None = None
        self._watch: asyncio.Task[None] | None = None
        self._forks: set[asyncio.Task[None]] = set()
        self.error: str | None = None
        """Why no worker process can run."""

    async def start(self) -> None:
        """Start the fork server and the worker processes."""
        self._start_fork_server()
        await self._fork_missing()
        self._watch = asyncio.create_task(self._kill_hanging())

    async def wait_for_worker(self) -> None:
        """Wait until a worker process runs, for a limited time; they are being replaced if all have died."""
        deadline = time.monotonic() + REPLACEMENT_SECONDS
        while not self.workers and self.error is None and time.monotonic() < deadline:
            await asyncio.sleep(REPLACEMENT_SECONDS / 1000)

    def least_loaded(self) -> EnvWorker | None:
        """Return the worker with the fewest envs; None if none runs."""
        return min(self.workers.values(), key=lambda worker: (len(worker.envs), worker.number), default=None)

    def close(self) -> None:
        """End all processes."""
        if self._watch is not None:
            self._watch.cancel()
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()
        self._stop_fork_server()

    def connection_ended(self, worker: EnvWorker) -> None:
        """Replace a worker whose last result has arrived; kill it if it has not ended."""
        if worker.status is None:
            self._signal(worker)
        else:
            self._replace(worker)

    def _start_fork_server(self) -> None:
        self._fork_server = ForkServer(f"{WORKER}:work")
        self._fork_server.load(self._modules)
        asyncio.get_running_loop().add_reader(self._fork_server.connection, self._receive_exits)

    def _stop_fork_server(self) -> None:
        if self._fork_server is not None:
            asyncio.get_running_loop().remove_reader(self._fork_server.connection)
            self._fork_server.close()
            self._fork_server = None

    async def _fork_missing(self) -> None:
        """Fork processes up to the number of workers."""
        while self._fork_server is not None and len(self.workers) < self._num_workers:
            self._num_forked += 1
            worker = EnvWorker(self._num_forked, self)
            setup = {"progress": worker.progress_path, "memory_bytes": self._memory_bytes}
            try:
                connection = self._fork_server.fork(worker.number, setup)
            except OSError:
                # the fork server has died, which `_receive_exits` notices
                worker.close()
                return
            self.workers[worker.number] = worker
            await _connect(worker, connection)

    def _receive_exits(self) -> None:
        if self._fork_server is None:
            return
        try:
            for message in self._fork_server.exits():
                self._ended(message["died"], message["status"])
        except OSError:
            self._restart_fork_server()

    def _ended(self, number: int, status: int) -> None:
        """Replace a worker that has ended, after its last result, which may still be in the connection."""
        worker = self.workers.get(number)
        if worker is not None:
            worker.status = status
            delay = 0.0 if worker.is_closed else LAST_RESULT_SECONDS
            asyncio.get_running_loop().call_later(delay, self._replace, worker)

    def _replace(self, worker: EnvWorker) -> None:
        if self.workers.pop(worker.number, None) is not None and worker.status is not None:
            self._fail(worker, "ProcessDied", describe_exit(worker.status))
            self._fork_soon()

    def _fork_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self._fork_missing())
        self._forks.add(task)
        task.add_done_callback(self._forks.discard)

    def _fail(self, worker: EnvWorker, error_type: str, message: str) -> None:
        self._num_fast_deaths = 0 if worker.num_executed else self._num_fast_deaths + 1
        if self._num_fast_deaths > MAX_FAST_DEATHS * self._num_workers:
            self.error = f"worker processes do not start: {message}"
            self._stop_fork_server()
        worker.fail(error_type, message)
        worker.close()

    def _restart_fork_server(self) -> None:
        self._stop_fork_server()
        lost, self.workers = list(self.workers.values()), {}
        for worker in lost:
            self._fail(worker, "ProcessDied", "the fork server of env processes has died")
        if self.error is None:
            self._start_fork_server()
            self._fork_soon()

    async def _kill_hanging(self) -> None:
        while True:
            await asyncio.sleep(self._time_limit / CHECKS_PER_TIME_LIMIT)
            for worker in [candidate for candidate in self.workers.values() if candidate.is_hanging(self._time_limit)]:
                del self.workers[worker.number]
                self._signal(worker)
                self._fail(worker, "Timeout", f"no result after {self._time_limit:g} s: its process was killed")
            await self._fork_missing()

    def _signal(self, worker: EnvWorker) -> None:
        with suppress(OSError):
            if self._fork_server is not None:
                self._fork_server.signal(worker.number, signal.SIGKILL)


async def _connect(worker: EnvWorker, connection: socket.socket) -> None:
    await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=connection)


def check_platform() -> None:
    """
    Raises:
        MachineError: worker processes need functions of Linux.
    """
    if not hasattr(os, "memfd_create"):
        raise MachineError(
            "the environment service runs on Linux only", "start it on another machine or in a container"
        )
