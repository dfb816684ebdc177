"""Pool of worker processes of one fork server: start, messages, time limits, and how each process ended.

Every pool of Quintet builds on `WorkerProcesses` and adds what is sent, what a reply means, and what the end of a
process costs. A pool is for one thread at a time. Only `wait` waits for processes, and `WorkerProcess.send` until a
message is taken.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Generic, TypeVar

from quintet.sandbox.json_lines import LineBuffer, decode
from quintet.sandbox.sandboxed_process import ForkServer, describe_exit

MAX_FAILED_STARTS: Final = 3
"""Consecutive processes or fork servers that end before a process is ready, after which a pool gives up."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """End of a process: by itself with an exit status, at its time limit, or else with its fork server."""

    status: int | None = None
    timed_out: bool = False

    @property
    def with_server(self) -> bool:
        """Whether the fork server has died, and the process with it."""
        return self.status is None and not self.timed_out

    def describe(self, processes: str) -> str:
        """Describe the end of one of these `processes`, unless it is a time limit, which the pool knows."""
        return f"the fork server of {processes} has died" if self.status is None else describe_exit(self.status)


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """Handle of a worker process, from which each pool derives its own."""

    number: int
    connection: socket.socket
    """Non-blocking, except during `send`."""
    _: KW_ONLY
    ready: bool = False
    """The worker has finished its start-up."""
    ended: bool = False
    """The connection has ended."""
    deadline: float = math.inf
    """End of the time limit of what the process does now, on the monotonic clock; infinite if it does nothing."""
    lines: LineBuffer = field(default_factory=LineBuffer)
    unsent: bytearray = field(default_factory=bytearray)
    """Rest of the messages that `WorkerProcesses.send` could not send yet."""

    def send(self, message: bytes, seconds: float | None = None) -> bool:
        """Send a message; return whether the process has taken it in time.

        The fork server reports dead processes, and a process that does not read exceeds its time limit.
        """
        try:
            self.connection.settimeout(seconds)
            self.connection.sendall(message)
        except OSError:
            return False
        finally:
            self.connection.setblocking(False)
        return True

    def receive_lines(self) -> Iterator[bytes]:
        """Yield the lines that have arrived since the last call."""
        while chunk := self.receive_chunk():
            yield from self.lines.feed(chunk)
        self.ended = self.ended or chunk is not None

    def receive_messages(self) -> Iterator[Any]:
        """Yield the messages that have arrived since the last call."""
        return map(decode, self.receive_lines())

    def receive_chunk(self) -> bytes | None:
        """Return the bytes that have arrived: None if none have yet, empty at the end of the connection."""
        try:
            return self.connection.recv(1 << 16)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""


P = TypeVar("P", bound=WorkerProcess)


class WorkerProcesses(Generic[P]):
    """Worker processes and their fork server, which runs from the first fork on and is replaced if it dies.

    The processes end with the run, however the run ends, or with this object. A forked child of the run has this object
    too, but not the processes.
    """

    def __init__(
        self,
        worker: str,
        on_output: Callable[[P], None] | None,
        on_end: Callable[[P, ProcessEnd], None],
        on_server_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """`worker` is the `module:function` that each process calls.

        `wait` calls `on_output(process)` if there is something to read, `on_end(process, end)` after the last output of
        a process that has ended or was killed at its deadline, and `on_server_exit()` after the end of the fork server
        and all processes. Without `on_output` the caller reads the connections, and closes them by `kill`.
        """
        self._worker, self._on_output = worker, on_output
        self._on_end, self._on_server_exit = on_end, on_server_exit
        self.selector = selectors.DefaultSelector()
        self.num_failed_servers = 0
        """Consecutive fork servers that died before a process was ready."""
        self._fork_servers: list[ForkServer] = []
        """The fork server, if it runs. The finalizer may hold this list, but not this object."""
        self._by_number: dict[int, P] = {}
        self._num_forked = 0
        weakref.finalize(self, _close_fork_servers, self._fork_servers, os.getpid())

    def __iter__(self) -> Iterator[P]:
        return iter(list(self._by_number.values()))

    def __len__(self) -> int:
        return len(self._by_number)

    def __contains__(self, process: P) -> bool:
        return process.number in self._by_number

    def start_fork_server(self) -> ForkServer:
        """Start the fork server unless it runs, and return it."""
        if not self._fork_servers:
            self._fork_servers.append(ForkServer(self._worker))
            self.selector.register(self._fork_servers[0].connection, selectors.EVENT_READ, self._receive_exits)
        return self._fork_servers[0]

    def fork(
        self, create: Callable[[int, socket.socket], P], setup: Mapping[str, Any], modules: Sequence[str] = ()
    ) -> P | None:
        """Fork a process, after importing `modules` in the fork server; `create(number, connection)` returns its
        handle. None if the fork server has died, which `wait` notices."""
        self._num_forked += 1
        try:
            server = self.start_fork_server()
            server.load(modules)
            connection = server.fork(self._num_forked, setup)
        except OSError:
            return None
        process = self._by_number[self._num_forked] = create(self._num_forked, connection)
        if self._on_output is not None:
            self.selector.register(connection, selectors.EVENT_READ, lambda: self._exchange(process))
        return process

    def mark_ready(self, process: P) -> None:
        """Note that a process has finished its start-up."""
        process.ready, self.num_failed_servers = True, 0

    def send(self, process: P, message: bytes) -> None:
        """Send a message without waiting; `wait` sends what the process does not take at once."""
        process.unsent += message
        self._send_rest(process)

    def wait(self, seconds: float = math.inf) -> None:
        """Wait up to `seconds` for messages and handle them; then end the processes beyond their deadlines."""
        deadline = min((process.deadline for process in self._by_number.values()), default=math.inf)
        seconds = min(seconds, max(deadline - time.monotonic(), 0.0))
        for key, _ in self.selector.select(None if seconds == math.inf else seconds):
            key.data()
        if time.monotonic() >= deadline:
            self._end_timed_out()

    def kill(self, process: P) -> None:
        """Kill a process, busy or not, and close its connection."""
        self._unregister(process)
        process.connection.close()
        if self._by_number.pop(process.number, None) is not None:
            self.signal(process, signal.SIGKILL)

    def end(self, process: P, end: ProcessEnd) -> None:
        """Kill a process and report its end."""
        self.kill(process)
        self._on_end(process, end)

    def signal(self, process: P, signum: signal.Signals) -> None:
        """Send a signal to a process, unless it has ended with its fork server."""
        try:
            for server in self._fork_servers:
                server.signal(process.number, signum)
        except OSError:
            return

    def close(self) -> None:
        """End all processes."""
        for process in self:
            self.kill(process)
        for server in self._fork_servers:
            self.selector.unregister(server.connection)
        _close_fork_servers(self._fork_servers, os.getpid())

    def _exchange(self, process: P) -> None:
        if process.unsent:
            self._send_rest(process)
        self._receive(process)

    def _send_rest(self, process: P) -> None:
        try:
            del process.unsent[: process.connection.send(process.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # the fork server reports that the process has ended
            process.unsent.clear()
        if self._is_registered(process):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
            self.selector.modify(process.connection, events, self.selector.get_key(process.connection).data)

    def _receive(self, process: P) -> None:
        if process in self and self._on_output is not None:
            self._on_output(process)
        if process in self and process.ended:
            # the fork server reports how it ended; until then the closed connection would wake us repeatedly
            self._unregister(process)

    def _unregister(self, process: P) -> None:
        if self._is_registered(process):
            self.selector.unregister(process.connection)

    def _is_registered(self, process: P) -> bool:
        return process.connection.fileno() >= 0 and process.connection in self.selector.get_map()

    def _end_timed_out(self) -> None:
        for process in [process for process in self if time.monotonic() >= process.deadline]:
            # this process may not have polled for longer than the time limit
            self._receive(process)
            if process in self and time.monotonic() >= process.deadline:
                self.end(process, ProcessEnd(timed_out=True))

    def _receive_exits(self) -> None:
        try:
            exits = [(message["died"], message["status"]) for message in self._fork_servers[0].exits()]
        except OSError:
            self._replace_fork_server()
            return
        for number, status in exits:
            process = self._by_number.get(number)
            if process is not None:
                # its last messages may still be in the connection
                self._receive(process)
                self._report(process, ProcessEnd(status))

    def _replace_fork_server(self) -> None:
        self.selector.unregister(self._fork_servers[0].connection)
        self._fork_servers.pop().close()
        self.num_failed_servers += 1
        for process in self:
            self._report(process, ProcessEnd())
        self._on_server_exit()

    def _report(self, process: P, end: ProcessEnd) -> None:
        """Remove a process that has ended, and report its end."""
        if self._by_number.pop(process.number, None) is None:
            return
        if self._on_output is not None:
            self._unregister(process)
            process.connection.close()
        self._on_end(process, end)


def _close_fork_servers(fork_servers: list[ForkServer], owner_pid: int) -> None:
    """End fork servers with all their processes, unless this is a forked child of their owner."""
    while fork_servers and os.getpid() == owner_pid:
        fork_servers.pop().close()
