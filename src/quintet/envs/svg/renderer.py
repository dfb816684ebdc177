"""Client of the worker processes that render SVG code."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np

from quintet import hardware
from quintet.envs.svg.document_check import MAX_CHARS, InvalidSvgError
from quintet.envs.svg.render_worker import CPU_SECONDS
from quintet.errors import MachineError
from quintet.sandbox.json_lines import LineBuffer, decode, encode
from quintet.sandbox.sandboxed_process import describe_exit, receive_available
from quintet.sandbox.worker_processes import WorkerProcesses, close_fork_servers

WORKER: Final = "quintet.envs.svg.render_worker"
MAX_WORKERS: Final = 4
TIMEOUT_SECONDS: Final = 60.0
"""Time limit of one image, beyond its CPU time: for a machine that is busy or a process that is stopped."""
START_SECONDS: Final = 60.0
MAX_FAILED_STARTS: Final = 3
OUT_OF_TIME: Final = f"rendering it takes more than {CPU_SECONDS:g} s of CPU time"

RenderResult = np.ndarray | InvalidSvgError
"""RGB `uint8[size, size, 3]`, or why there is none."""


@dataclass(slots=True, eq=False)
class _RenderProcess:
    """Worker process and the number of the SVG that it renders."""

    number: int
    connection: socket.socket
    ended: bool = False
    """The connection has ended."""
    ready: bool = False
    job: int | None = None
    deadline: float = field(default_factory=lambda: time.monotonic() + START_SECONDS)
    lines: LineBuffer = field(default_factory=LineBuffer)


class SvgRenderer:
    """Worker processes that render; one that dies or exceeds its limits is replaced. For one thread at a time."""

    def __init__(self, max_workers: int = MAX_WORKERS) -> None:
        self._max_workers = max(1, min(max_workers, hardware.cpu_cores()))
        self._processes = WorkerProcesses(f"{WORKER}:work", self._receive, self._process_died, self._restart)
        self._results: list[RenderResult | None] = []
        self._queue: deque[int] = deque()
        self._size = 0
        self._num_failed_starts = 0
        self._lock = threading.Lock()
        weakref.finalize(self, close_fork_servers, self._processes.fork_servers, os.getpid())

    def render(self, texts: Sequence[str], size: int) -> list[RenderResult]:
        """Return the image of each text, or an `InvalidSvgError` if it is not valid SVG or exceeds a limit.

        Raises:
            MachineError: no worker process can run.
        """
        with self._lock:
            self._size = size
            self._results = [_too_long(text) for text in texts]
            self._queue = deque(index for index, result in enumerate(self._results) if result is None)
            while any(result is None for result in self._results):
                self._assign(texts)
                self._processes.wait(self._seconds_to_deadline())
                self._kill_timed_out()
            return [result for result in self._results if result is not None]

    def close(self) -> None:
        """End all processes."""
        self._processes.close()

    def _assign(self, texts: Sequence[str]) -> None:
        for process in self._processes:
            if self._queue and process.ready and process.job is None:
                self._send(process, self._queue.popleft(), texts)
        starting = sum(not process.ready for process in self._processes)
        for _ in range(min(len(self._queue) - starting, self._max_workers - len(self._processes))):
            self._processes.fork(_RenderProcess, {}, [WORKER])

    def _send(self, process: _RenderProcess, index: int, texts: Sequence[str]) -> None:
        process.job, process.deadline = index, time.monotonic() + TIMEOUT_SECONDS
        try:
            process.connection.settimeout(TIMEOUT_SECONDS)
            process.connection.sendall(encode({"svg": texts[index], "size": self._size}))
        except OSError:
            # it ended while it was idle
            self._processes.kill(process)
            self._queue.appendleft(index)
        else:
            process.connection.setblocking(False)

    def _seconds_to_deadline(self) -> float | None:
        """Return the time until the first time limit; None if no process works."""
        deadlines = [process.deadline for process in self._processes if process.job is not None or not process.ready]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _receive(self, process: _RenderProcess) -> None:
        while chunk := receive_available(process.connection):
            for line in process.lines.feed(chunk):
                self._handle(process, decode(line))
        process.ended = process.ended or chunk is not None

    def _handle(self, process: _RenderProcess, reply: Mapping[str, Any]) -> None:
        if "broken" in reply:
            raise MachineError(f"SVG code cannot be rendered: {reply['broken']['message']}", reply["broken"]["hint"])
        if "ready" in reply:
            process.ready, self._num_failed_starts = True, 0
        elif process.job is not None:
            self._results[process.job] = self._result(reply)
            process.job = None

    def _result(self, reply: Mapping[str, Any]) -> RenderResult:
        if "invalid" in reply:
            return InvalidSvgError(str(reply["invalid"]))
        return np.frombuffer(reply["pixels"], np.uint8).reshape(self._size, self._size, 3)

    def _process_died(self, process: _RenderProcess, status: int) -> None:
        self._end(
            process, OUT_OF_TIME if status == -signal.SIGPROF else f"rendering it failed: {describe_exit(status)}"
        )

    def _kill_timed_out(self) -> None:
        now = time.monotonic()
        for process in self._processes:
            if now >= (process.deadline if process.job is not None or not process.ready else math.inf):
                self._end(process, f"there is no image after {TIMEOUT_SECONDS:g} s")

    def _end(self, process: _RenderProcess, reason: str) -> None:
        """Kill a process; the SVG that it renders is invalid.

        Raises:
            MachineError: processes end before they are ready.
        """
        self._processes.kill(process)
        if process.job is not None:
            self._results[process.job] = InvalidSvgError(reason)
        elif not process.ready:
            self._start_failed(reason)

    def _restart(self) -> None:
        """Continue after the death of the fork server, with which all its processes have died."""
        for process in self._processes:
            self._processes.kill(process)
            if process.job is not None:
                self._queue.appendleft(process.job)
        self._start_failed("their fork server has died")

    def _start_failed(self, reason: str) -> None:
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            raise MachineError(f"processes that render SVG code do not start: {reason}")


def _too_long(text: str) -> InvalidSvgError | None:
    return InvalidSvgError(f"it has more than {MAX_CHARS} characters") if len(text) > MAX_CHARS else None


def render_svgs(texts: Sequence[str], size: int) -> list[RenderResult]:
    """Return the image of each text by the renderer of this process; see `SvgRenderer.render`."""
    return _renderer(os.getpid()).render(texts, size)


@lru_cache(maxsize=1)
def _renderer(_: int) -> SvgRenderer:
    return SvgRenderer()
