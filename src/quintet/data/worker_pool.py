"""Pool of worker processes that exchange requests and results as lines of JSON."""

from __future__ import annotations

import os
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Self

from quintet.errors import ConfigError, MachineError, UserError
from quintet.sandbox.json_lines import LineBuffer, decode, encode
from quintet.sandbox.sandboxed_process import describe_exit, error_message
from quintet.sandbox.worker_processes import ProcessEnd, WorkerProcess, WorkerProcesses

WORKER = "quintet.data.worker_pool:work"
MAX_PENDING_PER_WORKER = 2
"""Requests per worker: one in progress, one queued."""
Message = Mapping[str, Any]
CreateHandler = Callable[[Message], Callable[[Message], Any]]
"""Function of a module that returns the handler of requests; called in each worker with the setup."""


@dataclass(slots=True, eq=False)
class _DataProcess(WorkerProcess):
    """Worker process and its replies that are not taken yet."""

    replies: deque[Message] = field(default_factory=deque)
    end: ProcessEnd | None = None

    def receive(self) -> None:
        self.replies.extend(self.receive_messages())

    def set_end(self, end: ProcessEnd) -> None:
        self.end = end


class WorkerPool:
    """`count` processes with the handlers that `create_handler(setup)` returns; terminated by `close`.

    Results do not depend on the number of processes.
    """

    def __init__(self, create_handler: CreateHandler, setup: Message, count: int, tokenizer: Any = None) -> None:
        """`tokenizer` is saved to a temporary directory, whose path is added to `setup` with the tokenizer's name."""
        self._tokenizer_directory = tempfile.TemporaryDirectory(prefix="quintet-tokenizer-")
        if tokenizer is not None:
            # saved from memory: it may have another chat template than its files
            tokenizer.save_pretrained(self._tokenizer_directory.name)
            setup = {**setup, "tokenizer": self._tokenizer_directory.name, "tokenizer_name": tokenizer.name_or_path}
        task = {"module": create_handler.__module__, "function": create_handler.__name__, "setup": setup}
        self._processes = WorkerProcesses(WORKER, _DataProcess.receive, _DataProcess.set_end)
        self._workers = [self._processes.fork(_DataProcess, task) for _ in range(count)]
        self._pending_workers: deque[_DataProcess | None] = deque()
        self._num_submitted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: Message) -> None:
        """Send a request to the next worker."""
        worker = self._workers[self._num_submitted % len(self._workers)]
        self._num_submitted += 1
        if worker is not None and worker.end is None:
            self._processes.send(worker, encode(request))
        self._pending_workers.append(worker)

    def result(self) -> Any:
        """Return the result of the oldest pending request.

        Raises:
            UserError: the request failed, or the worker died.
        """
        worker = self._pending_workers.popleft()
        while worker is not None and not worker.replies and worker.end is None:
            self._processes.wait()
        if worker is None or not worker.replies:
            status = None if worker is None or worker.end is None else worker.end.status
            problem = "its fork server has died" if status is None else describe_exit(status)
            raise MachineError(f"a data worker failed: {problem}", "see its output above")
        reply = worker.replies.popleft()
        if error := reply.get("user_error"):
            raise ConfigError(error["message"], key=error["key"], source=error["source"], hint=error["hint"])
        if error := reply.get("error"):
            raise MachineError(f"a data worker failed: {error['kind']}: {error['message']}")
        return reply["result"]

    def map(self, requests: Iterable[Message]) -> Iterator[Any]:
        """Yield results in the order of the requests, which are consumed as workers become free."""
        for request in requests:
            if len(self._pending_workers) >= MAX_PENDING_PER_WORKER * len(self._workers):
                yield self.result()
            self.submit(request)
        while self._pending_workers:
            yield self.result()

    def close(self) -> None:
        """Kill all workers."""
        self._tokenizer_directory.cleanup()
        self._processes.close()


def work(connection: socket.socket, task: Message) -> None:
    """Handle requests until the connection ends; errors are returned to the pool as data."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    create = cache(lambda: getattr(import_module(task["module"]), task["function"])(task["setup"]))
    for line in LineBuffer().read(connection):
        connection.sendall(encode(_reply(create, decode(line))))


def _reply(create: Callable[[], Callable[[Message], Any]], request: Message) -> Message:
    try:
        return {"result": create()(request)}
    except UserError as error:
        key, source = getattr(error, "key", None), getattr(error, "source", None)
        return {"user_error": {"message": error.message, "hint": error.hint, "key": key, "source": source}}
    except Exception as error:  # noqa: BLE001 - any error is reported in the run
        return {"error": error_message(error)}
