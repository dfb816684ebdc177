"""Handshake of a worker with the controller: both prove that they know the secret of the run.

Four lines, each in one direction:

    worker:      its nonce
    controller:  its nonce, and a proof
    worker:      a proof, and who it is as JSON
    controller:  why it refuses the worker; empty if it does not

A proof is an HMAC over the side that computes it, the address of the controller, and both nonces. With the address in
it, a process that has put its own address into the rendezvous store cannot pass the lines on to the controller.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from quintet.errors import MachineError
from quintet.runtime.calls.connection import Role
from quintet.runtime.calls.run_secret import is_proof, proof

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Address = tuple[str, int]
"""Host and port."""
HELLO_SECONDS = 10.0
"""Time for a new connection to prove that it belongs to the run, and to say who it is."""
MAX_LINE_BYTES = 1 << 12
_NONCE = re.compile(r"[0-9a-f]{32}")
_NONCE_LINE_BYTES = 33


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """Message by which a worker introduces a connection."""

    purpose: Literal["calls", "heartbeats"]
    worker: str
    """Random name of the process, the same for its two connections."""
    rank: int
    pid: int
    host: str
    """Machine, and its namespaces; see `process_namespace`."""
    fingerprint: str
    """Hash of version and configuration."""
    role: Role = "engine"


@cache
def _hello_adapter() -> TypeAdapter[WorkerHello]:
    from pydantic import TypeAdapter

    return TypeAdapter(WorkerHello)


def send_hello(connected: socket.socket, hello: WorkerHello, address: Address, token: str) -> None:
    """Introduce this process to the controller at `address`, which must know the secret `token` as well.

    Raises:
        MachineError: the other end is not the controller of the run, or refuses this process.
        OSError: the connection broke, or was closed because the controller is busy.
    """
    deadline = time.monotonic() + HELLO_SECONDS
    nonce = secrets.token_hex(16)
    try:
        connected.sendall(f"{nonce}\n".encode())
        other, _, sent = _read_line(connected, deadline).partition(" ")
        if not is_proof(sent, token, "controller", *map(str, address), nonce, other):
            raise ValueError("wrong proof")
        message = json.dumps(asdict(hello))
        own_proof = proof(token, "worker", *map(str, address), other, nonce, message)
        connected.sendall(f"{own_proof} {message}\n".encode())
        refusal = _read_line(connected, deadline)
    except ValueError as error:
        host, port = address
        raise MachineError(
            f"the process at {host}:{port} does not know the secret of this run: it is not its controller",
            "rank 0 of another run may listen there, or somebody has changed the rendezvous store: use a private "
            "network, or another port",
        ) from error
    if refusal:
        raise MachineError(refusal)


def receive_hello(connected: socket.socket, address: Address, token: str) -> WorkerHello | None:
    """Prove that this process, which listens at `address`, knows the secret, and return the worker's message; None
    without its proof.

    Raises:
        OSError: the connection broke, or a message does not come in time.
        ValueError: a message is not that of a worker.
    """
    deadline = time.monotonic() + HELLO_SECONDS
    other = _read_line(connected, deadline, _NONCE_LINE_BYTES)
    if not _NONCE.fullmatch(other):
        raise ValueError("the first line is not a nonce")
    nonce = secrets.token_hex(16)
    own_proof = proof(token, "controller", *map(str, address), other, nonce)
    connected.sendall(f"{nonce} {own_proof}\n".encode())
    sent, _, message = _read_line(connected, deadline).partition(" ")
    if not is_proof(sent, token, "worker", *map(str, address), nonce, other, message):
        return None
    return _hello_adapter().validate_json(message, strict=True)


def _read_line(connected: socket.socket, deadline: float, max_bytes: int = MAX_LINE_BYTES) -> str:
    """Return a line without its end, and read nothing after it.

    Raises:
        OSError: the connection broke or was closed, or the line is not complete at the deadline (of the monotonic
            clock).
        ValueError: it is too long, or not UTF-8.
    """
    line = b""
    while not line.endswith(b"\n"):
        if len(line) == max_bytes:
            raise ValueError(f"a line is longer than {max_bytes} bytes")
        connected.settimeout(max(deadline - time.monotonic(), 1e-3))
        arrived = connected.recv(max_bytes - len(line), socket.MSG_PEEK)
        if not arrived:
            raise ConnectionError("the other end has closed the connection")
        end = arrived.find(b"\n") + 1
        line += connected.recv(end or len(arrived))
    return line[:-1].decode()
