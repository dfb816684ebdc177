"""Worker processes of one fork server, watched by a selector."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from quintet.sandbox.sandboxed_process import ForkServer


class WorkerProcess(Protocol):
    """Handle of a worker process."""

    number: int
    connection: socket.socket
    ended: bool
    """The connection has ended."""


P = TypeVar("P", bound=WorkerProcess)


class WorkerProcesses(Generic[P]):
    """Worker processes and their fork server, which runs from the first fork on and is replaced if it dies."""

    def __init__(
        self,
        worker: str,
        on_output: Callable[[P], None],
        on_exit: Callable[[P, int], None],
        on_server_exit: Callable[[], None],
    ) -> None:
        """`worker` is the `module:function` that each process calls.

        `wait` calls `on_output(process)` if there is something to read, `on_exit(process, status)` after the last
        output of a process that has ended, and `on_server_exit()` after the end of the fork server and all processes.
        """
        self._worker, self._on_output = worker, on_output
        self._on_exit, self._on_server_exit = on_exit, on_server_exit
        self.selector = selectors.DefaultSelector()
        self.fork_servers: list[ForkServer] = []
        """The fork server, if it runs. A finalizer that closes it may hold this list, but not this object."""
        self._by_number: dict[int, P] = {}
        self._num_forked = 0

    def __iter__(self) -> Iterator[P]:
        return iter(list(self._by_number.values()))

    def __len__(self) -> int:
        return len(self._by_number)

    def __contains__(self, process: P) -> bool:
        return process.number in self._by_number

    def start_fork_server(self) -> ForkServer:
        """Start the fork server unless it runs, and return it."""
        if not self.fork_servers:
            self.fork_servers.append(ForkServer(self._worker))
            self.selector.register(self.fork_servers[0].connection, selectors.EVENT_READ, self._receive_exits)
        return self.fork_servers[0]

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
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._receive(process))
        return process

    def wait(self, seconds: float | None) -> None:
        """Wait up to `seconds` for messages, and handle them."""
        for key, _ in self.selector.select(seconds):
            key.data()

    def kill(self, process: P) -> None:
        """Kill a process, busy or not."""
        del self._by_number[process.number]
        self._unregister(process)
        process.connection.close()
        self.signal(process, signal.SIGKILL)

    def signal(self, process: P, signum: signal.Signals) -> None:
        """Send a signal to a process, unless it has ended with its fork server."""
        try:
            for server in self.fork_servers:
                server.signal(process.number, signum)
        except OSError:
            return

    def close(self) -> None:
        """End all processes."""
        for process in self:
            self.kill(process)
        for server in self.fork_servers:
            self.selector.unregister(server.connection)
        close_fork_servers(self.fork_servers, os.getpid())

    def _receive(self, process: P) -> None:
        if process in self:
            self._on_output(process)
        if process in self and process.ended:
            # the fork server reports how it ended; until then the closed connection would wake us repeatedly
            self._unregister(process)

    def _unregister(self, process: P) -> None:
        if process.connection in self.selector.get_map():
            self.selector.unregister(process.connection)

    def _receive_exits(self) -> None:
        try:
            for message in self.fork_servers[0].exits():
                process = self._by_number.get(message["died"])
                if process is not None:
                    # its last messages may still be in the connection
                    self._receive(process)
                    if process in self:
                        self._on_exit(process, message["status"])
        except OSError:
            self.selector.unregister(self.fork_servers[0].connection)
            self.fork_servers.pop().close()
            self._on_server_exit()


def close_fork_servers(fork_servers: list[ForkServer], owner_pid: int) -> None:
    """End fork servers with all their processes, unless this is a forked child of their owner."""
    while fork_servers and os.getpid() == owner_pid:
        fork_servers.pop().close()
