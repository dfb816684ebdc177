"""Rank processes of one node: started, watched and signalled through a Ray actor.

The ranks are child processes of the actor, so that their exit status or signal is known, and a stopped process is
noticed, which Ray does not report.
"""

from __future__ import annotations

import codecs
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_OUTPUT_BYTES = 1 << 20
"""Maximum size of the output in one status."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """State of a node's ranks since the last call."""

    exit_codes: Mapping[int, int]
    """Exit status of the ranks that have ended; negative numbers are signals."""
    stopped: Sequence[int]
    """Ranks whose process is stopped, for example by SIGSTOP."""
    output: str
    """New output of the node's first rank."""


class NodeProcesses:
    """The ranks of one node."""

    def __init__(self) -> None:
        self._command: list[str] = []
        self._working_directory = ""
        self._environments: dict[int, dict[str, str]] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="quintet-"))
        self._read_bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        """Keeps the bytes of a character whose rest has not been written."""

    def free_port(self, host: str) -> int:
        """Return a free port of this node."""
        with socket.create_server((host, 0)) as listener:
            return int(listener.getsockname()[1])

    def start(self, command: Sequence[str], directory: str, environments: Mapping[int, Mapping[str, str]]) -> None:
        """Start the command once per rank, with the variables of its rank.

        Raises:
            OSError: the directory does not exist on this node, or the program cannot be started.
        """
        self._command, self._working_directory = list(command), directory
        self._environments = {rank: dict(variables) for rank, variables in environments.items()}
        for rank in environments:
            self.restart(rank)

    def restart(self, rank: int) -> None:
        """Start a rank, which has not been started yet or has ended; its output is appended.

        Raises:
            OSError: the directory does not exist on this node, or the program cannot be started.
        """
        with self._log(rank).open("ab") as log:
            self._processes[rank] = subprocess.Popen(  # noqa: S603 - our own module
                self._command,
                cwd=self._working_directory,
                env={**os.environ, **self._environments[rank]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the launcher forwards signals of the terminal
            )

    def status(self) -> NodeStatus:
        """Return the state of the ranks."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        running = [rank for rank, code in codes.items() if code is None]
        return NodeStatus(
            exit_codes={rank: code for rank, code in codes.items() if code is not None},
            stopped=[rank for rank in running if _is_stopped(self._processes[rank].pid)],
            output=self._new_output(),
        )

    def send_signal(self, number: int, rank: int) -> None:
        """Send a signal to a rank, if it still runs."""
        self._processes[rank].send_signal(number)

    def kill(self) -> None:
        """Kill all ranks, and wait for their end."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _log(self, rank: int) -> Path:
        return self._directory / f"rank_{rank}.log"

    def _new_output(self) -> str:
        if not self._processes:
            return ""
        with self._log(min(self._processes)).open("rb") as log:
            log.seek(self._read_bytes)
            data = log.read(MAX_OUTPUT_BYTES)
        self._read_bytes += len(data)
        return self._decoder.decode(data)


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):  # the process has ended, or the system has no /proc
        return False
    return state in (b"T", b"t")
