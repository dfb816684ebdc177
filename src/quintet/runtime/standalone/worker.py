"""Standalone workers: processes with components on devices that the actor does not use.

Such a process connects to the controller, executes its calls one after another, and ends with it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from quintet.errors import MachineError
from quintet.runtime.remote_call import STOP, RemoteCall
from quintet.runtime.remote_interface import STANDALONE_ENGINE
from quintet.runtime.standalone.engine_worker import LocalStandaloneEngine
from quintet.runtime.standalone.listener import HEARTBEAT_SECONDS, WorkerHello, WorkerListener
from quintet.runtime.standalone.messages import ConnectionLostError, MessageSocket
from quintet.runtime.worker import ignored_signals
from quintet.tracking.run_processes import process_namespace

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger(__name__)
ADDRESS_KEY = "controller"
"""Key of the rendezvous store under which the controller's address is."""


@dataclass(frozen=True, slots=True)
class ControllerAddress:
    """Where the controller listens for standalone workers, and the token that it requires."""

    host: str
    port: int
    token: str

    @classmethod
    def of(cls, listener: WorkerListener) -> ControllerAddress:
        """Return the address of a listener."""
        return cls(*listener.address, listener.token)

    def publish(self, store: Store) -> None:
        """Write the address to the rendezvous store."""
        store.set(ADDRESS_KEY, json.dumps([self.host, self.port, self.token]))

    @classmethod
    def wait_for(cls, store: Store, timeout_seconds: float) -> ControllerAddress:
        """Read the address from the rendezvous store.

        Raises:
            MachineError: the controller did not publish it in time.
        """
        try:
            store.wait([ADDRESS_KEY], timedelta(seconds=timeout_seconds))
            return cls(*json.loads(store.get(ADDRESS_KEY)))
        except RuntimeError as error:
            raise MachineError(
                f"the controller (rank 0) did not start within {timeout_seconds:g} seconds",
                "see its output; start all ranks together, or raise placement.join_timeout_seconds",
            ) from error


class StandaloneComponents:
    """Executes calls with the components of this process."""

    def __init__(self) -> None:
        self._engine = LocalStandaloneEngine()

    def execute(self, call: RemoteCall) -> Any:
        """Call the method that the call names.

        Raises:
            ValueError: this process does not have the target.
        """
        if call.target != STANDALONE_ENGINE:
            raise ValueError(f"a standalone worker has no {call.target}")
        return getattr(self._engine, call.method)(**call.arguments)

    def close(self) -> None:
        """Release the components."""
        self._engine.close()


def run_standalone_worker(address: ControllerAddress, rank: int, fingerprint: str) -> None:
    """Execute the calls of the controller until it sends `STOP`. SIGINT and SIGTERM are ignored: it ends the run.

    Raises:
        MachineError: the controller cannot be reached, refuses this process, or has ended.
    """
    hello = WorkerHello(
        address.token, "calls", secrets.token_hex(8), rank, os.getpid(), process_namespace(), fingerprint
    )
    try:
        calls = _connect(address, hello)
        heartbeats = _connect(address, replace(hello, purpose="heartbeats"))
    except OSError as error:
        where = f"{address.host}:{address.port}"
        raise MachineError(f"rank {rank} cannot connect to the controller at {where}: {error}") from error
    components = StandaloneComponents()
    with ignored_signals(), _sent_heartbeats(heartbeats):
        try:
            _serve(MessageSocket(calls), components)
        except ConnectionLostError as error:
            message = f"rank {rank} ends: the controller (rank 0) has ended, or the connection to it broke ({error})"
            raise MachineError(message) from error
        finally:
            components.close()


def _connect(address: ControllerAddress, hello: WorkerHello) -> socket.socket:
    connected = socket.create_connection((address.host, address.port), timeout=30)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    hello.send(connected)
    connected.settimeout(None)
    return connected


def _serve(messages: MessageSocket, components: StandaloneComponents) -> None:
    """Execute calls until `STOP`. An error of a call is sent to the controller, which decides what follows from it.

    Raises:
        ConnectionLostError: the controller is gone.
    """
    while (call := messages.receive_call()) != STOP:
        try:
            result = components.execute(call)
        except Exception as error:  # whatever it is, the controller reports it
            logger.exception("%s.%s failed", call.target, call.method)
            messages.send_error(error)
        else:
            messages.send_result(result)


@contextmanager
def _sent_heartbeats(connected: socket.socket) -> Iterator[None]:
    """Send a heartbeat every second from a thread."""
    closed = threading.Event()

    def send() -> None:
        with suppress(OSError):  # the controller is gone, which `receive_call` notices, too
            while not closed.wait(HEARTBEAT_SECONDS):
                connected.sendall(b".")

    thread = threading.Thread(target=send, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()
        connected.close()
