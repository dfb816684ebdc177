"""Pool of worker processes that exchange requests and results as lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Self

from quintet.errors import ConfigError, MachineError, UserError

MAX_PENDING_PER_WORKER = 2
"""Requests per worker: one in progress, one queued."""
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Worker:
    process: subprocess.Popen[str]
    requests: IO[str]
    results: IO[str]
    log: IO[str]

    def send(self, message: Message) -> None:
        try:
            self.requests.write(json.dumps(message) + "\n")
            self.requests.flush()
        except BrokenPipeError:
            raise self.exit_error() from None

    def receive(self) -> Any:
        line = self.results.readline()
        if not line:
            raise self.exit_error()
        result = json.loads(line)
        if "error" in result:
            error = result["error"]
            raise ConfigError(error["message"], key=error["key"], source=error["source"], hint=error["hint"])
        return result["result"]

    def exit_error(self) -> MachineError:
        """Return an error with the worker's exit status and last output."""
        status = self.process.wait()
        self.log.seek(0)
        output = "\n  ".join(self.log.read().strip().splitlines()[-5:])
        message = f"a data worker process ended with status {status}"
        return MachineError(message, output or "it printed nothing; it may have been killed for lack of memory")


class WorkerPool:
    """`count` processes that run `module`, which must call `serve`; terminated by `close`.

    Results do not depend on the number of processes.
    """

    def __init__(self, module: str, setup: Message, count: int, tokenizer: Any = None) -> None:
        """`tokenizer` is saved to a temporary directory, whose path is added to `setup` with the tokenizer's name."""
        self._tokenizer_directory = tempfile.TemporaryDirectory(prefix="quintet-tokenizer-")
        if tokenizer is not None:
            # saved from memory: it may have another chat template than its files
            tokenizer.save_pretrained(self._tokenizer_directory.name)
            setup = {**setup, "tokenizer": self._tokenizer_directory.name, "tokenizer_name": tokenizer.name_or_path}
        self._workers = [_start(module) for _ in range(count)]
        self._pending_workers: deque[_Worker] = deque()
        self._num_submitted = 0
        try:
            for worker in self._workers:
                worker.send(setup)
        except UserError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: Message) -> None:
        """Send a request to the next worker."""
        worker = self._workers[self._num_submitted % len(self._workers)]
        self._num_submitted += 1
        worker.send(request)
        self._pending_workers.append(worker)

    def result(self) -> Any:
        """Return the result of the oldest pending request.

        Raises:
            UserError: the request failed, or the worker died.
        """
        return self._pending_workers.popleft().receive()

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
        for worker in self._workers:
            worker.process.kill()
            worker.process.communicate()
            worker.log.close()
        self._workers = []


def _start(module: str) -> _Worker:
    # a file, not a pipe: it is not read while the worker runs, and a full pipe would block it
    log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by `close`
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        encoding="utf-8",
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
    )
    if process.stdin is None or process.stdout is None:
        raise AssertionError("stdin and stdout are pipes")
    return _Worker(process, process.stdin, process.stdout, log)


def serve(create_handler: Callable[[Message], Callable[[Message], Any]]) -> None:
    """Run a worker process until its input ends.

    `create_handler` is called with the first message and returns the function that handles the others. `UserError` is
    returned to the pool as data. Output of libraries is redirected to standard error.
    """
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    handle: Callable[[Message], Any] | None = None
    for line in sys.stdin:
        message = json.loads(line)
        if handle is None:
            handle = _handler_or_error(create_handler, message)
            continue
        try:
            result = {"result": handle(message)}
        except UserError as error:
            result = {"error": _error_fields(error)}
        results.write(json.dumps(result) + "\n")
        results.flush()


def _handler_or_error(
    create_handler: Callable[[Message], Callable[[Message], Any]], setup: Message
) -> Callable[[Message], Any]:
    try:
        return create_handler(setup)
    except UserError as error:
        creation_error = error

    def raise_error(_: Message) -> Any:
        raise creation_error

    return raise_error


def _error_fields(error: UserError) -> dict[str, str | None]:
    key, source = getattr(error, "key", None), getattr(error, "source", None)
    return {"message": error.message, "hint": error.hint, "key": key, "source": source}
