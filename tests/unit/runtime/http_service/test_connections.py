"""If these fail, one client takes all connections of a server, or holds them for ever."""

from __future__ import annotations

import asyncio
import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from quintet.runtime.http_service import limits
from quintet.runtime.http_service.address import Address
from quintet.runtime.http_service.connections import ConnectionTable
from quintet.runtime.http_service.server import BackgroundServer, LimitedServer
from quintet.runtime.http_service.turns import Turns

pytestmark = pytest.mark.attack

LISTENING = "0A"
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def background(app: ASGIApp, turns: Turns | None = None) -> Iterator[int]:
    """A server of the application on this machine; yields its port."""

    async def only_http(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await app(scope, receive, send)

    server = BackgroundServer(LimitedServer(only_http, turns=turns, shutdown_seconds=1), Address("127.0.0.1", 0), 10)
    try:
        yield int(server.url.rpartition(":")[2])
    finally:
        server.close()


answer_at_once = PlainTextResponse("done")


def read_all(connection: socket.socket) -> int:
    """Return the number of bytes until the connection is closed."""
    received = 0
    while part := connection.recv(1 << 20):
        received += len(part)
    return received


def connection_of(client: str, *, busy: bool) -> Any:
    return Mock(client_host=client, is_idle=not busy)


def added(table: ConnectionTable, connection: Any) -> bool:
    """Whether a connection was added; whether it is idle is noted, as when a response is complete."""
    is_added = table.add(connection)
    table.update(connection)
    return is_added


def test_a_client_leaves_an_eighth_of_the_connections_to_others() -> None:
    table = ConnectionTable(8)
    assert [added(table, connection_of("a", busy=True)) for _ in range(9)] == [True] * 7 + [False] * 2
    assert added(table, connection_of("b", busy=True))
    assert not added(table, connection_of("c", busy=False)), "all are in use"


def test_the_connection_that_is_idle_for_longest_makes_room() -> None:
    table = ConnectionTable(4)
    busy, second, first, new = (connection_of("a", busy=True) for _ in range(4))
    assert [added(table, connection) for connection in (busy, second, first)] == [True] * 3
    for connection in (first, second):
        connection.is_idle = True
        table.update(connection)
    assert added(table, new)
    assert [connection.make_room.called for connection in (busy, second, first)] == [False, False, True]
    table.remove(first)
    table.remove(first)
    second.is_idle = False
    table.update(second)
    assert not added(table, connection_of("a", busy=True)), "one that is busy again stays"
    assert added(table, connection_of("b", busy=False))


def test_connections_beyond_the_maximum_are_told_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "max_connections", lambda: 2)

    async def wait(_scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    with background(wait) as port:
        busy = socket.create_connection(("127.0.0.1", port), 10)
        busy.sendall(GET)
        time.sleep(0.2)
        rejected = socket.create_connection(("127.0.0.1", port), 10)
        rejected.sendall(GET + b"x" * 100_000)  # what nobody reads would reset the connection
        response = rejected.recv(1000)
        assert response.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in response
        assert rejected.recv(1) == b""
        busy.close()


def test_a_connection_on_which_a_request_arrives_stays_and_one_between_two_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three connections, a client has two."""
    monkeypatch.setattr(limits, "max_connections", lambda: 3)
    with background(answer_at_once) as port:
        arriving, idle = (socket.create_connection(("127.0.0.1", port), 10) for _ in range(2))
        arriving.sendall(GET[:20])
        idle.sendall(GET)
        assert idle.recv(1000).startswith(b"HTTP/1.1 200 ")
        new = socket.create_connection(("127.0.0.1", port), 10)
        new.sendall(GET)
        assert new.recv(1000).startswith(b"HTTP/1.1 200 ")
        arriving.sendall(GET[20:])
        assert arriving.recv(1000).startswith(b"HTTP/1.1 200 ")
        read_all(idle)


def test_a_client_that_does_not_receive_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEND_SECONDS", 0.3)
    ended = threading.Event()

    async def stream(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watch = asyncio.ensure_future(receive())
        while not watch.done():
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
            await asyncio.sleep(0)
        ended.set()

    with background(stream) as port:
        silent = socket.socket()
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", port))
        silent.sendall(GET)
        assert ended.wait(10)
        silent.close()


def test_a_response_that_is_not_received_does_not_keep_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response is complete, so only the socket's buffer is waited for."""
    monkeypatch.setattr(limits, "SEND_SECONDS", 0.3)

    with background(PlainTextResponse("x" * (64 << 20))) as port:
        silent = socket.create_connection(("127.0.0.1", port), 10)
        silent.sendall(GET)
        silent.recv(1, socket.MSG_PEEK)  # it has been accepted
        wait_until_closed(port)
        assert read_all(silent) < 64 << 20


def wait_until_closed(port: int) -> None:
    """Wait until the process of a server has no connection open; its kernel may still have bytes to send."""
    end = time.monotonic() + 60
    while is_open(port):
        assert time.monotonic() < end, "the connection is still open"
        time.sleep(0.02)


def is_open(port: int) -> bool:
    """Return whether a process has a connection from a local port; sockets that it has closed have no inode."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] != LISTENING and row[9] != "0" for row in rows)


def test_pipelined_requests_and_bytes_one_by_one_are_answered() -> None:
    with background(answer_at_once) as port:
        connection = socket.create_connection(("127.0.0.1", port), 10)
        connection.sendall(GET * 50)
        for byte in GET:
            connection.sendall(bytes([byte]))
        received = b""
        while received.count(b"done") < 51:
            received += connection.recv(1 << 16)
        connection.close()


def test_bytes_that_are_not_http_are_refused() -> None:
    long_size = GET[:-2] + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n"
    with background(answer_at_once) as port:
        for sent in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/9.9.9\r\n\r\n", long_size):
            connection = socket.create_connection(("127.0.0.1", port), 10)
            connection.sendall(sent)
            assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_a_request_whose_body_is_invalid_gets_one_response_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """The application may respond to the request while the server refuses its body."""
    with background(answer_at_once) as port, socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
        assert connection.recv(1000) == b""
    assert capsys.readouterr().err == ""


def test_an_http_1_0_client_is_answered_and_disconnected() -> None:
    async def stream(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": number < 2})

    for app, expected in ((answer_at_once, b"done"), (stream, b"012")):
        with background(app) as port, socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert body == expected, "chunks of HTTP/1.1 are unknown to the client"


def test_the_processor_time_of_receiving_counts_as_work() -> None:
    seconds = list[float]()

    class RecordedTurns(Turns):
        def call(self, *args: Any, **options: Any) -> None:
            seconds.append(options["seconds"])
            super().call(*args, **options)

    async def answer_body(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            continue
        await answer_at_once(scope, receive, send)

    with background(answer_body, RecordedTurns()) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        client.request("POST", "/", bytes(8 << 20))
        assert client.getresponse().read() == b"done"
        client.close()
    assert sum(seconds) > 0.0002, "copying 8 MiB from the kernel takes longer"


def test_a_client_cannot_name_another_one() -> None:
    """A client under many names would have as many turns."""

    async def answer_client(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(scope["client"][0])(scope, receive, send)

    with background(answer_client) as port:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        client.request("GET", "/", headers={"X-Forwarded-For": "10.1.2.3", "Forwarded": "for=10.1.2.3"})
        assert client.getresponse().read() == b"127.0.0.1"
        client.close()


def test_clients_that_reset_their_connections_do_no_harm() -> None:
    with background(answer_at_once) as port:
        for sent in (b"", GET[:10], GET, GET * 10):
            connection = socket.create_connection(("127.0.0.1", port), 10)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(sent)
            connection.close()
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        client.request("GET", "/")
        assert client.getresponse().read() == b"done"
        client.close()


def test_closing_a_server_ends_while_its_clients_leave() -> None:
    """The last connection may end in the same turn of the event loop as the server stops listening."""

    async def wait(_scope: Scope, receive: Receive, _send: Send) -> None:
        await receive()

    for _ in range(10):
        server = BackgroundServer(LimitedServer(wait), Address("127.0.0.1", 0), 10)
        port = int(server.url.rpartition(":")[2])
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        leaving = threading.Thread(target=lambda clients=clients: [client.close() for client in clients])
        leaving.start()
        server.close()
        leaving.join()
        assert not server.is_running


def test_a_server_that_was_not_scheduled_closes_no_connection_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of the meantime are still to be received."""
    now = 100.0
    monkeypatch.setattr("quintet.runtime.http_service.connections.time", Mock(monotonic=lambda: now))
    table = ConnectionTable(8)
    protocol = Mock(client_host="a", is_overdue=False)
    table.add(protocol)
    now += 0.1
    table.close_overdue()
    assert not protocol.postpone.called
    now += 30.0
    table.close_overdue()
    protocol.postpone.assert_called_once_with(pytest.approx(30.0))
