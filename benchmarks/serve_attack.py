"""Measure the latency of a client of `quintet serve` while other clients attack the server.

    python benchmarks/serve_attack.py [--attacks NAME …] [--requests 400] [--out benchmarks/results/serve_attack.json]

Each attack has a fresh server on one core, with a policy of 3 M random weights and at most eight concurrent requests.
On the other core are the measured client, which opens a connection per chat completion of 24 tokens, and the
attackers, with the lowest priority, behind other loopback addresses. Writes one JSON file: latencies before and during
the attack, the responses to the attackers (`closed`: none), and the server's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from machine import machine

HOST, SERVER_CORE, CLIENT_CORE = "127.0.0.1", 0, 1
WARM_UP_SECONDS = 3.0
CHAT = {"messages": [{"role": "user", "content": "P _ O\n_ _ G"}], "max_tokens": 24, "ignore_eos": True}
NUM_SLOW, NUM_SILENT, NUM_LARGE, NUM_REQUESTS, BURST = 200, 500, 4, 10_000, 500
MESSAGE_BYTES = 15 << 20
Statuses = Counter[str]
Attack = Callable[[int, Statuses], Coroutine[Any, Any, None]]


def request_bytes(body: bytes, length: int | None = None) -> bytes:
    """Return a chat request; `length` announces a longer body."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {length or len(body)}\r\n\r\n".encode() + body


async def exchange(port: int, client: int, data: bytes, statuses: Statuses, dripped: int = 0) -> None:
    """Send a request as the client 127.0.0.`client`, then `dripped` bytes at one per second, and count the status."""
    writer = None
    try:
        reader, writer = await asyncio.open_connection(HOST, port, local_addr=(f"127.0.0.{client}", 0))
        writer.write(data)
        answering = asyncio.ensure_future(reader.readline())
        for _ in range(dripped):
            if (await asyncio.wait((answering,), timeout=1))[0]:
                break
            writer.write(b" ")
        answer = await answering
        statuses[answer.split()[1].decode() if answer else "closed"] += 1
        while await reader.read(1 << 16):
            pass
    except OSError:
        statuses["closed"] += 1
        await asyncio.sleep(0.01)
    finally:
        if writer is not None:
            writer.close()


async def repeat(start: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Keep `count` exchanges open."""

    async def client() -> None:
        while True:
            await start()

    await asyncio.gather(*(client() for _ in range(count)))


async def slow_bodies(port: int, statuses: Statuses) -> None:
    head = request_bytes(b'{"messages": ', 100_000)
    await repeat(lambda: exchange(port, 2, head, statuses, dripped=3600), NUM_SLOW)


async def silent_connections(port: int, statuses: Statuses) -> None:
    await repeat(lambda: exchange(port, 2, b"", statuses), NUM_SILENT)


async def bursts(port: int, statuses: Statuses) -> None:
    """Valid requests of four clients, `BURST` connections at once."""
    data = request_bytes(json.dumps(CHAT).encode())
    for _ in range(NUM_REQUESTS // BURST):
        await asyncio.gather(*(exchange(port, 2 + index % 4, data, statuses) for index in range(BURST)))


async def large_messages(port: int, statuses: Statuses) -> None:
    message = {"role": "user", "content": "go left " * (MESSAGE_BYTES // 8)}
    data = request_bytes(json.dumps({"messages": [message]}).encode())
    await repeat(lambda: exchange(port, 2, data, statuses), NUM_LARGE)


ATTACKS: dict[str, tuple[Attack, str]] = {
    "slow bodies": (slow_bodies, f"{NUM_SLOW} connections that send one byte of a body per second"),
    "silent connections": (silent_connections, f"{NUM_SILENT} connections that send nothing"),
    "bursts": (bursts, f"{NUM_REQUESTS} valid requests of four clients, {BURST} connections at once"),
    "large messages": (large_messages, f"{NUM_LARGE} connections that send messages of 15 MiB"),
}


def run_attack(name: str, port: int, statuses: Any) -> None:
    """Attack until SIGTERM; `statuses` is the sending end of a pipe."""
    os.sched_setaffinity(0, {CLIENT_CORE})
    os.nice(19)
    counted: Statuses = Counter()

    async def main() -> None:
        task = asyncio.ensure_future(ATTACKS[name][0](port, counted))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
    statuses.send(dict(counted))


def latency(port: int) -> float:
    """Return the seconds of one chat completion.

    Raises:
        RuntimeError: it was rejected.
    """
    started = time.perf_counter()
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), {"Content-Type": "application/json"})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"the measured client was answered {response.status}: {body.decode()[:200]}")
    return time.perf_counter() - started


def latencies(port: int, count: int, is_over: Callable[[], bool] = lambda: False) -> list[float]:
    measured: list[float] = []
    while len(measured) < count and not is_over():
        measured.append(latency(port))
    return measured


def summary(measured: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(measured, n=100, method="inclusive")
    return {
        "requests": len(measured),
        "p50_ms": round(cuts[49] * 1000, 1),
        "p99_ms": round(cuts[98] * 1000, 1),
        "max_ms": round(max(measured) * 1000, 1),
    }


@contextlib.contextmanager
def server(policy: Path) -> Iterator[tuple[int, int]]:
    """Serve the policy on one core; yield port and process id."""
    command = [
        sys.executable,
        "-m",
        "quintet",
        "serve",
        str(policy),
        "--name",
        "policy",
        "--port",
        "0",
        "--max-concurrent",
        "8",
    ]
    with (policy.parent / "server.log").open("wb") as log:
        process = subprocess.Popen(
            ["taskset", "-c", str(SERVER_CORE), *command], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        address = process.stdout.readline()
        yield int(address.rpartition(":")[2].removesuffix("/v1\n")), process.pid
    finally:
        process.terminate()
        process.wait()


def memory_mib(pid: int, key: str = "VmRSS") -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(key))


def measure(name: str, policy: Path, count: int) -> dict[str, Any]:
    """Measure `count` latencies before and during an attack."""
    with server(policy) as (port, pid):
        latencies(port, 20)
        memory_before = memory_mib(pid)
        quiet = latencies(port, count)
        receiver, sender = multiprocessing.Pipe(duplex=False)
        attacker = multiprocessing.Process(target=run_attack, args=(name, port, sender))
        attacker.start()
        time.sleep(WARM_UP_SECONDS if name != "bursts" else 0.5)
        started = time.perf_counter()
        attacked = latencies(port, 10**9 if name == "bursts" else count, lambda: not attacker.is_alive())
        seconds = time.perf_counter() - started
        attacker.terminate()
        attacker.join()
        statuses = receiver.recv()
        after = latencies(port, 20)
        result = {"attack": ATTACKS[name][1], "quiet": summary(quiet), "under_attack": summary(attacked)}
        result["p99_ratio"] = round(result["under_attack"]["p99_ms"] / result["quiet"]["p99_ms"], 2)
        result |= {"attack_seconds": round(seconds, 1), "statuses": statuses, "after": summary(after)}
        peak = memory_mib(pid, "VmHWM")
        return result | {"memory_mib": {"before": memory_before, "peak": peak, "after": memory_mib(pid)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", choices=sorted(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, {CLIENT_CORE})
    from quintet.policies.tiny_models import create_preset_policy

    result: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as directory:
        policy = Path(directory) / "policy"
        create_preset_policy("grid-3m", policy, ["P _ O\n_ _ G go left"], seed=0)
        for name in options.attacks:
            result[name] = measure(name, policy, options.requests)
            print(name, json.dumps(result[name]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
