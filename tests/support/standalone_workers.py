"""Standalone workers as processes, and as threads of the test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

from warm_processes import Popen

from quintet.config.native.section import Section
from quintet.runtime.calls.code_check import AllowedCode
from quintet.runtime.calls.connection import WorkerConnection
from quintet.runtime.calls.listener import ControllerAddress
from quintet.runtime.calls.messages import NO_CODE, ConnectionLostError, MessageSocket
from quintet.runtime.calls.remote_call import RemoteCall, decode_header, encode
from quintet.runtime.worker import Worker
from quintet.runtime.worker_process import WorkerProcess

WORKER = """
import sys
from quintet.runtime.calls.listener import ControllerAddress
from quintet.runtime.worker import Worker
from quintet.runtime.worker_process import WorkerProcess
host, port, token, rank = sys.argv[1:]
WorkerProcess(ControllerAddress(host, int(port), token), int(rank), "the run").run(Worker())
"""


def start_worker(address: ControllerAddress, rank: int) -> subprocess.Popen[bytes]:
    """Start a process that connects to a listener of `the run`."""
    arguments = [address.host, str(address.port), address.token, str(rank)]
    return Popen([sys.executable, "-c", WORKER, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"})


class AnyCode(AllowedCode):
    """The controller is the test."""

    def check(self, received: Section | Path) -> None:
        pass


ANY_CODE = AnyCode()


class ThreadWorker(WorkerConnection):
    """A worker in a thread of this process."""

    def __init__(self, rank: int, worker: Worker | None = None, allowed_code: AllowedCode = ANY_CODE) -> None:
        ours, self._theirs = socket.socketpair()
        self._allowed_code = allowed_code
        super().__init__(rank, os.getpid(), "this one", MessageSocket(ours))
        self._worker = worker or Worker()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        process = WorkerProcess(ControllerAddress("", 0, ""), self.rank, "the run")
        with closing(self._worker), suppress(ConnectionLostError):
            process.serve(MessageSocket(self._theirs, allowed_code=self._allowed_code), self._worker)

    def lose(self) -> None:
        """End the connection, as the death of the worker does."""
        self._theirs.shutdown(socket.SHUT_RDWR)


def through_the_wire(call: RemoteCall) -> RemoteCall:
    """Encode a call and decode it."""
    header, sent = encode(call)
    received, decoded = decode_header(json.loads(header), NO_CODE.check)
    for place, tensor in zip(received, sent, strict=True):
        place.copy_(tensor)
    return decoded()
