"""Attack the listener of a run's controller, while its worker answers calls.

    python benchmarks/attacks.py --parts workers

The controller and its worker are processes of their own. Attackers open connections whose handshakes are truncated,
replayed, reflected, oversized, slow, or made with another secret, and some that are valid until the first message
afterwards, which is hostile. Counted are deaths, connections that were accepted without the secret, and the latency of
the worker's calls before and during the attack.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import random
import resource
import secrets
import socket
import statistics
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from quintet.runtime.calls.connection import CALL_ERRORS
from quintet.runtime.calls.handshake import WorkerHello, send_hello
from quintet.runtime.calls.listener import ControllerAddress, WorkerListener
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.run_secret import proof
from quintet.runtime.worker import Worker
from quintet.runtime.worker_process import WorkerProcess

RUN, HONEST, HOSTILE = "the run", 1, 2
"""Fingerprint, and ranks of the worker that answers calls and of attackers that know the secret."""
CALL = RemoteCall("worker", "close_judge_servers")
PAUSE_SECONDS = 0.002
QUIET_SECONDS, SOCKET_SECONDS, SLOW_SECONDS = 1.0, 5.0, 0.3
NUM_ATTACKERS = 16
"""Connections at a time."""
FORK = multiprocessing.get_context("fork")
Stranger = Callable[[socket.socket, ControllerAddress, random.Random], None]


def control(pipe: Connection) -> None:
    """Be the controller: send the address, call the worker, and send what was measured."""
    logging.disable()
    errors: list[str] = []
    threading.excepthook = lambda error: errors.append(f"{error.exc_type.__name__}: {error.exc_value}")
    with closing(WorkerListener("127.0.0.1", {HONEST: "", HOSTILE: ""}, RUN, lost_seconds=120.0)) as listener:
        pipe.send(ControllerAddress.of(listener))
        (honest,) = listener.wait_for([HONEST], 120.0)
        threading.Thread(target=call_hostile_workers, args=(listener,), name="hostile-calls", daemon=True).start()
        latencies: dict[str, list[float]] = {"quiet": [], "attack": []}
        memory, phase = resident_mib(), "quiet"
        while phase != "stop":
            started = time.perf_counter()
            honest.call(CALL)
            latencies[phase].append(time.perf_counter() - started)
            time.sleep(PAUSE_SECONDS)
            phase = pipe.recv() if pipe.poll() else phase
        names = {thread.name for thread in threading.enumerate()}
        ended = sorted({"workers-accept", "workers-watch", "hostile-calls"} - names)
        strangers = listener.take_connected_workers([HONEST])
        report = {"errors": [*errors, *(f"the thread {name} has ended" for name in ended)]}
        pipe.send({**report, "accepted": len(strangers), "latencies": latencies, "mib": resident_mib() - memory})


def call_hostile_workers(listener: WorkerListener) -> None:
    """Call each attacker that has become a worker; any error but the loss of a worker ends this thread."""
    while True:
        for worker in listener.take_connected_workers([HOSTILE]):
            try:
                worker.call(CALL)
            except CALL_ERRORS:
                worker.mark_lost("is hostile")
        time.sleep(PAUSE_SECONDS)


def work(address: ControllerAddress) -> None:
    """Be the worker that answers calls."""
    logging.disable()
    WorkerProcess(address, HONEST, RUN).run(Worker())


def resident_mib() -> int:
    """Return the largest memory of this process until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def hello_of(rank: int = HONEST, **changes: Any) -> dict[str, Any]:
    """Return the message of a worker."""
    return {**asdict(WorkerHello("calls", secrets.token_hex(8), rank, 1, "host", RUN)), **changes}


def nonce_of(numbers: random.Random) -> str:
    return f"{numbers.getrandbits(128):032x}"


def prove(
    connected: socket.socket, address: ControllerAddress, numbers: random.Random, message: str, **changes: str
) -> None:
    """Send both lines of a worker; `changes` are of what its proof is made from."""
    nonce = nonce_of(numbers)
    connected.sendall(f"{nonce}\n".encode())
    other, _, _ = connected.recv(200).decode().strip().partition(" ")
    parts = {"side": "worker", "host": address.host, "port": str(address.port), "other": other, "nonce": nonce}
    token = changes.pop("token", address.token)
    parts |= changes
    connected.sendall(f"{proof(token, *parts.values(), message)} {message}\n".encode())


def silent(connected: socket.socket, _: ControllerAddress, numbers: random.Random) -> None:
    time.sleep(numbers.random() * SLOW_SECONDS)


def noise(connected: socket.socket, _: ControllerAddress, numbers: random.Random) -> None:
    connected.sendall(numbers.randbytes(numbers.choice((1, 33, 100, 5000))))


def other_protocol(connected: socket.socket, _: ControllerAddress, numbers: random.Random) -> None:
    tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + numbers.randbytes(500)
    connected.sendall(numbers.choice((b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", tls, b"SSH-2.0-a\r\n", b"\n" * 100)))


def truncated(connected: socket.socket, address: ControllerAddress, numbers: random.Random) -> None:
    line = f"{nonce_of(numbers)}\n{'0' * 64} {json.dumps(hello_of())}\n".encode()
    connected.sendall(line[: numbers.randrange(len(line) - 1)])


def oversized(connected: socket.socket, address: ControllerAddress, numbers: random.Random) -> None:
    first = numbers.choice((nonce_of(numbers) + "\n", ""))
    connected.sendall(first.encode() + b"0" * numbers.choice((34, 1 << 13, 1 << 20)))


def slow(connected: socket.socket, address: ControllerAddress, numbers: random.Random) -> None:
    end = time.monotonic() + SLOW_SECONDS
    for byte in nonce_of(numbers).encode():
        if time.monotonic() < end:
            connected.sendall(bytes([byte]))
            time.sleep(SLOW_SECONDS / 20)


def reset(connected: socket.socket, address: ControllerAddress, numbers: random.Random) -> None:
    connected.sendall(numbers.choice((b"", nonce_of(numbers).encode()[:5], f"{nonce_of(numbers)}\n".encode())))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connected.close()


def reflected(connected: socket.socket, address: ControllerAddress, numbers: random.Random) -> None:
    connected.sendall(f"{nonce_of(numbers)}\n".encode())
    nonce, _, own_proof = connected.recv(200).decode().strip().partition(" ")
    connected.sendall(f"{numbers.choice((own_proof, nonce))} {json.dumps(hello_of())}\n".encode())


def replayed(connected: socket.socket, address: ControllerAddress, numbers: random.Random) -> None:
    """The lines of a worker in another handshake."""
    prove(connected, address, numbers, json.dumps(hello_of()), other=nonce_of(numbers))


def relayed(connected: socket.socket, address: ControllerAddress, numbers: random.Random) -> None:
    """The proof of a worker that has connected to another address."""
    prove(connected, address, numbers, json.dumps(hello_of()), port=str(numbers.randrange(1, 1 << 16)))


def of_controller(connected: socket.socket, address: ControllerAddress, numbers: random.Random) -> None:
    """A proof as the controller computes it."""
    prove(connected, address, numbers, json.dumps(hello_of()), side="controller")


def wrong_secret(connected: socket.socket, address: ControllerAddress, numbers: random.Random) -> None:
    guess = numbers.choice(("", "0" * 64, address.token[:-1], address.token.upper(), nonce_of(numbers)))
    prove(connected, address, numbers, json.dumps(hello_of()), token=guess)


def malformed(connected: socket.socket, address: ControllerAddress, numbers: random.Random) -> None:
    """A message of another form, from a process that knows the secret."""
    name = numbers.choice(list(hello_of()))
    values: Sequence[Any] = ([], {}, None, 1.5, "__class__", [[]] * 50, -1 if name == "rank" else True)
    value = numbers.choice(values)
    message = json.dumps({**hello_of(), name: value})
    valid = name in ("worker", "host") and isinstance(value, str)
    prove(connected, address, numbers, "[" * 3000 if valid else message)


def hostile_messages(connected: socket.socket, address: ControllerAddress, numbers: random.Random) -> None:
    """Become a worker, and send messages that are none."""
    hello = WorkerHello("calls", secrets.token_hex(8), HOSTILE, 1, "host", RUN)
    send_hello(connected, hello, address.host_and_port, address.token)
    with connect(address) as heartbeats:
        send_hello(heartbeats, replace(hello, purpose="heartbeats"), address.host_and_port, address.token)
        heartbeats.sendall(numbers.randbytes(10))
        connected.sendall(b"".join(hostile_frame(numbers) for _ in range(numbers.randrange(1, 4))))
        connected.shutdown(socket.SHUT_WR)
        while connected.recv(1 << 12):
            pass


TENSORS: Sequence[Any] = (
    *([["float32", [1 << 40]]], [["float32", [-1]]], [["uint8", [1 << 30]]] * 9999, [["load", [1]]], 7, {}),
    *([["float32", ["8"]]], [["int64", [0, 1 << 62, 1 << 62]]], [[[], []]], [["bool", [1 << 20]]]),
)
VALUES: Sequence[Any] = (
    *({"tensor": 0}, {"tensor": "a"}, {"pickle": "gASV"}, {"remote": "engine.__class__"}, {"engine_report": 7}),
    *({"list": [{"list": 7}]}, {"batch": {"__class__": 1}}, {"experiment": {"external_libs": ["os"]}}, {}, "text"),
    *({"shared_tensor": ["a", "load", [1], "/etc/passwd", 1, 0]}, {"path": 7}, {"mapping": []}),
)


def hostile_frame(numbers: random.Random) -> bytes:
    """Return a message of a worker with a wrong kind, length, checksum or content."""
    content = json.dumps({"value": numbers.choice(VALUES), "tensors": numbers.choice(TENSORS)}).encode()
    content = numbers.choice((content, content, content, b"[" * 100_000, content[:-1], numbers.randbytes(50), b"7"))
    length = numbers.choice((len(content), len(content), len(content), 1 << 29, (1 << 64) - 1, 0))
    prefix = numbers.choice((b"R", b"R", b"E", b"C", b"\x80")) + length.to_bytes(8)
    frame = prefix + zlib.crc32(prefix).to_bytes(4) + content + zlib.crc32(content).to_bytes(4)
    return numbers.choice((frame, frame, frame, frame[: numbers.randrange(len(frame))], numbers.randbytes(64)))


STRANGERS: Sequence[Stranger] = (
    *(silent, noise, other_protocol, truncated, oversized, slow, reset, reflected, replayed, relayed),
    *(of_controller, wrong_secret, malformed),
)
"""Connections that must not be accepted."""


def connect(address: ControllerAddress) -> socket.socket:
    return socket.create_connection(address.host_and_port, timeout=SOCKET_SECONDS)


def attack(address: ControllerAddress, seed: int) -> tuple[str, bool]:
    """Open one hostile connection; return its kind, and whether it was accepted without the secret."""
    numbers = random.Random(seed)
    kind = numbers.choice((*STRANGERS, hostile_messages))
    last_line = b""
    try:
        with connect(address) as connected:
            kind(connected, address, numbers)
            if kind is not hostile_messages and connected.fileno() >= 0:
                connected.shutdown(socket.SHUT_WR)
                while received := connected.recv(1 << 12):
                    last_line = (last_line + received)[-200:]
    except OSError:  # closed by the controller
        return kind.__name__, False
    return kind.__name__, last_line.endswith(b"\n") and not last_line.rstrip(b"\n").rpartition(b"\n")[2]


@contextmanager
def running_controller() -> Iterator[tuple[ControllerAddress, Connection, Sequence[Any]]]:
    """Start a controller and its worker; yield the address, the pipe to the controller, and both processes."""
    pipe, theirs = FORK.Pipe()
    controller = FORK.Process(target=control, args=(theirs,))
    controller.start()
    theirs.close()
    address = pipe.recv()
    worker = FORK.Process(target=work, args=(address,))
    worker.start()
    try:
        yield address, pipe, (controller, worker)
    finally:
        for process in (controller, worker):
            process.kill()
            process.join()


def can_connect(address: ControllerAddress) -> bool:
    """Return whether the controller still accepts a process that knows the secret."""
    try:
        with connect(address) as connected:
            hello = WorkerHello("calls", secrets.token_hex(8), HOSTILE, 1, "host", RUN)
            send_hello(connected, hello, address.host_and_port, address.token)
    except OSError:
        return False
    return True


def report_of(pipe: Connection) -> dict[str, Any]:
    """Return the report of the controller, or that there is none."""
    try:
        pipe.send("stop")
        if pipe.poll(60.0):
            report: dict[str, Any] = pipe.recv()
            return report
    except (OSError, EOFError):
        pass
    return {"errors": ["the controller has ended"], "accepted": 0, "latencies": {"quiet": [], "attack": []}, "mib": 0}


def percentile_ms(latencies: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return round(1000 * statistics.quantiles(latencies, n=100)[98], 2) if len(latencies) > 1 else 0.0


def run(count: int, seed: int) -> dict[str, object]:
    """Open `count` hostile connections; return what they achieved."""
    with running_controller() as (address, pipe, processes):
        time.sleep(QUIET_SECONDS)
        pipe.send("attack")
        with ThreadPoolExecutor(NUM_ATTACKERS) as attackers:
            outcomes = list(attackers.map(partial(attack, address), range(seed * 1_000_003, seed * 1_000_003 + count)))
        errors = [] if can_connect(address) else ["a worker cannot connect after the attack"]
        alive = [process.is_alive() for process in processes]
        report = report_of(pipe)
    latencies = report["latencies"]
    return {
        "connections": count,
        "kinds": dict(sorted(Counter(kind for kind, _ in outcomes).items())),
        "accepted": sum(accepted for _, accepted in outcomes) + report["accepted"],
        "deaths": alive.count(False) + len(report["errors"]) + len(errors),
        "errors": [*report["errors"], *errors][:10],
        "honest_calls": len(latencies["attack"]),
        "quiet_p99_ms": percentile_ms(latencies["quiet"]),
        "attack_p99_ms": percentile_ms(latencies["attack"]),
        "controller_growth_mib": report["mib"],
    }
