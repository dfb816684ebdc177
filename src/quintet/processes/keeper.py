"""The process that makes and ends killable processes: `python -m quintet.processes.keeper DESCRIPTOR WORKER PATH…`.

It loads what they need once and forks for each new process, which then is ready in milliseconds: a process that is
killed for one fault holds up no other. It does nothing else, so that forking is sound. When the connection to the run
ends, however the run ended, it kills them all and ends.

`WORKER` is the `module:function` that a new process calls with its own connection to the run and with its setup.
Requests, a line of JSON each: `{"load": [module or file.py:name, …]}`, `{"fork": number, "setup": {…}}` with the new
process's connection, `{"signal": …, "to": number}`. It says `{"died": number, "status": …}`, the status as `subprocess`
gives it.
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

from quintet.processes.confinement import die_with_parent
from quintet.processes.wire import Lines, decoded, encoded
from quintet.registry import load_outside

__all__ = ["Work", "main"]

ORPHAN_SECONDS = 1.0
"""How often it looks whether the run still exists, in case a child of the run holds the connection open."""

Work = Callable[[socket.socket, Mapping[str, Any]], None]
"""What a process does with its connection and its setup, until the connection ends."""


class Keeper:
    """Its processes, by the number that the run gave them."""

    def __init__(self, connection: socket.socket, work: Work) -> None:
        self._connection = connection
        self._work = work
        self._lines = Lines()
        self._handed: deque[int] = deque()
        self._pids: dict[int, int] = {}
        self._run = os.getppid()
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)

    def keep(self) -> None:
        """Serve until the run ends."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        while os.getppid() == self._run:
            readable, _, _ = select.select([self._connection, self._woken], [], [], ORPHAN_SECONDS)
            if self._woken in readable:
                self._woken.recv(4096)
            self._reap()
            if self._connection in readable and not self._serve():
                break
        # what is killed now would wake nobody, and the socket goes before the last of them
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in list(self._pids):
            self._signal(number, signal.SIGKILL)

    def _serve(self) -> bool:
        """Do what the run asks; false when it has gone."""
        try:
            piece, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 16, 16)
        except ConnectionResetError:
            # it was killed while something from here was on its way to it
            return False
        self._handed.extend(descriptors)
        for line in self._lines.feed(piece):
            self._do(decoded(line))
        return bool(piece)

    def _do(self, request: dict[str, Any]) -> None:
        if "load" in request:
            _load(request["load"])
        elif "fork" in request:
            self._fork(request["fork"], request["setup"])
        else:
            self._signal(request["to"], request["signal"])

    def _fork(self, number: int, setup: Mapping[str, Any]) -> None:
        connection, keeper = _socket(self._handed.popleft()), os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(connection, setup, keeper)
        connection.close()
        self._pids[number] = pid

    def _become(self, connection: socket.socket, setup: Mapping[str, Any], keeper: int) -> None:
        """Be the new process; never returns."""
        status = 1
        try:
            os.setsid()
            die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._connection, self._woken, self._wakes, *map(_socket, self._handed)):
                other.close()
            if os.getppid() == keeper:
                self._work(connection, setup)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _signal(self, number: int, what: int) -> None:
        """Tell a process and all that it started."""
        pid = self._pids.get(number)
        if pid is not None:
            # it may not have made its group yet
            _tell(os.kill, pid, what)
            _tell(os.killpg, pid, what)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[number]
                _tell(os.killpg, pid, signal.SIGKILL)
                self._say({"died": number, "status": os.waitstatus_to_exitcode(status)})

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(encoded(message))
        except OSError:
            # the run has gone: the next read says so
            return


def _socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=descriptor)


def _tell(kill: Callable[[int, int], None], number: int, what: int) -> None:
    """A signal for a process or a group, if there is one."""
    try:
        kill(number, what)
    except (ProcessLookupError, PermissionError):
        return


def _load(names: Sequence[str]) -> None:
    """Import modules and let them warm up; what can't be imported here says so where it is used."""
    for name in names:
        if ":" in name:
            _load_outside(name)
            continue
        try:
            warm = getattr(importlib.import_module(name), "warm", None)
            if warm is not None:
                warm()
        except ImportError:
            continue
    # pages that nobody collects stay shared with the processes forked from here
    gc.collect()
    gc.freeze()


def _load_outside(reference: str) -> None:
    """Import a user's file; the process that uses it says what is wrong with it."""
    try:
        load_outside(reference, "load")
    except (Exception, SystemExit):  # noqa: BLE001 - raised again, and told, in the process that uses it
        return


def _named(reference: str) -> Work:
    module, _, name = reference.partition(":")
    work: Work = getattr(importlib.import_module(module), name)
    return work


def main() -> None:
    """Serve the connection whose descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the run's own order: what it imports from one place must not come from another here
    sys.path[:] = sys.argv[3:] + [place for place in sys.path if place not in sys.argv[3:]]
    Keeper(_socket(int(sys.argv[1])), _named(sys.argv[2])).keep()


if __name__ == "__main__":
    main()
