"""Standalone workers as processes, and as threads of the test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

from quintet.runtime.standalone.connection import WorkerConnection
from quintet.runtime.standalone.messages import ConnectionLostError, MessageSocket
from quintet.runtime.standalone.worker import ControllerAddress, StandaloneComponents, _serve
from quintet.runtime.worker import Worker

WORKER = """
import sys
from quintet.runtime.standalone.worker import ControllerAddress, StandaloneProcess
host, port, token, rank = sys.argv[1:]
StandaloneProcess(ControllerAddress(host, int(port), token), int(rank), "the run").run()
"""


def start_worker(address: ControllerAddress, rank: int) -> subprocess.Popen[bytes]:
    """Start a process that connects to a listener of `the run`."""
    arguments = [address.host, str(address.port), address.token, str(rank)]
    return subprocess.Popen([sys.executable, "-c", WORKER, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"})


class ThreadWorker(WorkerConnection):
    """A worker in a thread of this process."""

    def __init__(self, rank: int, learners: Worker | None = None) -> None:
        ours, self._theirs = socket.socketpair()
        super().__init__(rank, os.getpid(), "this one", MessageSocket(ours))
        self._learners = learners
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        components = StandaloneComponents(self._learners)
        with suppress(ConnectionLostError):
            _serve(MessageSocket(self._theirs), components)
        components.close()

    def lose(self) -> None:
        """End the connection, as the death of the worker does."""
        self._theirs.shutdown(socket.SHUT_RDWR)
