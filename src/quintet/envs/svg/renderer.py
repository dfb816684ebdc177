"""Client of the worker processes that render SVG code."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from quintet import hardware
from quintet.envs.svg.document_check import MAX_CHARS, InvalidSvgError
from quintet.envs.svg.render_worker import CPU_SECONDS
from quintet.errors import MachineError
from quintet.sandbox.json_lines import encode
from quintet.sandbox.worker_processes import MAX_FAILED_STARTS, ProcessEnd, WorkerProcess, WorkerProcesses

WORKER: Final = "quintet.envs.svg.render_worker"
MAX_WORKERS: Final = 4
TIMEOUT_SECONDS: Final = 60.0
"""Time limit of one image, beyond its CPU time: for a machine that is busy or a process that is stopped."""
START_SECONDS: Final = 60.0
OUT_OF_TIME: Final = f"rendering it takes more than {CPU_SECONDS:g} s of CPU time"

RenderResult = np.ndarray | InvalidSvgError
"""RGB `uint8[size, size, 3]`, or why there is none."""


@dataclass(slots=True, eq=False)
class _RenderProcess(WorkerProcess):
    """Worker process and the number of the SVG that it renders."""

    job: int | None = None

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + START_SECONDS


class SvgRenderer:
    """Worker processes that render; one that dies or exceeds its limits is replaced. For one thread at a time."""

    def __init__(self, max_workers: int = MAX_WORKERS) -> None:
        self._max_workers = max(1, min(max_workers, hardware.cpu_cores()))
        self._processes = WorkerProcesses(f"{WORKER}:work", self._receive, self._process_ended, self._server_died)
        self._results: list[RenderResult | None] = []
        self._queue: deque[int] = deque()
        self._size = 0
        self._num_failed_starts = 0
        self._lock = threading.Lock()

    def render(self, texts: Sequence[str], size: int) -> list[RenderResult]:
        """Return the image of each text, or an `InvalidSvgError` if it is not valid SVG or exceeds a limit.

        Raises:
            MachineError: no worker process can run.
        """
        with self._lock:
            self._size = size
            too_long = InvalidSvgError(f"it has more than {MAX_CHARS} characters")
            self._results = [too_long if len(text) > MAX_CHARS else None for text in texts]
            self._queue = deque(index for index, result in enumerate(self._results) if result is None)
            while any(result is None for result in self._results):
                self._assign(texts)
                self._processes.wait()
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
        if not process.send(encode({"svg": texts[index], "size": self._size}), TIMEOUT_SECONDS):
            # it ended while it was idle
            self._processes.kill(process)
            self._queue.appendleft(index)

    def _receive(self, process: _RenderProcess) -> None:
        for reply in process.receive_messages():
            process.deadline = math.inf
            self._handle(process, reply)

    def _handle(self, process: _RenderProcess, reply: Mapping[str, Any]) -> None:
        if "broken" in reply:
            raise MachineError(f"SVG code cannot be rendered: {reply['broken']['message']}", reply["broken"]["hint"])
        if "ready" in reply:
            self._processes.mark_ready(process)
            self._num_failed_starts = 0
        elif process.job is not None:
            self._results[process.job] = self._result(reply)
            process.job = None

    def _result(self, reply: Mapping[str, Any]) -> RenderResult:
        if "invalid" in reply:
            return InvalidSvgError(str(reply["invalid"]))
        return np.frombuffer(reply["pixels"], np.uint8).reshape(self._size, self._size, 3)

    def _process_ended(self, process: _RenderProcess, end: ProcessEnd) -> None:
        """Report the SVG that the process renders as invalid, or queue it again if the fork server has died.

        Raises:
            MachineError: processes end before they are ready.
        """
        if end.with_server:
            self._queue.extendleft([] if process.job is None else [process.job])
        elif process.job is not None:
            self._results[process.job] = InvalidSvgError(_reason(end))
        elif not process.ready:
            self._start_failed(_reason(end))

    def _server_died(self) -> None:
        self._start_failed("their fork server has died")

    def _start_failed(self, reason: str) -> None:
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            raise MachineError(f"processes that render SVG code do not start: {reason}")


def _reason(end: ProcessEnd) -> str:
    if end.timed_out:
        return f"there is no image after {TIMEOUT_SECONDS:g} s"
    return OUT_OF_TIME if end.status == -signal.SIGPROF else f"rendering it failed: {end.describe('them')}"


def render_svgs(texts: Sequence[str], size: int) -> list[RenderResult]:
    """Return the image of each text by the renderer of this process; see `SvgRenderer.render`."""
    return _renderer(os.getpid()).render(texts, size)


@lru_cache(maxsize=1)
def _renderer(_: int) -> SvgRenderer:
    return SvgRenderer()
