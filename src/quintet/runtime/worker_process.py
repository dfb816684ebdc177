"""The process of a worker: it connects to the controller, executes its calls in order, and ends with it."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from quintet.errors import MachineError, UserError
from quintet.runtime.calls.code_check import AllowedCode
from quintet.runtime.calls.connection import Role
from quintet.runtime.calls.handshake import WorkerHello, send_hello
from quintet.runtime.calls.listener import HEARTBEAT_SECONDS, LOST, ControllerAddress
from quintet.runtime.calls.messages import NO_CODE, ConnectionLostError, MessageSocket
from quintet.runtime.calls.remote_call import STOP, RemoteCall, broadcast_tensors
from quintet.runtime.calls.run_secret import RunSecret
from quintet.runtime.worker import Worker
from quintet.tracking.run_processes import process_namespace
from quintet.training.parallel.rendezvous import RankDiedError, Rendezvous

CONNECT_SECONDS, RETRY_SECONDS = 30.0, 0.1
"""Time to connect to the controller, and pause between two attempts."""
EXIT_SECONDS = 10.0
"""Time for a lost worker to end because its connection has ended, which one that hangs does not notice."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A rank whose components the controller calls."""

    address: ControllerAddress
    rank: int
    fingerprint: str
    """Hash of version and configuration."""
    rendezvous: Rendezvous | None = None
    """The ranks that execute calls together with this one, if there are any."""
    allowed_code: AllowedCode = NO_CODE
    """What calls may run of the code that they name."""

    def run(self, worker: Worker, roles: Sequence[Role] = ("engine",)) -> None:
        """Execute the calls of the controller with the components of `worker` until it sends `STOP`, in a thread for
        each of the `roles`, at most two. SIGINT and SIGTERM are ignored: the controller ends the
        run.

        Raises:
            MachineError: the controller cannot be reached, refuses this process, or has ended.
        """
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        role, *others = roles
        with (
            _ignored_signals(),
            closing(worker),
            ThreadPoolExecutor(1, "engine", _use_gpu, (gpu,)) as thread,
        ):
            started = [thread.submit(self._work, each, worker) for each in others]
            # a process that also has learners would take them along
            self._work(role, worker, _exit_at_once if [role, *others] == ["engine"] else lambda: None)
            for each in started:
                each.result()

    def _work(self, role: Role, worker: Worker, on_hang: Callable[[], None] = lambda: None) -> None:
        """Connect to the controller, and execute its calls to this role; `on_hang` as in `_sent_heartbeats`."""
        process = (self.rank, os.getpid(), process_namespace(), self.fingerprint)
        calls, heartbeats = _connect_twice(self.address, WorkerHello("calls", secrets.token_hex(8), *process, role))
        with _sent_heartbeats(heartbeats, on_hang):
            try:
                messages = MessageSocket(calls, self._receive_broadcast, self.allowed_code)
                self.serve(messages, worker, ends_with_errors=role == "actor")
            except ConnectionLostError as error:
                cause = f"the controller (rank 0) has ended, or the connection to it broke ({error})"
                raise MachineError(f"rank {self.rank} ends: {cause}") from error

    def serve(self, messages: MessageSocket, worker: Worker, *, ends_with_errors: bool = False) -> None:
        """Execute the calls of a connection until `STOP`. The controller decides what follows from an error of a call,
        unless it may wait in a collective for this rank, which ends then.

        Raises:
            ConnectionLostError: the controller is gone, or has sent something that is not a call.
        """
        while True:
            try:
                call = messages.receive_call()
            except UserError as refused:
                logger.warning("refused a call: %s", refused)
                error: Exception | None = refused
            except ValueError as malformed:
                raise ConnectionLostError(str(malformed)) from malformed
            else:
                if call == STOP:
                    return
                error = self._answer(messages, worker, call)
            if error is not None:
                messages.send_error(error)
                if ends_with_errors:
                    raise error

    def _answer(self, messages: MessageSocket, worker: Worker, call: RemoteCall) -> Exception | None:
        """Execute a call and send its result, or return its error."""
        result, error = self._outcome(worker, call)
        if error is None:
            try:
                messages.send_result(result)
            except ValueError as unsendable:
                return unsendable
        return error

    def _outcome(self, worker: Worker, call: RemoteCall) -> tuple[Any, Exception | None]:
        """Return the result of a call, or its error."""
        try:
            result = worker.execute(call)
            for _ in result if isinstance(result, Iterator) else ():
                pass  # all ranks gather the weights, and rank 0 uses them
            return None if call.discards_result else result, None
        except Exception as error:  # whatever it is, the controller reports it
            logger.warning("%s.%s failed", call.target, call.method, exc_info=True)
            return None, self._translated(error)

    def _receive_broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Receive the tensors of a call over the process group.

        Raises:
            ValueError: this process is in none.
        """
        if self.rendezvous is None:
            raise ValueError("tensors were broadcast to a process without a process group")
        broadcast_tensors(tensors, self.rendezvous.control_group)

    def _translated(self, error: Exception) -> Exception:
        """Return the death of another rank as the cause of an error if it is."""
        if self.rendezvous is not None and isinstance(error, RuntimeError):
            cause = self.rendezvous.death_cause(error)
            return error if cause is None else RankDiedError(f"another rank is lost: {cause}")
        return error


def run_worker(
    rendezvous: Rendezvous, secret: RunSecret, join_seconds: float = 60.0, allowed_code: AllowedCode = NO_CODE
) -> None:
    """Execute the calls of rank 0 on another rank of the actor; raises as `WorkerProcess.run` does, which standalone
    processes call themselves (`cli/ranks.py`). The process ends with the first error of a call: rank 0 may wait for it
    in a collective."""
    process = rendezvous.processes[rendezvous.ranks.rank]
    address = ControllerAddress.wait_for(rendezvous.shared_store, secret, join_seconds)
    worker = Worker(rendezvous.ranks, rendezvous.address)
    WorkerProcess(address, process.rank, process.fingerprint, rendezvous, allowed_code).run(worker, ["actor"])


def _use_gpu(gpu: int | None) -> None:
    """Select the GPU of this thread."""
    if gpu is not None:
        torch.cuda.set_device(gpu)


def _connect_twice(address: ControllerAddress, hello: WorkerHello) -> tuple[socket.socket, socket.socket]:
    """Return the connections for calls and for heartbeats.

    Raises:
        MachineError: the controller cannot be reached, or refuses this process.
    """
    try:
        return _connect(address, hello), _connect(address, replace(hello, purpose="heartbeats"))
    except (OSError, OverflowError, UnicodeError) as error:  # of an address that another program has written
        host_and_port = f"{address.host}:{address.port}"
        raise MachineError(f"rank {hello.rank} cannot connect to the controller at {host_and_port}: {error}") from error


def _connect(address: ControllerAddress, hello: WorkerHello) -> socket.socket:
    """Return a connection; a controller that many strangers connect to may close it before the worker has proved that
    it is none of them."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        connected = socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS)
        try:
            with ExitStack() as failure:
                failure.callback(connected.close)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                send_hello(connected, hello, address.host_and_port, address.token)
                failure.pop_all()
            connected.settimeout(None)
            return connected
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(RETRY_SECONDS)


@contextmanager
def _sent_heartbeats(connected: socket.socket, on_hang: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Send a heartbeat every second from a thread. Call `on_hang` if the controller says that this worker is lost, and
    the context does not end within `EXIT_SECONDS`."""
    closed = threading.Event()

    def send() -> None:
        with suppress(OSError):  # the controller is gone, which `receive_call` notices, too
            while not closed.wait(HEARTBEAT_SECONDS):
                if wait([connected], 0) and connected.recv(1) == LOST:
                    if not closed.wait(EXIT_SECONDS):
                        on_hang()
                    return
                connected.sendall(b".")

    thread = threading.Thread(target=send, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()
        connected.close()


def _exit_at_once() -> None:
    """End this process, whose main thread hangs in a call, so that it can be started again."""
    logger.error("the controller (rank 0) has given up this process, which hangs in a call: it ends")
    os._exit(MachineError.exit_status)


@contextmanager
def _ignored_signals() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM: the controller ends the run."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
