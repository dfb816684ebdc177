"""Send hostile requests to `quintet serve` and `quintet serve-envs`, and measure what an honest client notices.

    python benchmarks/attack_requests.py [--count 10000] [--servers serve serve-envs] [--seed 0] [--out FILE]

Each server is a process of its own on loopback. Requests are drawn from a grammar of mutations of HTTP (methods, paths,
headers, lengths, chunks, slow and silent senders) and of JSON (types of each field, numbers, depth, Unicode, schemas,
products of sizes, sessions, images), `CONCURRENT` at a time, from a loopback address and a process of their own so that
encoding them does not delay the honest client, who opens a connection per request. Prints one JSON object: deaths,
statuses, latencies, memory and open descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import multiprocessing
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HOST, HONEST, HOSTILE = "127.0.0.1", "127.0.0.1", "127.0.0.2"
CONCURRENT = 16
NUM_QUIET = 200
"""Honest requests before the attack, after one that is not measured: a server's first request also starts it."""
SECONDS_PER_REQUEST = 40.0
"""Time after which an attacker gives up."""
SECONDS_TO_SETTLE = 90.0
"""Time for connections to be closed after the attack."""
TRIAL_DESCRIPTORS = 4
"""Files that the process with which a server tries grammars keeps open."""
HONEST_SECONDS = 300.0
"""Time after which the honest client gives up."""
MAX_BODY_BYTES = 20 << 20
"""Maximum size of what is repeated in a body; the servers accept 16 MiB."""
MAX_SHOWN_BYTES = 2000
EXPECTED = ("501", "503")
"""Statuses of a busy server, and of a Transfer-Encoding that no server has."""
Drawing = random.Random


@dataclass
class Target:
    """A server, and how to attack it."""

    command: list[str]
    honest: tuple[str, bytes]
    """Path and body of the honest request; those of the environment service name its session."""
    bodies: Callable[[Drawing], tuple[str, Any]]
    """Draws path and body of a hostile request."""
    paths: list[str]


@dataclass
class Found:
    """Responses to the attackers and to the honest client."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """Requests and responses of status 500 and above that are not `EXPECTED`."""
    honest: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Responses to the honest client that are not 200."""


# Values that no field should accept, or that are expensive.
def junk(draw: Drawing, depth: int = 3) -> Any:
    """Return a JSON value of any type."""
    kinds: list[Callable[[], Any]] = [
        lambda: None,
        lambda: draw.choice([True, False]),
        lambda: draw.choice([-1, 0, 1, 2**31, 2**63, 2**64, -(2**70), 10**300, 1e308, -0.0, 5e-324]),
        lambda: draw.choice(["", "\ud800", "\x00", "a" * 5000, "é" * 300, "<tool_call>", "\u202e", "../..", "{{7*7}}"]),
        lambda: "x" * draw.choice([1, 1025, 70_000, 300_000]),
        lambda: [junk(draw, depth - 1) for _ in range(draw.choice([0, 1, 3]))] if depth else [],
        lambda: {draw.choice(["", "a", "type", "$ref", "\ud800"]): junk(draw, depth - 1)} if depth else {},
        lambda: [0] * draw.choice([10, 5000, 100_000]),
    ]
    return draw.choice(kinds)()


def nested(schema: Any, depth: int, wrap: Callable[[Any], Any]) -> Any:
    """Return a schema within others."""
    for _ in range(depth):
        schema = wrap(schema)
    return schema


def num_copies(value: Any, count: int) -> int:
    """Return how often a body repeats a value: `count` times, unless it is too large."""
    return min(count, max(MAX_BODY_BYTES // len(json.dumps(value)), 1))


def schema(draw: Drawing) -> Any:
    """Return a JSON schema that is expensive to compile, or invalid."""
    number = draw.choice([7, 65_536, 65_537, 10**6, 10**8, 10**20, -1, 1.5])
    text = "x" * draw.choice([10, 1000, 60_000])
    kinds: list[Callable[[], Any]] = [
        lambda: {"type": "array", "items": {"type": "integer"}, draw.choice(["minItems", "maxItems"]): number},
        lambda: {"type": "string", draw.choice(["minLength", "maxLength"]): number},
        lambda: {"type": "object", draw.choice(["minProperties", "maxProperties"]): number},
        lambda: {"type": "string", "pattern": draw.choice(["(a{1,100}){1,100000}", "(a|b)*a(a|b){1000}", "((", text])},
        lambda: {"type": "integer", "minimum": -(10**number) if number in (7, 1.5) else number, "maximum": 10**30},
        lambda: {"enum": list(range(draw.choice([10, 5000, 20_000])))},
        lambda: {"const": draw.choice([text, junk(draw)])},
        lambda: {"$ref": draw.choice(["#", "#/$defs/a", "https://example.com/a", "#/../.."]), "$defs": {"a": {}}},
        lambda: {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        lambda: nested({}, draw.choice([20, 99, 500]), lambda inner: {"type": "array", "items": inner}),
        lambda: nested({"type": "integer"}, draw.choice([5, 11]), lambda inner: {"anyOf": [inner, inner]}),
        lambda: {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(6)]} for i in range(8)]},
        lambda: {"type": "object", "properties": {f"p{index}": {} for index in range(draw.choice([5, 3000]))}},
        lambda: {"type": "array", "prefixItems": [{"type": "string"}] * draw.choice([3, 2000])},
        lambda: {"patternProperties": {"^a+$": {}}, "additionalProperties": {"type": "string", "maxLength": number}},
        lambda: {draw.choice(["if", "not", "oneOf", "type"]): junk(draw)},
    ]
    return draw.choice(kinds)()


def constraint(draw: Drawing) -> dict[str, Any]:
    """Return a field that constrains the text of a completion."""
    name = draw.choice(["x", "", "a b", "x" * 100])
    regex = draw.choice(["a{1,100000}", "(.*a.{50}){20}", "[", "\ud800", "(a{1000}){1000}", "(?=a)", "x" * 1000])
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema(draw)}}},
        lambda: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(draw)}}},
        lambda: {"structured_outputs": {"json": schema(draw)}},
        lambda: {"structured_outputs": {"regex": regex}},
        lambda: {"structured_outputs": {"choice": [f"choice {n}" for n in range(draw.choice([2, 3000, 50_000]))]}},
        lambda: {"structured_outputs": junk(draw)},
        lambda: {"response_format": junk(draw)},
    ]
    return draw.choice(kinds)()


def image(draw: Drawing) -> dict[str, Any]:
    """Return an image part: a file that declares many pixels, a damaged one, or a URL."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    width, height = draw.choice([(8, 8), (100_000, 100_000), (4096, 4096), (1, 2**31 - 1)])
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    file = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1 << 16))) + chunk(b"IEND", b"")
    encoded = base64.b64encode(file).decode()
    urls = [f"data:image/png;base64,{encoded}", "file:///etc/passwd", "http://127.0.0.1/", "data:,", "data:image/gif;x"]
    return {"type": "image_url", "image_url": {"url": draw.choice(urls), "detail": draw.choice(["auto", "low", 5])}}


CHAT = {"messages": [{"role": "user", "content": "P _ O\n_ _ G"}], "max_tokens": 4}
CHAT_FIELDS = [
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "min_tokens", "stop"),
    *("stop_token_ids", "ignore_eos", "seed", "n", "stream", "stream_options", "return_token_ids", "user", "metadata"),
    *("response_format", "structured_outputs", "messages", "max_completion_tokens", "logprobs", "top_logprobs"),
    *("add_generation_prompt", "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls", "best_of"),
    *("logit_bias", "echo", "prompt_logprobs", "guided_json", "functions", "\ud800", "skip_special_tokens"),
]


def serving_body(draw: Drawing) -> tuple[str, Any]:
    """Return path and body of a request to `quintet serve`."""
    chat, session = "/v1/chat/completions", f"/sessions/s{draw.randrange(6)}"
    tool = {"type": "function", "function": {"name": "f", "parameters": schema(draw)}}
    products = {
        "n": draw.choice([1, 8, 128, 129]),
        "max_tokens": draw.choice([1, 16, 250, 10**9]),
        "stop": ["a" * draw.choice([1, 1024])] * draw.choice([1, 64]),
        "logprobs": True,
        "top_logprobs": draw.choice([0, 20]),
        "stream": draw.choice([True, False]),
    }
    prompts = draw.choice([["a"] * 5000, [[1] * 10] * 3000, [[]], [0] * 100_000, "a" * 10**6, [2**40]])
    kinds: list[Callable[[], tuple[str, Any]]] = [
        lambda: (chat, CHAT | {draw.choice(CHAT_FIELDS): junk(draw) for _ in range(draw.choice([1, 2]))}),
        lambda: (chat, CHAT | constraint(draw)),
        lambda: (chat, CHAT | products),
        lambda: (chat, CHAT | {"tools": [tool] * draw.choice([1, 129]), "tool_choice": "required"}),
        lambda: (chat, CHAT | {"messages": [{"role": "user", "content": [image(draw)] * draw.choice([1, 130])}]}),
        lambda: (chat, CHAT | {"messages": [{"role": draw.choice(["user", "tool", 5]), "content": junk(draw)}]}),
        lambda: (chat, CHAT | {"messages": [{"role": "user", "content": "a"}] * draw.choice([3, 20_000])}),
        lambda: (chat, CHAT | {"metadata": nested(0, draw.choice([3, 200]), lambda inner: {"a": inner})}),
        lambda: ("/v1/completions", {"prompt": prompts, "max_tokens": draw.choice([1, 10**6]), "n": 3}),
        lambda: ("/generate", {"prompt_token_ids": draw.choice([[1, 2], [-1], [10**9], []]), "max_tokens": 2}),
        lambda: (f"{session}{chat}", CHAT | {"metadata": {"a": "x" * draw.choice([10, 10**5, 10**6])}, "user": "u"}),
        lambda: (f"{session}/reward", {"reward": junk(draw)}),
        lambda: (chat, junk(draw)),
    ]
    return draw.choice(kinds)()


def service_body(draw: Drawing, sessions: list[str]) -> tuple[str, Any]:
    """Return path and body of a request to `quintet serve-envs`."""
    session = f"/sessions/{draw.choice(sessions) if sessions else 'x'}"
    names = [str(number) for number in range(draw.choice([1, 40, 4000, 9000]))]
    env = {"name": "frozenlake", draw.choice(["size", "instruction", "path", "max_actions", "service"]): junk(draw)}
    array = {"dtype": draw.choice(["uint8", "object", 5]), "shape": [draw.choice([4, -1, 10**18])] * 3, "data": "AAAA"}
    item = {"env": "a", draw.choice(["seed", "actions", "robots", "other"]): junk(draw)}
    items = [item] * num_copies(item, len(names))
    vagen = {"env_name": draw.choice(["frozenlake", "sokoban", "x"]), "env_config": draw.choice([{}, junk(draw)])}
    kinds: list[Callable[[], tuple[str, Any]]] = [
        lambda: ("/sessions", {"env": env}),
        lambda: ("/sessions", {"env": {"name": "frozenlake", "instruction": "x" * draw.choice([10, 10**4, 10**6])}}),
        lambda: ("/sessions", {"env": nested(0, draw.choice([70, 300]), lambda inner: {"a": inner})}),
        lambda: (f"{session}/reset", {"seeds": dict.fromkeys(names, 1)}),
        lambda: (f"{session}/step", {"actions": {"1": [draw.choice(["Up", array, image(draw), junk(draw)])]}}),
        lambda: (f"{session}/exchange", {"number": draw.choice([0, 5, 2**70]), "requests": items}),
        lambda: (f"{session}/reward", {"envs": names}),
        lambda: (f"{session}/close", {"envs": names}),
        lambda: ("/environments", {"ids2configs": dict.fromkeys(names[: num_copies(vagen, 40)], vagen)}),
        lambda: ("/batch/reset", {"ids2seeds": {name: junk(draw) for name in names[:40]}}),
        lambda: ("/batch/step", {"ids2actions": dict.fromkeys(names, "<answer>Up</answer>")}),
        lambda: (draw.choice(["/sessions", "/batch/close", f"{session}/step"]), junk(draw)),
    ]
    return draw.choice(kinds)()


@dataclass
class Message:
    """Bytes to send, and how."""

    data: bytes
    parts: int = 1
    """Sent in as many parts, with a pause between them."""
    is_cut: bool = False
    """The connection ends after the data."""
    reads: bool = True
    """The response is read at once, else slowly."""


def hostile(draw: Drawing, target: Target) -> Message:
    """Return the next hostile request."""
    path, body = target.bodies(draw)
    data = json.dumps(body).encode()
    if draw.random() < 0.6:
        return Message(head("POST", path, {"Content-Length": len(data)}) + data, reads=draw.random() < 0.9)
    size, path = len(data), draw.choice([path, *target.paths])
    length: dict[str, object] = {"Content-Length": size}
    chunked: dict[str, object] = {
        "Transfer-Encoding": draw.choice(["chunked", "Chunked", "identity", "gzip, chunked", "\tchunked"])
    }
    chunk = draw.choice([b"0\r\n\r\n", b"ffffffffffffffff\r\na\r\n", b"-1\r\n", b"5\r\nabcde\r\n0\r\n\r\n", b"zz\r\n"])
    junk_line = draw.choice([b"\x00" * 50, b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\n"])
    wrong_length = draw.choice(["-1", "9" * 5000, "+5", "5, 5", ""])
    media_type, host = draw.choice(["text/plain", "", "a" * 999]), draw.choice(["evil.example", "", "[::1", "a" * 9999])
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "x"}
    kinds: list[Callable[[], Message]] = [
        lambda: Message(head(draw.choice(["GET", "PUT", "DELETE", "HEAD", "TRACE", "CONNECT", "x"]), path, {})),
        lambda: Message(head("POST", path, length | chunked) + chunk + data),
        lambda: Message(head("POST", path, chunked) + chunk),
        lambda: Message(head("POST", path, length, f"Content-Length: {size + 1}") + data),
        lambda: Message(head("POST", path, {"Content-Length": wrong_length}) + data),
        lambda: Message(head("POST", path, {"Content-Length": size + 50}) + data, is_cut=True),
        lambda: Message(head("POST", path, {"Content-Length": max(size - 5, 0)}) + data),
        lambda: Message(head("POST", path, length) + data[: size // 2], is_cut=True),
        lambda: Message(head("POST", path, length | {f"X-{n}": "y" for n in range(draw.choice([100, 3000]))}) + data),
        lambda: Message(head("POST", path, length | {"X-Long": "y" * draw.choice([1000, 100_000])}) + data),
        lambda: Message(head("POST", path, length | {"Content-Encoding": "gzip", "Expect": "100-continue"}) + data),
        lambda: Message(head("POST", path, length | {"Content-Type": media_type}) + data),
        lambda: Message(head("POST", path, length | {"Host": host}) + data),
        lambda: Message(head("GET", path, upgrade)),
        lambda: Message(head("POST", draw.choice(["http://a/", "//", "/%00", "/" + "a" * 70_000]), length) + data),
        lambda: Message(head("POST", path, length) + data, parts=4),
        lambda: Message(head("GET", "/health", {"Connection": "keep-alive"}) * 50),
        lambda: Message(junk_line),
        lambda: Message(head("POST", path, {"Content-Length": size // 2}) + mutated(draw, data)[: size // 2]),
        lambda: Message(b"", is_cut=True),
    ]
    return draw.choice(kinds)()


def head(method: str, path: str, headers: Mapping[str, object], *lines: str) -> bytes:
    """Return request line and headers."""
    sent: dict[str, object] = {"Host": HOST, "Content-Type": "application/json", "Connection": "close", **headers}
    named = [f"{name}: {value}" for name, value in sent.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *named, *lines, "", ""]).encode(errors="replace")


def mutated(draw: Drawing, data: bytes) -> bytes:
    """Return bytes of which some are changed."""
    changed = bytearray(data)
    for _ in range(min(len(changed), draw.choice([1, 5, 50]))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


async def attack(port: int, message: Message, found: Found) -> None:
    """Send a request, and count the status of the response."""
    status, body = "closed", b""
    try:
        async with asyncio.timeout(SECONDS_PER_REQUEST), hostile_connection(port) as (reader, writer):
            step = max(-(-len(message.data) // message.parts), 1)
            for start in range(0, len(message.data), step):
                writer.write(message.data[start : start + step])
                await asyncio.sleep(0.05 if message.parts > 1 else 0)
            if message.is_cut:
                writer.write_eof()
            line = await reader.readline()
            if line:
                status = line.split()[1].decode()
            body = await reader.read(MAX_SHOWN_BYTES)
            rest = body
            while rest and (message.reads or status.startswith("5")):
                rest = await asyncio.wait_for(reader.read(1 << 16), 0.5)
                body += rest[: MAX_SHOWN_BYTES - len(body)]
    except (OSError, TimeoutError):
        pass
    found.statuses[status] += 1
    # VAGEN's protocol has this status for unknown environments
    if status.startswith("5") and status not in EXPECTED and b"env_failed" not in body:
        found.failures.append(f"{message.data[:300]!r} -> {status} {body[-500:]!r}")


@contextlib.asynccontextmanager
async def hostile_connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(HOSTILE, 0))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def ask(port: int, path: str, body: bytes) -> tuple[str, bytes]:
    """Return status and body of an honest request."""
    with socket.create_connection((HOST, port), HONEST_SECONDS, (HONEST, 0)) as connection:
        connection.sendall(head("POST", path, {"Content-Length": len(body)}) + body)
        with connection.makefile("rb") as stream:
            response = stream.read()
    top, _, content = response.partition(b"\r\n\r\n")
    return (top.split()[1].decode() if top else "closed"), content


def ask_honestly(port: int, target: Target, found: Found) -> None:
    """Send the honest request, and add its status and latency."""
    started = time.perf_counter()
    try:
        status, _ = ask(port, *target.honest)
    except OSError as error:
        status = type(error).__name__
    found.honest.append(time.perf_counter() - started)
    if status != "200":
        found.refused[status] += 1


def attack_all(port: int, target: Target, count: int, seed: int, results: Connection) -> None:
    """Send hostile requests, `CONCURRENT` at a time, then what was found."""
    draw, found, remaining = random.Random(seed), Found(), iter(range(count))

    async def attacker() -> None:
        for _ in remaining:
            await attack(port, hostile(draw, target), found)

    async def attackers() -> None:
        await asyncio.gather(*(attacker() for _ in range(CONCURRENT)))

    asyncio.run(attackers())
    results.send(found)


def ask_under_attack(port: int, target: Target, count: int, seed: int) -> Found:
    """Send honest requests while a process sends hostile ones; return the responses to both."""
    processes = multiprocessing.get_context("fork")
    receiver, sender = processes.Pipe(duplex=False)
    attackers = processes.Process(target=attack_all, args=(port, target, count, seed, sender))
    attackers.start()
    sender.close()
    honest = Found()
    while not receiver.poll():
        ask_honestly(port, target, honest)
    found: Found = receiver.recv()
    attackers.join()
    found.honest, found.refused = honest.honest, honest.refused
    return found


@contextlib.contextmanager
def started(target: Target, directory: Path) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Start a server; yield port and process."""
    command = [sys.executable, "-m", "quintet", *target.command, "--port", "0"]
    with (directory / f"{target.command[0]}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=directory)
    try:
        assert process.stdout is not None
        address = process.stdout.readline()
        yield int(address.rpartition(":")[2].strip().removesuffix("/v1")), process
    finally:
        process.terminate()
        process.wait()


def p99_ms(seconds: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return round(statistics.quantiles(seconds, n=100, method="inclusive")[98] * 1000, 1)


def descriptors(pid: int) -> int:
    """Return the number of open files of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def peak_mib(pid: int) -> int:
    """Return the largest resident memory of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))


def measure(target: Target, count: int, seed: int, directory: Path, sessions: list[str]) -> dict[str, object]:
    """Attack one server with `count` requests."""
    with started(target, directory) as (port, process):
        first, quiet, after = Found(), Found(), Found()
        if target.command[0] == "serve-envs":
            own, *others = [json.loads(ask(port, "/sessions", b"{}")[1])["session"] for _ in range(5)]
            sessions += others
            target.honest = (f"/sessions/{own}/reset", b'{"seeds": {"a": 1}}')
        ask_honestly(port, target, first)
        for _ in range(NUM_QUIET):
            ask_honestly(port, target, quiet)
        before = descriptors(process.pid)
        began = time.perf_counter()
        found = ask_under_attack(port, target, count, seed)
        seconds = time.perf_counter() - began
        deaths = int(process.poll() is not None)
        deadline = time.monotonic() + SECONDS_TO_SETTLE
        while not deaths and descriptors(process.pid) > before + TRIAL_DESCRIPTORS and time.monotonic() < deadline:
            time.sleep(0.2)
        ask_honestly(port, target, after)
        return {
            "requests": count,
            "seconds": round(seconds, 1),
            "deaths": deaths,
            "failures": len(found.failures),
            "failed_requests": found.failures[:5],
            "statuses": dict(sorted(found.statuses.items())),
            "honest_refused": dict(first.refused + found.refused + after.refused),
            "honest_p99_ms_quiet": p99_ms(quiet.honest),
            "honest_p99_ms_under_attack": p99_ms(found.honest) if len(found.honest) > 1 else None,
            "honest_requests_under_attack": len(found.honest),
            "peak_mib": None if deaths else peak_mib(process.pid),
            "descriptors": [before, None if deaths else descriptors(process.pid)],
        }


SERVERS = ("serve", "serve-envs")


def run(count: int, seed: int, server: str) -> dict[str, object]:
    """Attack a server, one of `SERVERS`, with `count` requests.

    Returns:
        `deaths`, `failures` (statuses from 500 on that are not `EXPECTED`), latencies, memory, descriptors.
    """
    return dict(results(count, seed, (server,)))[server]


def results(count: int, seed: int, servers: Sequence[str] = SERVERS) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the names of the attacked servers and their results."""
    from quintet.policies.tiny_models import create_preset_policy

    sessions: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        create_preset_policy("grid-3m", directory / "policy", ["P _ O\n_ _ G go left"], seed=0)
        serve = ["serve", str(directory / "policy"), "--name", "policy", "--max-concurrent", "8", "--context", "512"]
        targets = {
            "serve": Target(
                serve,
                ("/v1/chat/completions", json.dumps(CHAT).encode()),
                serving_body,
                ["/", "/health", "/v1/models", "/load", "/sessions", "/sessions/s1", "/session", "/reward", "/sleep"],
            ),
            "serve-envs": Target(
                ["serve-envs", "--env", "frozenlake", "--workers", "1"],
                ("", b""),
                lambda draw: service_body(draw, sessions),
                ["/", "/health", "/envs", "/docs", "/openapi.json", "/reward/x", "/system_prompt/x", "/close/x"],
            ),
        }
        for server in servers:
            yield server, measure(targets[server], count, seed, directory, sessions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, object] = {}
    for server, measured in results(options.count, options.seed, options.servers):
        result[server] = measured
        print(server, json.dumps(measured, indent=1), flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
