"""If these fail, one client that sends slowly, much or nothing keeps all others from being served."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving_clients import Client, hf_engine, served

from quintet.runtime.serving import connection_server, connections, request_handler
from quintet.runtime.serving.address import Address
from quintet.runtime.serving.connection_server import ConnectionServer
from quintet.runtime.serving.connections import Connection, ConnectionTable, FairSemaphore
from quintet.runtime.serving.request_schema import RequestError

COMPLETE = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def client(policy_directory: Path) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_server, "max_connections", lambda: 8)
        with served(hf_engine(policy_directory), policy_directory) as made:
            yield made


def open_connection(client: Client, sent: bytes = b"", source: str = "127.0.0.2") -> socket.socket:
    """A connection of another client of this machine."""
    address = urlsplit(client.url)
    connection = socket.create_connection((address.hostname, address.port), 20, source_address=(source, 0))
    connection.sendall(sent)
    return connection


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    return received


def test_silent_connections_are_closed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    for sent in (b"", b"POST /v1/comp", HEAD):
        assert answer(open_connection(client, sent)) == b""


def test_a_body_that_arrives_byte_by_byte_is_given_up(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.4)
    connection = open_connection(client, HEAD + b"Content-Length: 100\r\n\r\n")

    def drip() -> None:
        for _ in range(20):
            connection.sendall(b" ")
            time.sleep(0.1)

    started = time.monotonic()
    threading.Thread(target=pytest.raises, args=(OSError, drip), daemon=True).start()
    assert b" 408 " in connection.recv(100)
    assert time.monotonic() - started < 1.5


def test_a_head_without_end_is_refused(client: Client) -> None:
    connection = open_connection(client, HEAD + b"X: %s\r\n" % (b"x" * 1000) * 75)
    assert connection.recv(100).startswith(b"HTTP/1.1 431 ")


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(client: Client) -> None:
    expecting = HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    refused = answer(open_connection(client, expecting % (1 << 30)))
    assert refused.startswith(b"HTTP/1.1 413 ")
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    connection = open_connection(client, expecting % len(body))
    assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_connections_without_requests_make_room_for_new_ones(client: Client) -> None:
    silent = [open_connection(client, source=f"127.0.0.{2 + number % 3}") for number in range(20)]
    for _ in range(3):
        assert client.ask(COMPLETE, {"prompt": "a", "max_tokens": 1})["choices"]
    assert sum(connection.recv(1) == b"" for connection in silent[:8]) == 8, "the oldest were closed"


def test_a_client_with_too_many_requests_is_told_to_retry(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_handler, "MAX_UNFINISHED", 3)
    assert client.ask(COMPLETE, {"prompt": "a", "max_tokens": 1, "n": 3})["choices"]
    connection = client.connect()
    connection.request("POST", COMPLETE, json.dumps({"prompt": "a", "n": 4}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert (response.status, response.headers["Retry-After"]) == (429, "1")
    assert client.ask(COMPLETE, {"prompt": "a", "max_tokens": 1, "n": 3})["choices"], "finished ones do not count"


def table(maximum: int) -> tuple[ConnectionTable, Any]:
    made = ConnectionTable(maximum)

    def add(client: str, *, busy: bool) -> Connection | None:
        connection = made.add(client, socket.socket())
        if connection is not None:
            connection.is_reading = not busy
        return connection

    return made, add


def test_a_client_has_at_most_half_of_the_connections() -> None:
    _, add = table(8)
    assert [add("a", busy=True) is not None for _ in range(6)] == [True] * 4 + [False] * 2
    assert [add("b", busy=True) is not None for _ in range(4)] == [True] * 4
    assert add("c", busy=False) is None, "all are in use"


def test_large_bodies_are_limited_by_client_and_in_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_LARGE_BYTES", 4 << 20)
    monkeypatch.setattr(connections, "MAX_LARGE_BYTES_PER_CLIENT", 2 << 20)
    made, add = table(20)

    async def begins(client: str) -> bool:
        """Return whether a body is accepted; it may have to wait for its turn."""
        body = made.body(add(client, busy=False), 1 << 20)
        receiving = asyncio.ensure_future(body.__aenter__())
        accepted.append((body, receiving))
        await asyncio.sleep(0)
        return not receiving.done() or not isinstance(receiving.exception(), RequestError)

    async def main() -> None:
        assert [await begins("a") for _ in range(3)] == [True, True, False]
        assert [await begins("b") for _ in range(3)] == [True, True, False]
        assert not await begins("c")
        for _, receiving in accepted:
            receiving.cancel()

    accepted: list[tuple[Any, asyncio.Future[None]]] = []
    asyncio.run(main())


def test_clients_take_turns_for_permits() -> None:
    order = list[str]()

    async def main() -> None:
        semaphore = FairSemaphore(1)
        await semaphore.acquire("a")

        async def wait(client: str) -> None:
            await semaphore.acquire(client)
            order.append(client)
            semaphore.release(0.0)

        waiting = [asyncio.ensure_future(wait(client)) for client in ("a", "a", "a", "b")]
        cancelled = asyncio.ensure_future(wait("c"))
        await asyncio.sleep(0)
        cancelled.cancel()
        semaphore.release(0.0)
        await asyncio.wait_for(asyncio.gather(*waiting), 10)

    asyncio.run(main())
    assert order == ["a", "b", "a", "a"]


def test_work_for_connections_leaves_time_for_the_engine() -> None:
    """A permit that was used for 20 ms rests for 40."""

    async def main() -> float:
        semaphore = FairSemaphore(1, rest_ratio=2.0)
        await semaphore.acquire("a")
        started = time.monotonic()
        semaphore.release(0.02)
        await asyncio.wait_for(semaphore.acquire("a"), 10)
        return time.monotonic() - started

    assert 0.04 <= asyncio.run(main()) < 1


def test_closing_a_server_ends_while_its_clients_leave() -> None:
    """The last connection may end in the same turn of the event loop as the server stops listening."""

    async def wait(connection: Connection, _table: ConnectionTable) -> None:
        await asyncio.get_running_loop().sock_recv(connection.socket, 1)

    for _ in range(200):
        server = ConnectionServer(Address("127.0.0.1", 0), wait)
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        leaving = threading.Thread(target=lambda clients=clients: [client.close() for client in clients])
        closing = threading.Thread(target=server.close, daemon=True)
        leaving.start()
        closing.start()
        closing.join(10)
        leaving.join()
        assert not closing.is_alive()
