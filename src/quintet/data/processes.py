"""Work that several processes share: each is asked in a line of JSON and answers in one."""

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

__all__ = ["Processes", "serve"]

AHEAD = 2
"""Requests that a process has at a time: one it works at, one that waits."""
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Worker:
    process: subprocess.Popen[str]
    questions: IO[str]
    answers: IO[str]
    log: IO[str]

    def send(self, message: Message) -> None:
        try:
            self.questions.write(json.dumps(message) + "\n")
            self.questions.flush()
        except BrokenPipeError:
            raise self.died() from None

    def receive(self) -> Any:
        line = self.answers.readline()
        if not line:
            raise self.died()
        answer = json.loads(line)
        if "fault" in answer:
            told = answer["fault"]
            raise ConfigError(told["message"], key=told["key"], source=told["source"], hint=told["hint"])
        return answer["answer"]

    def died(self) -> MachineError:
        """How it ended, and the last that it said."""
        status = self.process.wait()
        self.log.seek(0)
        said = "\n  ".join(self.log.read().strip().splitlines()[-5:])
        told = f"a process that prepares data ended with status {status}"
        return MachineError(told, said or "it said nothing; was it killed for want of memory?")


class Processes:
    """`count` processes that run `module`, each of which calls `serve`; ended by `close`.

    Who asks and how many there are changes no answer.
    """

    def __init__(self, module: str, setup: Message, count: int) -> None:
        self._workers = [_start(module) for _ in range(count)]
        self._waiting: deque[_Worker] = deque()
        self._asked = 0
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

    def ask(self, request: Message) -> None:
        """Hand a request to the next process; its answer comes in the order of the requests."""
        worker = self._workers[self._asked % len(self._workers)]
        self._asked += 1
        worker.send(request)
        self._waiting.append(worker)

    def answer(self) -> Any:
        """The answer to the oldest request that has none yet.

        Raises:
            UserError: what the process was stopped by.
        """
        return self._waiting.popleft().receive()

    def map(self, requests: Iterable[Message]) -> Iterator[Any]:
        """The answers in the order of the requests, of which no more are taken than are worked at."""
        for request in requests:
            if len(self._waiting) >= AHEAD * len(self._workers):
                yield self.answer()
            self.ask(request)
        while self._waiting:
            yield self.answer()

    def close(self) -> None:
        """End them all, at work or not."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.communicate()
            worker.log.close()
        self._workers = []


def _start(module: str) -> _Worker:
    # a file and not a pipe: nobody reads it while the process works, and a full pipe would stop it
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
        raise AssertionError("both were asked for")
    return _Worker(process, process.stdin, process.stdout, log)


def serve(prepare: Callable[[Message], Callable[[Message], Any]]) -> None:
    """Be such a process: `prepare` takes the first line and gives what answers the others, until there are none.

    What the user can mend is handed back as data. Libraries that print are heard on standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    handle: Callable[[Message], Any] | None = None
    for line in sys.stdin:
        message = json.loads(line)
        if handle is None:
            handle = _prepared(prepare, message)
            continue
        try:
            answer = {"answer": handle(message)}
        except UserError as error:
            answer = {"fault": _told(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _prepared(prepare: Callable[[Message], Callable[[Message], Any]], setup: Message) -> Callable[[Message], Any]:
    try:
        return prepare(setup)
    except UserError as error:
        fault = error

    def refuse(_: Message) -> Any:
        raise fault

    return refuse


def _told(error: UserError) -> dict[str, str | None]:
    key, source = getattr(error, "key", None), getattr(error, "source", None)
    return {"message": error.message, "hint": error.hint, "key": key, "source": source}
