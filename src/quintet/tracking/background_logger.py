"""Logger that runs another one in a thread, so that a service that fails or hangs neither ends nor slows a run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quintet.tracking.generations import LoggedGeneration
from quintet.tracking.logger import Logger, LoggerContext

MAX_WAITING_RECORDS = 256
"""Records that wait for a logger; further ones are dropped."""
CLOSE_SECONDS = 30.0
"""How long the end of a run waits for a logger."""


class BackgroundLogger:
    """Logger whose records are passed on by a thread. Its first problem of each kind is reported."""

    def __init__(self, name: str, factory: Callable[[LoggerContext], Logger], context: LoggerContext) -> None:
        """Start the thread, which builds the logger.

        Args:
            name: Name of the logger in messages.
            factory: Builds the logger; if that raises, records are discarded.
            context: Argument of `factory`, whose reporter shows problems.
        """
        self._name, self._factory, self._context = name, factory, context
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MAX_WAITING_RECORDS)
        """Methods of the logger and their arguments."""
        self._reported: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def supports(self, method: str) -> bool:
        """Return whether the logger has a method, such as `log_generations`."""
        return hasattr(self._factory, method)

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        self._submit("log", step, time_seconds, dict(metrics))

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> None:
        self._submit("log_generations", step, generations)

    def log_video(self, step: int, name: str, path: Path) -> None:
        self._submit("log_video", step, name, path)

    def close(self) -> None:
        """Wait until all records are passed on, at most `CLOSE_SECONDS`."""
        try:
            self._queue.put(("close", ()), timeout=CLOSE_SECONDS if self._thread.is_alive() else 0)
            self._thread.join(CLOSE_SECONDS)
        except queue.Full:
            pass
        if self._thread.is_alive():
            missing = f", {self._queue.qsize()} records are missing" if self._queue.qsize() else ""
            self._report("end", f"does not end within {CLOSE_SECONDS:g} s{missing}")

    def _submit(self, method: str, *arguments: Any) -> None:
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            self._report("full", f"{MAX_WAITING_RECORDS} records wait for it; further ones are dropped")

    def _run(self) -> None:
        logger = self._call(lambda: self._factory(self._context))
        method = ""
        while method != "close":
            method, arguments = self._queue.get()
            if logger is not None:
                self._call(getattr(logger, method), *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call, None if it raises."""
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a logger's library raises must not end a run
            self._report("error", f"{type(error).__name__}: {error}")
            return None

    def _report(self, kind: str, problem: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._context.reporter.note(f"logger {self._name}: {problem}")
