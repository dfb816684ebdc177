"""Pool of worker processes that exchange requests and results as lines of JSON."""

from __future__ import annotations

import os
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, Self

from quintet.errors import ConfigError, MachineError, UserError
from quintet.sandbox.json_lines import LineBuffer, decode, encode
from quintet.sandbox.sandboxed_process import ForkServer, describe_exit, error_message

WORKER = "quintet.data.worker_pool:work"
MAX_PENDING_PER_WORKER = 2
"""Requests per worker: one in progress, one queued."""
Message = Mapping[str, Any]
CreateHandler = Callable[[Message], Callable[[Message], Any]]
"""Function of a module that returns the handler of requests; called in each worker with the setup."""


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
        self._fork_server = ForkServer(WORKER)
        self._connections = [self._fork_server.fork(number, task) for number in range(count)]
        for connection in self._connections:
            connection.setblocking(True)
        self._replies = [LineBuffer().read(connection) for connection in self._connections]
        self._pending_workers: deque[int] = deque()
        self._num_submitted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: Message) -> None:
        """Send a request to the next worker."""
        worker = self._num_submitted % len(self._connections)
        self._num_submitted += 1
        with suppress(OSError):  # `result` reports that it has died
            self._connections[worker].sendall(encode(request))
        self._pending_workers.append(worker)

    def result(self) -> Any:
        """Return the result of the oldest pending request.

        Raises:
            UserError: the request failed, or the worker died.
        """
        worker, line = self._pending_workers.popleft(), None
        with suppress(OSError):
            line = next(self._replies[worker], None)
        if line is None:
            raise self._exit_error(worker)
        reply = decode(line)
        if error := reply.get("user_error"):
            raise ConfigError(error["message"], key=error["key"], source=error["source"], hint=error["hint"])
        if error := reply.get("error"):
            raise MachineError(f"a data worker failed: {error['kind']}: {error['message']}")
        return reply["result"]

    def map(self, requests: Iterable[Message]) -> Iterator[Any]:
        """Yield results in the order of the requests, which are consumed as workers become free."""
        for request in requests:
            if len(self._pending_workers) >= MAX_PENDING_PER_WORKER * len(self._connections):
                yield self.result()
            self.submit(request)
        while self._pending_workers:
            yield self.result()

    def close(self) -> None:
        """Kill all workers."""
        self._tokenizer_directory.cleanup()
        for connection in self._connections:
            connection.close()
        self._fork_server.close()

    def _exit_error(self, worker: int) -> MachineError:
        """Return an error with the worker's exit status."""
        statuses: dict[int, int] = {}
        with suppress(OSError):
            while worker not in statuses:
                statuses |= {message["died"]: message["status"] for message in self._fork_server.exits()}
        status = statuses.get(worker)
        problem = "its fork server has died" if status is None else describe_exit(status)
        return MachineError(f"a data worker failed: {problem}", "see its output above")


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
