"""Start Python programs as forks of a process that has imported torch, transformers and Quintet: seconds less each.

`Popen` and `run` are `subprocess.Popen` and `subprocess.run`. They fork for
`python [-W ignore] [-u] [-m MODULE | -c CODE | SCRIPT] …`, and start an interpreter for other options and for variables
that packages read while they are imported. Tests of the start itself, of imports, memory or `/proc/PID`, or of
installed programs use `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SERVER_PROGRAM = Path(__file__).with_name("fork_server.py")
READ_AT_IMPORT = ("ARROW", "HF_", "HOME", "LANG", "LC_", "LD_", "MKL", "OMP", "OPENBLAS", "PYTHON", "TOKENIZERS")
READ_AT_IMPORT += ("TORCH", "TRANSFORMERS", "TZ", "XDG_")
START_SECONDS = 180
"""Time in which a server imports its packages or forks."""
SET_BY_TORCH = ("TORCHELASTIC_", "TORCHINDUCTOR_", "TORCH_NCCL_")

_servers: dict[frozenset[tuple[str, str]], socket.socket] = {}
_lock = threading.Lock()  # held while a server is looked up or started


def _import_variables(environment: dict[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, value)
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith(SET_BY_TORCH)
    )


_session_environment = dict(os.environ)
"""Empty in a process that starts no servers."""


def _server(environment: dict[str, str]) -> socket.socket | None:
    """The client's end of the server whose packages were imported in such an environment; None where none may be."""
    variables = _import_variables(environment)
    with _lock:
        if variables not in _servers:
            own = _session_environment | {"HF_HUB_OFFLINE": "1"}
            if variables not in (_import_variables(own), _import_variables(own | {"OMP_NUM_THREADS": "1"})):
                return None
            client, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, str(SERVER_PROGRAM), str(server.fileno())]
            process = subprocess.Popen(command, env=environment, pass_fds=[server.fileno()], start_new_session=True)
            server.close()
            atexit.register(_end, process, client)
            _servers[variables] = client
        return _servers[variables]


def _end(process: subprocess.Popen[bytes], client: socket.socket) -> None:
    """Shut the server's socket down, also for the forks that have it, upon which the server and its forks end."""
    with contextlib.suppress(OSError):  # the server has ended
        client.shutdown(socket.SHUT_RDWR)
    client.close()
    process.wait(30)


@dataclass(frozen=True)
class Program:
    """What `python [-W ignore] [-u] [-m MODULE | -c CODE | SCRIPT] ARGUMENT…` runs."""

    arguments: list[str]
    ignore_warnings: bool
    unbuffered: bool

    @classmethod
    def of(cls, command: Any) -> Program | None:
        """Parse a command; None for commands with other options or of other programs."""
        if isinstance(command, (str, bytes, os.PathLike)):
            return None
        interpreter, *arguments = map(str, command)
        ignore_warnings = arguments[:2] == ["-W", "ignore"]
        arguments = arguments[2:] if ignore_warnings else arguments
        unbuffered = arguments[:1] == ["-u"]
        arguments = arguments[1:] if unbuffered else arguments
        is_program = bool(arguments) and (arguments[0] in ("-m", "-c") or arguments[0].endswith(".py"))
        if interpreter != sys.executable or not is_program:
            return None
        return cls(arguments, ignore_warnings, unbuffered)


class Popen(subprocess.Popen):
    """A process of `subprocess.Popen` that is a fork of the server where that is possible.

    The fork is a child of the server: its wait status arrives through `_status_pipe`.

    Raises:
        RuntimeError: the server has ended or does not answer.
    """

    is_warm = False
    _status_pipe: int | None = None

    def _execute_child(self, args: Any, *others: Any) -> None:
        (_, preexec, _, pass_fds, cwd, env, _, _, shell, *rest) = others
        pipes, (_, gid, gids, uid, umask, new_session, group) = rest[:6], rest[6:]
        special = (preexec, pass_fds, shell, gid, gids, uid) != (None, (), False, None, None, None) or group != -1
        environment = dict(os.environ if env is None else env)
        program = None if special or umask != -1 else Program.of(args)
        server = program and _server(environment)
        self.is_warm = server is not None
        if not program or not server:
            super()._execute_child(args, *others)
            return
        request = {
            **asdict(program),
            "directory": os.path.abspath(cwd or os.getcwd()),
            "environment": environment,
            "new_session": bool(new_session),
        }
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        streams = [given if given != -1 else number for number, given in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self._fork(server, json.dumps(request).encode(), streams)
        finally:
            self._close_pipe_fds(*pipes)

    def _fork(self, server: socket.socket, request: bytes, streams: list[int]) -> None:
        self._status_pipe, write_end = os.pipe2(os.O_CLOEXEC)
        sys.stdout.flush()
        try:
            socket.send_fds(server, [request], [*streams, write_end, server.fileno()])
        except BrokenPipeError as error:
            raise RuntimeError("the fork server has ended") from error
        finally:
            os.close(write_end)
        if not self._has_line(START_SECONDS):
            raise RuntimeError(f"the fork server has not answered for {START_SECONDS} s")
        self.pid = int(self._read_line() or 0)
        if not self.pid:
            raise RuntimeError("the fork server has ended")
        self._child_created = True

    def _has_line(self, seconds: float) -> bool:
        """Wait for a line or the end of the status pipe."""
        poller = select.poll()
        poller.register(self._status_pipe, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def _read_line(self) -> bytes:
        line = b""
        while (byte := os.read(self._status_pipe, 1)) not in (b"", b"\n"):
            line += byte
        return line

    def _take_status(self) -> tuple[int, int]:
        """Read the wait status, which blocks until the fork has ended; one that died with its server was killed."""
        status = int(self._read_line() or signal.SIGKILL)
        os.close(self._status_pipe)
        self._status_pipe = None
        return self.pid, status

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status_pipe is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not self._has_line(0):
            return 0, 0
        return self._take_status()

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._status_pipe is None:
            return super()._internal_poll(*arguments, **options)
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                if self._status_pipe is not None and self._has_line(0):
                    self._handle_exitstatus(self._take_status()[1])
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    command: Any, *, check: bool = False, capture_output: bool = False, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with a `Popen` of this module."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    given = options.pop("input", None)
    if given is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            stdout, stderr = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
    completed = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check:
        completed.check_returncode()
    return completed


def start_here_too(client: int, environment: dict[str, str]) -> None:
    """Let this fork, a `torchrun`, start its ranks through the server of the socket `client`."""
    _session_environment.clear()
    _servers[_import_variables(environment)] = socket.socket(fileno=client)
    subprocess.Popen = Popen  # type: ignore[misc]
