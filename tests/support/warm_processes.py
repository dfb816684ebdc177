"""Start Python programs as forks of a process that has imported torch, transformers and Quintet: seconds less each.

`Popen` and `run` are `subprocess.Popen` and `subprocess.run`. They fork for `python [-W ignore] [-m MODULE | SCRIPT] …`
and start an interpreter for everything else: other options, and variables that packages read while they are imported.
Tests of the start itself, of what is imported, or of installed programs use `subprocess`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

SERVER_PROGRAM = Path(__file__).with_name("fork_server.py")
READ_AT_IMPORT = ("ARROW", "HF_", "HOME", "LANG", "LC_", "LD_", "MKL", "OMP", "OPENBLAS", "PYTHON", "TOKENIZERS")
READ_AT_IMPORT += ("TORCH", "TRANSFORMERS", "TZ", "XDG_")
SET_BY_TORCH = ("TORCHELASTIC_", "TORCHINDUCTOR_", "TORCH_NCCL_")

_servers: dict[frozenset[tuple[str, str]], socket.socket] = {}
_lock = threading.Lock()  # held while a server is looked up or started


def _import_variables(environment: dict[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, value)
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith(SET_BY_TORCH)
    )


_OWN = dict(os.environ)
"""Environment of the test session; empty in a process that starts no servers."""


def _server(environment: dict[str, str]) -> socket.socket | None:
    """The client's end of the server whose packages were imported in such an environment; None where none may be."""
    variables = _import_variables(environment)
    with _lock:
        if variables not in _servers:
            own = _OWN | {"HF_HUB_OFFLINE": "1"}
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
    """Close the server's socket, upon which the server kills its forks and ends."""
    client.close()
    process.wait(30)


def _arguments(command: Any) -> tuple[list[str], bool] | None:
    """Return what follows the interpreter and `-W ignore`, and whether that was there; None for other commands."""
    if isinstance(command, (str, bytes, os.PathLike)):
        return None
    program, *arguments = map(str, command)
    ignore_warnings = arguments[:2] == ["-W", "ignore"]
    arguments = arguments[2:] if ignore_warnings else arguments
    if arguments[:1] == ["-u"] and arguments[1:2] == ["-m"]:  # torchrun's ranks; the forks flush at their end
        arguments = arguments[1:]
    is_known = bool(arguments) and (arguments[0] == "-m" or arguments[0].endswith(".py"))
    return (arguments, ignore_warnings) if program == sys.executable and is_known else None


class Popen(subprocess.Popen):
    """A process of `subprocess.Popen` that is a fork of the server where that is possible.

    The fork is a child of the server: its wait status arrives through `_status_pipe`.
    """

    _status_pipe: int | None = None

    def _execute_child(self, args: Any, *others: Any) -> None:
        (_, preexec, _, pass_fds, cwd, env, _, _, shell, *rest) = others
        pipes, (_, gid, gids, uid, umask, new_session, group) = rest[:6], rest[6:]
        special = (preexec, pass_fds, shell, gid, gids, uid) != (None, (), False, None, None, None) or group != -1
        environment = dict(os.environ if env is None else env)
        parsed = None if special or umask != -1 else _arguments(args)
        server = parsed and _server(environment)
        if not parsed or not server:
            super()._execute_child(args, *others)
            return
        arguments, ignore_warnings = parsed
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        request = {
            "arguments": arguments,
            "ignore_warnings": ignore_warnings,
            "directory": os.path.abspath(cwd or os.getcwd()),
            "environment": environment,
            "new_session": bool(new_session),
        }
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        streams = [given if given != -1 else number for number, given in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            sys.stdout.flush()
            socket.send_fds(server, [json.dumps(request).encode()], [*streams, write_end, server.fileno()])
        finally:
            os.close(write_end)
            self._close_pipe_fds(*pipes)
        self._status_pipe = read_end
        self.pid = int(self._read_line() or 0)
        assert self.pid, "the fork server has ended"
        self._child_created = True

    def _read_line(self) -> bytes:
        line = b""
        while (byte := os.read(self._status_pipe, 1)) not in (b"", b"\n"):
            line += byte
        return line

    def _take_status(self) -> tuple[int, int]:
        """Read the wait status, which blocks until the fork has ended; one that died with its server was killed."""
        status = int(self._read_line() or 9)
        os.close(self._status_pipe)
        self._status_pipe = None
        return self.pid, status

    def _has_ended(self) -> bool:
        poller = select.poll()
        poller.register(self._status_pipe, select.POLLIN)
        return bool(poller.poll(0))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status_pipe is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not self._has_ended():
            return 0, 0
        return self._take_status()

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._status_pipe is None:
            return super()._internal_poll(*arguments, **options)
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                if self._status_pipe is not None and self._has_ended():
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
    _OWN.clear()
    _servers[_import_variables(environment)] = socket.socket(fileno=client)
    subprocess.Popen = Popen  # type: ignore[misc]
