"""Process that forks and kills worker processes: `python -m quintet.sandbox.forkserver DESCRIPTOR WORKER PATH…`.

It imports what the workers need once and forks for each new process, which is then ready in milliseconds; killing a
process delays no other. It does nothing else and has no threads, so that forking is safe. When the connection to the
run ends, however the run ended, it kills all its processes and exits.

`WORKER` is the `module:function` that a new process calls with its connection to the run and its setup. Requests, one
JSON object per line: `{"load": [module or file.py:name, …]}`, `{"fork": number, "setup": {…}}` with the connection of
the new process, `{"signal": …, "to": number}`. It reports `{"died": number, "status": …}`, with the status as in
`subprocess`.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quintet.registry import load_user_object
from quintet.sandbox.json_lines import LineBuffer, decode, encode
from quintet.sandbox.seccomp import die_with_parent, hide_memory

ORPHAN_CHECK_SECONDS = 1.0
"""Interval of checks that the run still exists, in case a child of the run keeps the connection open."""

Worker = Callable[[socket.socket, Mapping[str, Any]], None]
"""Main function of a process, called with its connection and setup; returns when the connection ends."""


class _Server:
    """Server loop. The run numbers the processes."""

    def __init__(self, connection: socket.socket, worker: Worker) -> None:
        self._connection = connection
        self._worker = worker
        self._lines = LineBuffer()
        self._descriptors: deque[int] = deque()
        self._pids: dict[int, int] = {}
        self._run_pid = os.getppid()
        self._wakeup, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)

    def serve(self) -> None:
        """Serve requests until the run ends."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        while os.getppid() == self._run_pid:
            readable, _, _ = select.select([self._connection, self._wakeup], [], [], ORPHAN_CHECK_SECONDS)
            if self._wakeup in readable:
                self._wakeup.recv(4096)
            self._reap()
            if self._connection in readable and not self._receive():
                break
        # processes killed now need no wake-up, and the socket closes before the last of them ends
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in list(self._pids):
            self._signal(number, signal.SIGKILL)

    def _receive(self) -> bool:
        """Execute the requests that have arrived; return whether the connection is still open."""
        try:
            chunk, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 16, 16)
        except ConnectionResetError:
            # the run was killed while a message to it was in transit
            return False
        self._descriptors.extend(descriptors)
        for line in self._lines.feed(chunk):
            self._execute(decode(line))
        return bool(chunk)

    def _execute(self, request: dict[str, Any]) -> None:
        if "load" in request:
            _load(request["load"])
        elif "fork" in request:
            self._fork(request["fork"], request["setup"])
        else:
            self._signal(request["to"], request["signal"])

    def _fork(self, number: int, setup: Mapping[str, Any]) -> None:
        connection, server_pid = _socket(self._descriptors.popleft()), os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_worker(connection, setup, server_pid)
        connection.close()
        self._pids[number] = pid

    def _run_worker(self, connection: socket.socket, setup: Mapping[str, Any], server_pid: int) -> None:
        """Run the worker in the new process; never returns."""
        status = 1
        try:
            os.setsid()
            die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._connection, self._wakeup, self._wakeup_writer, *map(_socket, self._descriptors)):
                other.close()
            if os.getppid() == server_pid:
                self._worker(connection, setup)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _signal(self, number: int, signum: int) -> None:
        """Send a signal to a process and its process group."""
        pid = self._pids.get(number)
        if pid is not None:
            # it may not have created its group yet
            _kill(os.kill, pid, signum)
            _kill(os.killpg, pid, signum)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[number]
                _kill(os.killpg, pid, signal.SIGKILL)
                self._send({"died": number, "status": os.waitstatus_to_exitcode(status)})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(encode(message))
        except OSError:
            # the run has ended; the next read notices
            return


def _socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=descriptor)


def _kill(kill: Callable[[int, int], None], number: int, signum: int) -> None:
    """Send a signal to a process or group if it exists."""
    try:
        kill(number, signum)
    except (ProcessLookupError, PermissionError):
        return


def _load(names: Sequence[str]) -> None:
    """Import modules and call their `preload` functions; processes that need a missing module report it."""
    for name in names:
        if ":" in name:
            _load_user_object(name)
            continue
        try:
            preload = getattr(importlib.import_module(name), "preload", None)
            if preload is not None:
                preload()
        except ImportError:
            continue
    # pages that the garbage collector does not touch stay shared with forked processes
    gc.collect()
    gc.freeze()


def _load_user_object(reference: str) -> None:
    """Import a user's file; the process that uses it reports its errors."""
    try:
        load_user_object(reference, "load")
    except (Exception, SystemExit):  # noqa: BLE001 - raised again, and reported, in the process that uses it
        return


def _worker_from_name(reference: str) -> Worker:
    module, _, name = reference.partition(":")
    worker: Worker = getattr(importlib.import_module(module), name)
    return worker


def main() -> None:
    """Serve the connection whose descriptor is the first argument. Forked processes inherit the hidden memory."""
    hide_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # same import order as in the run, so that a module comes from the same directory here
    sys.path[:] = sys.argv[3:] + [path for path in sys.path if path not in sys.argv[3:]]
    _Server(_socket(int(sys.argv[1])), _worker_from_name(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
