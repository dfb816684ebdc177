"""If these fail, a server of environments can end a run, fill its memory, or keep it waiting for ever."""

from __future__ import annotations

import base64
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from quintet.config.native.envs import FrozenLakeConfig
from quintet.config.native.rollout import RolloutConfig
from quintet.envs.hosted_envs import EnvRequest, HostLostError
from quintet.envs.service import http_client, payload
from quintet.envs.service.http_client import ServiceClient
from quintet.envs.service.png import SIGNATURE, encode_png
from quintet.envs.service.vagen_host import VagenHost
from quintet.envs.service.vector_env import ServiceHost

pytestmark = pytest.mark.attack

Responder = Callable[[str, Any], bytes | Iterator[bytes]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
TIMEOUT = 1.0


class Server:
    """Answers each request as `respond` says; `respond` gets its path and body."""

    def __init__(self) -> None:
        self.respond: Responder = lambda path, body: b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as stream:
            while line := stream.readline():
                path, size = line.split()[1].decode(), 0
                while (header := stream.readline().lower()) != b"\r\n":
                    size = int(header.split(b":")[1]) if header.startswith(b"content-length") else size
                response = self.respond(path, json.loads(stream.read(size) or b"null"))
                for part in [response] if isinstance(response, bytes) else response:
                    connection.sendall(part)
                if b"Content-Length" not in (response if isinstance(response, bytes) else b""):
                    return

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def answered(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def client(server: Server) -> ServiceClient:
    return ServiceClient(server.url, None, TIMEOUT, max_retries=0)


def exchange(server: Server, response: bytes | Iterator[bytes], actions: tuple[str, ...] | None = ("Up",)) -> Any:
    """What a run gets for a step, or for a reset without actions, if the server sends `response`."""
    session = answered(b'{"session": "s"}')
    server.respond = lambda path, body: session if path == "/sessions" else response
    host = ServiceHost(0, client(server), {})
    host.start_build()
    host.finish()
    host.start_exchange([EnvRequest(3, seed=None if actions else 1, actions=actions)])
    return host.finish()


def result(**changes: Any) -> bytes:
    """The results of a step, with changes to its fields; numbers can be text of JSON."""
    step = {"observation": {"text": "a", "images": []}, "reward": 0.5, "terminated": False, "truncated": False}
    text = json.dumps({"results": [{"steps": [{**step, "info": {}, **changes}]}]})
    return text.replace('"<', "").replace('>"', "").encode()


def png(width: int, height: int) -> bytes:
    """A small PNG file of zeros that declares a size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return SIGNATURE + header + chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")


def images(*files: bytes) -> dict[str, Any]:
    return {"text": "a", "images": [{"png": base64.b64encode(file).decode()} for file in files]}


def test_the_plain_response_is_accepted(server: Server) -> None:
    (event,) = exchange(server, answered(result(observation=images(encode_png(payload.np.zeros((2, 3, 3), "uint8"))))))
    assert event.steps[0].reward == 0.5
    assert event.steps[0].observation.images[0].shape == (2, 3, 3)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"results": null}',
        b'{"results": []}',
        b'{"results": [7]}',
        b'{"results": [{"steps": []}]}',
        b'{"results": [{"steps": 3}]}',
        b'{"results": [{"failure": 3}]}',
        b'{"results": [{"instruction": "a", "actions": ["a"], "observation": {"text": "a", "images": []}}]}',
        result(reward="<NaN>"),
        result(reward="<1e999>"),
        result(reward="<1" + "0" * 400 + ">"),
        result(reward="<" + "9" * 9000 + ">"),
        result(reward="x"),
        result(terminated="<1>"),
        result(observation={"text": 5, "images": []}),
        result(observation=images(png(100_000, 100_000))),
        result(observation=images(png(4000, 4000))),
        result(observation=images(b"no png")),
        result(observation={"text": "a", "images": [[["a"]]]}),
        json.dumps({"results": [{"steps": json.loads(result())["results"][0]["steps"] * 2}]}).encode(),
    ],
    ids=range(26),
)
def test_an_invalid_response_loses_only_the_server(server: Server, body: bytes) -> None:
    with pytest.raises(HostLostError) as lost:
        exchange(server, answered(body))
    assert len(str(lost.value)) < 1000


def test_an_invalid_response_to_a_reset_loses_only_the_server(server: Server) -> None:
    for body in (result(), b'{"results": [{"instruction": 3, "actions": [], "observation": {}}]}'):
        with pytest.raises(HostLostError):
            exchange(server, answered(body), actions=None)


@pytest.mark.parametrize("session", [None, 5, "", "a b", "a\r\nHost: b", "../../x", "ü", "x" * 10_000])
def test_a_session_that_is_no_part_of_a_path_is_refused(server: Server, session: Any) -> None:
    server.respond = lambda path, body: answered(json.dumps({"session": session}).encode())
    host = ServiceHost(0, client(server), {})
    host.start_build()
    with pytest.raises(HostLostError, match="no valid session"):
        host.finish()


def test_many_small_files_of_large_images_are_refused_together(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "MAX_RESPONSE_PIXELS", 1000)
    file = encode_png(payload.np.zeros((20, 20, 3), "uint8"))
    exchange(server, answered(result(observation=images(file, file))))
    with pytest.raises(HostLostError) as lost:
        exchange(server, answered(result(observation=images(file, file, file))))
    assert lost.value.__cause__
    assert str(lost.value.__cause__.__cause__) == "images of more than 1000 pixels in one response"


def dripping(first: bytes, part: bytes) -> Iterator[bytes]:
    yield first
    while True:
        time.sleep(0.05)
        yield part


@pytest.mark.parametrize(
    ("first", "part"),
    [
        (HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (HEAD, b"X: y\r\n"),
        (HEAD + b"X: ", b"y"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b""),
    ],
    ids=["body", "chunks", "headers", "header", "continue", "nothing"],
)
def test_a_server_that_sends_byte_after_byte_is_lost_after_the_time_limit(
    server: Server, first: bytes, part: bytes
) -> None:
    started = time.monotonic()
    with pytest.raises(HostLostError):
        exchange(server, dripping(first, part))
    assert time.monotonic() - started < 5 * TIMEOUT


def test_a_response_without_end_does_not_fill_the_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_RESPONSE_BYTES", 4 << 20)

    def endless(first: bytes, part: bytes) -> Iterator[bytes]:
        yield HEAD + first
        while True:
            yield part

    for first, part in (
        (b"\r\n", b" " * 65536),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n"),
        (b"Content-Length: 99999999999999\r\n\r\n", b""),
    ):
        with pytest.raises(HostLostError, match="sent more than"):
            exchange(server, endless(first, part) if part else HEAD + first)


def test_vagens_servers_are_held_to_the_same_limits(server: Server) -> None:
    observation = {"obs_str": "a"}
    for body in (
        b"[" * 200_000,
        b'{"results": null}',
        json.dumps({"results": {"a": [observation, 10**400, False, {}]}}).encode(),
        json.dumps({"results": {"a": [observation, float("nan"), False, {}]}}).encode(),
        json.dumps({"results": {"a": [observation, 0.5, False, []]}}).encode(),
        json.dumps({"results": {"a": [observation]}}).encode(),
    ):
        name: list[str] = []

        def respond(path: str, sent: Any, body: bytes = body, name: list[str] = name) -> bytes:
            if path == "/batch/step":
                name.append(next(iter(sent["ids2actions"])))
                return answered(body.replace(b'"a": [', b'"%s": [' % name[0].encode()))
            return answered(b"{}")

        server.respond = respond
        host = VagenHost(0, client(server), FrozenLakeConfig(), RolloutConfig())
        host.start_build()
        host.finish()
        host.start_exchange([EnvRequest(3, actions=("Up",))])
        with pytest.raises(HostLostError):
            host.finish()
