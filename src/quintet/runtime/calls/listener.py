"""Connections of workers to the controller: where workers connect, and which of them are alive.

A worker opens two connections: one for calls, and one over which it sends a heartbeat every second, so that a worker
that is stopped, or whose node is lost, is noticed while the controller waits for its result.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from quintet.config.torchrun import describe_rank
from quintet.errors import MachineError
from quintet.runtime.calls.connection import Role, WorkerConnection
from quintet.runtime.calls.handshake import Address, WorkerHello, receive_hello
from quintet.runtime.calls.messages import MessageSocket
from quintet.runtime.calls.run_secret import RunSecret
from quintet.training.parallel.rendezvous import LostRank

MAX_HANDSHAKES = 64
"""Connections that have not said who they are; the oldest is closed for another one."""
MAX_REFUSALS = 20
"""Refused strangers that are logged one by one; of later ones, those whose number is a power of two."""
ACCEPT_SECONDS = 0.2
"""Pause after the system could not accept a connection, for example without free descriptors."""
HEARTBEAT_SECONDS = 1.0
LOST = b"L"
"""What a lost worker is sent over its connection for heartbeats: one that hangs notices nothing else."""
POLL_SECONDS = 0.05
NEW_SECRET = RunSecret()
"""A secret that the listener creates, and that its owner passes on."""
logger = logging.getLogger(__name__)
ADDRESS_KEY = "controller"
"""Key of the rendezvous store under which the controller's address is."""


@dataclass(frozen=True, slots=True)
class ControllerAddress:
    """Address at which the controller listens for workers, and the secret of the run."""

    host: str
    port: int
    token: str

    @classmethod
    def of(cls, listener: WorkerListener) -> ControllerAddress:
        """Return the address of a listener."""
        return cls(*listener.address, listener.token)

    @property
    def host_and_port(self) -> Address:
        """The address to which workers connect."""
        return self.host, self.port

    @classmethod
    def wait_for(cls, store: Store, secret: RunSecret, timeout_seconds: float) -> ControllerAddress:
        """Read the address from the rendezvous store, and the secret from where the run keeps it.

        Raises:
            MachineError: the controller did not publish it in time, or this process does not know the secret.
        """
        try:
            store.wait([ADDRESS_KEY], timedelta(seconds=timeout_seconds))
            host, port, name = json.loads(store.get(ADDRESS_KEY))
            return cls(str(host), int(port), secret.find(str(name), timeout_seconds))
        except (ValueError, TypeError) as error:
            raise MachineError(
                "the rendezvous store does not have the address of a controller",
                "another program has written there: use a private network, or another port",
            ) from error
        except RuntimeError as error:
            raise MachineError(
                f"the controller (rank 0) did not start within {timeout_seconds:g} seconds",
                "see its output; start all ranks together, or raise placement.join_timeout_seconds",
            ) from error


@dataclass(slots=True)
class _Connections:
    """Connections of one worker process, while they arrive and afterwards."""

    calls: socket.socket | None = None
    heartbeats: socket.socket | None = None
    last_heartbeat: float = field(default_factory=time.monotonic)
    worker: WorkerConnection | None = None


class WorkerListener:
    """Accepts the connections of workers in a thread, and watches their heartbeats in another one."""

    def __init__(
        self,
        host: str,
        ranks: Mapping[int, str],
        fingerprint: str,
        lost_seconds: float,
        call_seconds: float = 1800.0,
        secret: RunSecret = NEW_SECRET,
    ) -> None:
        """Listen at a free port of `host` for the workers of `ranks`, which map to the names of their components, and
        know the `secret`. One that sends no heartbeat for `lost_seconds`, or does not answer a call within
        `call_seconds`, is lost. Calls of ranks of the actor may take any time: they contain whole rollouts, and their
        collectives have a timeout.

        Raises:
            MachineError: the secret cannot be kept private.
        """
        self._secret = secret
        self.token, self._secret_name = secret.create()
        self._ranks = dict(ranks)
        self._fingerprint = fingerprint
        self._lost_seconds = lost_seconds
        self._call_seconds = call_seconds
        self._server = socket.create_server((host, 0))
        self._lock = threading.Lock()
        self._connections: dict[str, _Connections] = {}
        self._newly_connected: list[WorkerConnection] = []
        self._handshakes: deque[socket.socket] = deque()
        """Connections that have not said who they are, the oldest first; changed under `_lock`."""
        self._num_refused = 0
        self._lost: list[socket.socket] = []
        """Connections for heartbeats of lost workers, which may still have to read `LOST`."""
        self.lost_rank: LostRank | None = None
        """The first rank that was lost with a learner, so that the run cannot continue."""
        self._closed = threading.Event()
        for name in ("accept", "watch"):
            threading.Thread(target=getattr(self, f"_{name}"), name=f"workers-{name}", daemon=True).start()

    def publish(self, store: Store) -> None:
        """Write the address to the rendezvous store, without the secret."""
        store.set(ADDRESS_KEY, json.dumps([*self.address, self._secret_name]))

    @property
    def address(self) -> Address:
        """Host and port."""
        host, port = self._server.getsockname()[:2]
        return str(host), int(port)

    def take_connected_workers(self, ranks: Collection[int], role: Role = "engine") -> list[WorkerConnection]:
        """Return the workers of `ranks` with this role that have connected since the last call, by rank."""
        with self._lock:
            connected = [worker for worker in self._newly_connected if worker.role == role and worker.rank in ranks]
            self._newly_connected = [worker for worker in self._newly_connected if worker not in connected]
        return sorted((worker for worker in connected if worker.lost_reason is None), key=lambda worker: worker.rank)

    def wait_for(self, ranks: Collection[int], timeout_seconds: float, role: Role = "engine") -> list[WorkerConnection]:
        """Wait until the workers of all `ranks` with this role have connected; return them by rank.

        Raises:
            MachineError: some did not connect in time; the message names them.
        """
        deadline = time.monotonic() + timeout_seconds
        while (workers := self._take_all(ranks, role)) is None:
            if time.monotonic() > deadline:
                missing = sorted(set(ranks) - self._connected_workers(role).keys())
                names = ", ".join(describe_rank(rank, self._ranks[rank]) for rank in missing)
                raise MachineError(
                    f"the workers of {names} did not connect within {timeout_seconds:g} seconds",
                    "see their logs in the run directory; start all ranks together, or raise "
                    "placement.join_timeout_seconds",
                )
            time.sleep(POLL_SECONDS)
        return workers

    def _take_all(self, ranks: Collection[int], role: Role) -> list[WorkerConnection] | None:
        """Return the connected workers of `ranks` with this role, by rank; None if one is missing."""
        with self._lock:
            workers = self._connected_workers(role)
            if not workers.keys() >= set(ranks):
                return None
            # a process that is started later in place of one of these remains for `take_connected_workers`
            self._newly_connected = [
                worker for worker in self._newly_connected if worker.role != role or worker.rank not in ranks
            ]
        return [workers[rank] for rank in sorted(ranks)]

    def _connected_workers(self, role: Role) -> dict[int, WorkerConnection]:
        """Return the workers with this role that are connected, by rank."""
        workers = [connections.worker for connections in list(self._connections.values())]
        alive = (worker for worker in workers if worker is not None and worker.lost_reason is None)
        return {worker.rank: worker for worker in alive if worker.role == role}

    def close(self) -> None:
        """Ask all workers to exit, and stop listening."""
        self._closed.set()
        for connections in list(self._connections.values()):
            if connections.worker is not None:
                connections.worker.stop()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._secret.remove(self._secret_name)
        with self._lock:
            for handshake in self._handshakes:
                _shut_down(handshake)
        for connections in list(self._connections.values()):
            for connected in (connections.calls, connections.heartbeats):
                if connected is not None:
                    connected.close()
        for connected in self._lost:
            connected.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connected, (host, *_) = self._server.accept()
            except OSError as error:
                # the other end has gone, or this process has no free descriptors: later connections may succeed
                if not self._closed.wait(ACCEPT_SECONDS):
                    logger.warning("a worker cannot connect: %s", error)
                continue
            with self._lock:
                if len(self._handshakes) >= MAX_HANDSHAKES:
                    _shut_down(self._handshakes.popleft())
                self._handshakes.append(connected)
            arguments = (connected, str(host))
            try:
                threading.Thread(target=self._handshake, args=arguments, name="worker-handshake", daemon=True).start()
            except RuntimeError as error:  # this process can start no more threads
                self._end_handshake(connected)
                connected.close()
                logger.warning("a worker cannot connect: %s", error)

    def _handshake(self, connected: socket.socket, host: str) -> None:
        """Read the first messages of a connection, and accept or refuse it."""
        try:
            hello = receive_hello(connected, self.address, self.token)
            refusal = "it does not know the secret of the run" if hello is None else self._refusal(hello)
            if not self._end_handshake(connected):
                raise ConnectionError("closed for later connections")
            connected.sendall(refusal.encode() + b"\n")
        except (OSError, ValueError) as error:
            self._end_handshake(connected)
            hello, refusal = None, f"its first messages are not those of a worker ({type(error).__name__})"
        if hello is None or refusal:
            self._log_refusal(host, refusal, is_stranger=hello is None)
            connected.close()
            return
        connected.settimeout(None)
        self._register(hello, connected)

    def _end_handshake(self, connected: socket.socket) -> bool:
        """Count a connection no longer among those that have not said who they are; return whether it was."""
        with self._lock:
            try:
                self._handshakes.remove(connected)
            except ValueError:
                return False
        return True

    def _log_refusal(self, host: str, refusal: str, *, is_stranger: bool) -> None:
        with self._lock:
            self._num_refused += is_stranger
            count = self._num_refused
        if not is_stranger or count <= MAX_REFUSALS:
            logger.warning("refused a connection from %s: %s", host, refusal)
        elif count.bit_count() == 1:
            logger.warning("refused %d connections, the last from %s: %s", count, host, refusal)

    def _refusal(self, hello: WorkerHello) -> str:
        """Return why a connection is refused; empty if it is not."""
        if hello.rank not in self._ranks:
            return f"rank {hello.rank} is no worker of this run"
        if hello.fingerprint != self._fingerprint:
            name = describe_rank(hello.rank, self._ranks[hello.rank])
            return f"{name} started with another configuration or version than the controller"
        return ""

    def _register(self, hello: WorkerHello, connected: socket.socket) -> None:
        with self._lock:
            connections = self._connections.setdefault(hello.worker, _Connections())
            if hello.purpose == "calls":
                connections.calls = connected
            else:
                connections.heartbeats = connected
            if connections.calls is not None and connections.heartbeats is not None:
                connections.last_heartbeat = time.monotonic()
                connections.heartbeats.setblocking(False)
                messages = MessageSocket(connections.calls)
                connections.worker = WorkerConnection(
                    hello.rank, hello.pid, hello.host, messages, hello.role, self._ranks[hello.rank]
                )
                self._newly_connected.append(connections.worker)

    def _watch(self) -> None:
        watched_at = time.monotonic()
        while not self._closed.wait(HEARTBEAT_SECONDS / 4):
            # after a pause of this process, the heartbeats that came meanwhile must be read before any is missed
            pause, watched_at = time.monotonic() - watched_at, time.monotonic()
            for name, connections in list(self._connections.items()):
                if pause > self._lost_seconds / 2:
                    connections.last_heartbeat = watched_at
                reason, worker = self._lost_reason(connections), connections.worker
                if reason and worker is not None:
                    worker.mark_lost(reason)
                    if worker.role != "engine" and not worker.was_stopped and self.lost_rank is None:
                        self.lost_rank = LostRank(str(worker.lost_error()), connections.last_heartbeat)
                    del self._connections[name]
                    self._send_lost(connections)

    def _send_lost(self, connections: _Connections) -> None:
        if connections.heartbeats is not None:
            with suppress(OSError):  # it has ended
                connections.heartbeats.send(LOST)
            self._lost.append(connections.heartbeats)

    def _lost_reason(self, connections: _Connections) -> str | None:
        if connections.worker is None or connections.heartbeats is None:
            return None
        try:
            if not connections.heartbeats.recv(4096):
                return "has ended, or its connection broke"
            connections.last_heartbeat = time.monotonic()
        except BlockingIOError:
            if time.monotonic() - connections.last_heartbeat > self._lost_seconds:
                return f"has sent no heartbeat for {self._lost_seconds:g} seconds: it is stopped, or its node is lost"
        except OSError as error:
            return f"has ended, or its connection broke ({error})"
        if connections.worker.role != "actor" and not connections.worker.has_answered_in(self._call_seconds):
            return f"has not answered a call for {self._call_seconds:g} seconds (placement.call_timeout_seconds)"
        return None


def _shut_down(connected: socket.socket) -> None:
    """End a connection, so that the thread that reads it stops."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
