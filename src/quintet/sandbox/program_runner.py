"""Runs a model's programs in confined processes, and the tests of data rows beside them.

See `quintet.sandbox.program_worker` for the processes. Each lives for one test.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from quintet.sandbox import seccomp
from quintet.sandbox.plain_data import Codec, DataError
from quintet.sandbox.sandboxed_process import ForkServer

WORKER: Final = "quintet.sandbox.program_worker"
MEMORY_BYTES: Final = 1 << 30
"""Address space limit of a process."""
MAX_RESULT_BYTES: Final = 16 << 20
"""Limit of the encoded result of a call."""
ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True, slots=True)
class Run:
    """Exit status (negative: a signal; None: timeout) and output of a program."""

    status: int | None
    output: str


class NoResultError(Exception):
    """A program has no result: it raised, ended, exceeded a limit, or returned something that is no data."""


class ProgramRunner:
    """Starts processes of a fork server and kills them when their time is over."""

    def __init__(self) -> None:
        path = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        self._server = ForkServer(f"{WORKER}:work", {**ENVIRONMENT, **path})
        self._server.load([WORKER])
        self._count = 0
        self._statuses: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether the fork server runs."""
        return self._server.is_alive

    def close(self) -> None:
        """End all processes."""
        self._server.close()

    def run_script(self, source: str, stdin: str, seconds: float, *, with_errors: bool = False) -> Run:
        """Run a program as `__main__`; `with_errors` includes standard error in the output."""
        deadline = time.monotonic() + seconds
        with self._lock, _memory_file(stdin) as stdin_file, _memory_file("") as output:
            streams = [stdin_file.fileno(), output.fileno()]
            message = {"role": "script", "source": source, "with_errors": with_errors}
            with _Process(self, message, streams, seconds) as process:
                status = process.wait(deadline)
            output.seek(0)
            return Run(status, output.read(seccomp.MAX_FILE_BYTES).decode("utf-8", "replace"))

    def call(self, source: str, name: str, arguments: Sequence[Any], seconds: float) -> Any:
        """Return the result of a function of a program, or of a method of its class `Solution`: plain data.

        Raises:
            NoResultError: there is none.
        """
        deadline = time.monotonic() + seconds
        codec = Codec(_refuse, _refuse, lambda _: False, arrays=False)
        message = {"role": "call", "source": source, "name": name, "arguments": codec.encode(list(arguments))}
        with self._lock, _Process(self, message, [], seconds) as process:
            line = process.read_line(deadline)
        try:
            return codec.decode(json.loads(line))
        except (DataError, ValueError, RecursionError, MemoryError) as error:
            raise NoResultError("the result is no data") from error

    def run_tests(
        self, source: str, statements: str, seconds: float, *, preamble: str = "", subjects: Sequence[str] = ()
    ) -> bool:
        """Return whether statements that use a program's names raise no exception.

        They run in another process than the program, which may be empty if they use no names of it. `preamble` runs in
        both before. `subjects` are names that are the program's even if builtins have them too.
        """
        deadline = time.monotonic() + seconds
        program = {"role": "program", "source": source, "preamble": preamble}
        tests: dict[str, Any] = {
            "role": "tests",
            "statements": statements,
            "preamble": preamble,
            "subjects": [*subjects],
        }
        tests["has_program"] = bool(source.strip())
        ours, theirs = socket.socketpair()
        with self._lock, ours, theirs, ExitStack() as stack:
            process = stack.enter_context(_Process(self, tests, [ours.fileno()], seconds))
            stack.enter_context(_Process(self, program, [theirs.fileno()], seconds))
            ours.close()
            theirs.close()
            with suppress(NoResultError):
                return process.read_line(deadline) == b"passed"
        return False

    def fork(self, seconds: float) -> tuple[int, socket.socket]:
        """Fork a process; return its number and the connection to it."""
        self._count += 1
        setup = {"cpu_seconds": math.ceil(seconds) + 1, "memory": MEMORY_BYTES}
        return self._count, self._server.fork(self._count, setup)

    def kill(self, number: int) -> int:
        """Kill a process unless it has ended, and return its exit status."""
        if number not in self._statuses:
            self._server.signal(number, signal.SIGKILL)
        status = self.wait(number, math.inf)
        del self._statuses[number]
        return -signal.SIGKILL if status is None else status

    def wait(self, number: int, deadline: float) -> int | None:
        """Return the exit status of a process, or None if it does not end in time."""
        while number not in self._statuses:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if select.select([self._server.connection], [], [], min(left, 3600.0))[0]:
                self._statuses.update((each["died"], each["status"]) for each in self._server.exits())
        return self._statuses[number]


class _Process:
    """Process of one test, which ends with the context."""

    def __init__(
        self, runner: ProgramRunner, message: Mapping[str, Any], descriptors: Sequence[int], seconds: float
    ) -> None:
        self._runner = runner
        self._number, self._connection = runner.fork(seconds)
        self._connection.settimeout(max(seconds, 0.1))
        payload = json.dumps(message).encode() + b"\n"
        with suppress(OSError):  # a process that has died has no result
            sent = socket.send_fds(self._connection, [payload], descriptors)
            self._connection.sendall(payload[sent:])

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._runner.kill(self._number)

    def wait(self, deadline: float) -> int | None:
        return self._runner.wait(self._number, deadline)

    def read_line(self, deadline: float) -> bytes:
        """Return the line that the process sends.

        Raises:
            NoResultError: the process ended before, the time is over, or the line is too long.
        """
        chunks, length = [b""], 0
        while not chunks[-1].endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or length > MAX_RESULT_BYTES:
                raise NoResultError("no result in time, or a result that is too large")
            self._connection.settimeout(left)
            try:
                chunks.append(self._connection.recv(1 << 20))
            except OSError as error:
                raise NoResultError("no result in time") from error
            if not chunks[-1]:
                raise NoResultError("the program ended without a result")
            length += len(chunks[-1])
        return b"".join(chunks)[:-1]


def _memory_file(text: str) -> Any:
    """Return an unnamed file in memory with this text, positioned at its start."""
    file = open(os.memfd_create("stream"), "w+b")  # noqa: SIM115 - the caller closes it
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file


def _refuse(value: Any) -> Any:
    raise DataError("references are no data")


_runners: dict[int, ProgramRunner] = {}


def program_runner() -> ProgramRunner:
    """Return the runner of this process, which confines programs.

    Raises:
        ConfinementError: programs cannot be confined on this machine.
    """
    runner = _runners.get(os.getpid())
    if runner is None or not runner.is_alive:
        _runners[os.getpid()] = ProgramRunner()
        if runner is not None:
            runner.close()
    check_confinement()
    return _runners[os.getpid()]


@cache
def check_confinement() -> None:
    """
    Raises:
        ConfinementError: programs cannot be confined on this machine.
    """
    if _runners[os.getpid()].run_script("", "", 20.0).status == seccomp.CONFINEMENT_FAILED:
        raise seccomp.ConfinementError(
            "programs of a model only run if the kernel can confine them: Linux (x86-64, AArch64) with seccomp"
        )
