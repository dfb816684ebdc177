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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch

from quintet.errors import MachineError
from quintet.runtime.embodied.hosted_robots import LocalHostedRobots
from quintet.runtime.embodied.policy_copies import LocalActionPolicyCopy
from quintet.runtime.env_hosts import LocalHostedEnvs
from quintet.runtime.remote_call import STOP, RemoteCall, broadcast_tensors
from quintet.runtime.remote_interface import (
    ACTION_POLICY_COPY,
    HOSTED_ENVS,
    HOSTED_ROBOTS,
    STANDALONE_ENGINE,
)
from quintet.runtime.standalone.connection import Role
from quintet.runtime.standalone.engine_worker import LocalStandaloneEngine
from quintet.runtime.standalone.listener import HEARTBEAT_SECONDS, WorkerHello, WorkerListener
from quintet.runtime.standalone.messages import ConnectionLostError, MessageSocket
from quintet.runtime.worker import Worker, execute_call, ignored_signals
from quintet.tracking.run_processes import process_namespace
from quintet.training.parallel.rendezvous import RankDiedError, Rendezvous

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger(__name__)
ADDRESS_KEY = "controller"
"""Key of the rendezvous store under which the controller's address is."""


@dataclass(frozen=True, slots=True)
class ControllerAddress:
    """Address at which the controller listens for standalone workers, and the token that it requires."""

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


class CallExecutor(Protocol):
    """Components of a process."""

    def execute(self, call: RemoteCall) -> Any:
        """Call the method, or return the property, that the call names."""


class StandaloneComponents:
    """Executes calls with the components of this process."""

    def __init__(self, learners: Worker | None = None) -> None:
        """`learners` are the components besides engine and environments, if there are any."""
        self._by_target: Mapping[str, Any] = {
            STANDALONE_ENGINE: LocalStandaloneEngine(),
            HOSTED_ENVS: LocalHostedEnvs(),
            HOSTED_ROBOTS: LocalHostedRobots(),
            ACTION_POLICY_COPY: LocalActionPolicyCopy(),
        }
        self._learners = learners

    def execute(self, call: RemoteCall) -> Any:
        """Call the method, or return the property, that the call names.

        Raises:
            ValueError: this process does not have the target.
        """
        return execute_call(call, self._resolve)

    def _resolve(self, target: str) -> Any:
        if target in self._by_target:
            return self._by_target[target]
        if self._learners is None:
            raise ValueError(f"a standalone worker has no {target}")
        return self._learners.resolve(target)

    def close(self) -> None:
        """Release the components."""
        for component in self._by_target.values():
            component.close()


@dataclass(frozen=True, slots=True)
class StandaloneProcess:
    """A process with components on a device that the actor does not use."""

    address: ControllerAddress
    rank: int
    fingerprint: str
    """Hash of version and configuration."""
    rendezvous: Rendezvous | None = None
    """The processes with the same components besides engines, if this one has any."""

    def run(self, learners: Worker | None = None, *, has_engine: bool = True) -> None:
        """Execute the calls of the controller until it sends `STOP`. SIGINT and SIGTERM are ignored: it ends the run.

        Raises:
            MachineError: the controller cannot be reached, refuses this process, or has ended.
        """
        components = StandaloneComponents(learners)
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        with ignored_signals(), ThreadPoolExecutor(1, "engine", _use_gpu, (gpu,)) as thread:
            try:
                if learners is None:
                    self._work("engine", components)
                    return
                engine = thread.submit(self._work, "engine", components) if has_engine else None
                self._work("learners", components)
                if engine is not None:
                    engine.result()
            finally:
                components.close()

    def run_with_controller(self, worker: Worker) -> None:
        """Execute the calls of the controller, which is in the same process group, until it sends `STOP`; raises as
        `run` does. The process ends with the first error of a call: the controller may wait for it in a collective."""
        with ignored_signals(), closing(worker):
            self._work("learners", worker, ends_with_errors=True)

    def _work(self, role: Role, components: CallExecutor, *, ends_with_errors: bool = False) -> None:
        """Connect to the controller, and execute its calls to this role."""
        process = (self.rank, os.getpid(), process_namespace(), self.fingerprint)
        calls, heartbeats = _connect_twice(
            self.address, WorkerHello(self.address.token, "calls", secrets.token_hex(8), *process, role)
        )
        with _sent_heartbeats(heartbeats):
            try:
                messages = MessageSocket(calls, self._receive_broadcast)
                _serve(messages, components, self._translated, ends_with_errors=ends_with_errors)
            except ConnectionLostError as error:
                cause = f"the controller (rank 0) has ended, or the connection to it broke ({error})"
                raise MachineError(f"rank {self.rank} ends: {cause}") from error

    def _receive_broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Receive the tensors of a call over the process group."""
        if self.rendezvous is not None:
            broadcast_tensors(tensors, self.rendezvous.control_group)

    def _translated(self, error: Exception) -> Exception:
        """Return the death of another rank as the cause of an error if it is."""
        if self.rendezvous is not None and isinstance(error, RuntimeError):
            cause = self.rendezvous.death_cause(error)
            return error if cause is None else RankDiedError(f"another rank is lost: {cause}")
        return error


def listen_at(rendezvous: Rendezvous, lost_seconds: float = 60.0) -> WorkerListener:
    """Listen for the other ranks of a rendezvous, and publish the address in its store."""
    ranks = {peer.rank: peer.components for peer in rendezvous.peers[1:]}
    listener = WorkerListener(rendezvous.address, ranks, rendezvous.peers[0].fingerprint, lost_seconds)
    ControllerAddress.of(listener).publish(rendezvous.shared_store)
    return listener


def run_worker(rendezvous: Rendezvous, timeout_seconds: float = 60.0) -> None:
    """Work for rank 0, which is in the same process group; see `StandaloneProcess.run_with_controller`."""
    peer = rendezvous.peers[rendezvous.ranks.rank]
    address = ControllerAddress.wait_for(rendezvous.shared_store, timeout_seconds)
    process = StandaloneProcess(address, peer.rank, peer.fingerprint, rendezvous)
    process.run_with_controller(Worker(rendezvous.ranks, rendezvous.address))


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
    except OSError as error:
        host_and_port = f"{address.host}:{address.port}"
        raise MachineError(f"rank {hello.rank} cannot connect to the controller at {host_and_port}: {error}") from error


def _connect(address: ControllerAddress, hello: WorkerHello) -> socket.socket:
    connected = socket.create_connection((address.host, address.port), timeout=30)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    hello.send(connected)
    connected.settimeout(None)
    return connected


def _serve(
    messages: MessageSocket,
    components: CallExecutor,
    translated: Callable[[Exception], Exception] = lambda error: error,
    *,
    ends_with_errors: bool = False,
) -> None:
    """Execute calls until `STOP`. An error of a call is sent to the controller as `translated`; the controller decides
    what follows from it, unless the process `ends_with_errors`.

    Raises:
        ConnectionLostError: the controller is gone.
    """
    while (call := messages.receive_call()) != STOP:
        result, error = _outcome(components, call)
        if error is None:
            messages.send_result(result)
        else:
            messages.send_error(translated(error))
            if ends_with_errors:
                raise translated(error)


def _outcome(components: CallExecutor, call: RemoteCall) -> tuple[Any, Exception | None]:
    """Return the result of a call, or its error."""
    try:
        result = components.execute(call)
        for _ in result if isinstance(result, Iterator) else ():
            pass  # all ranks gather the weights, and rank 0 uses them
        return None if call.discards_result else result, None
    except Exception as error:  # whatever it is, the controller reports it
        logger.warning("%s.%s failed", call.target, call.method, exc_info=True)
        return None, error


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
