"""If these fail, one client that sends slowly, much or nothing keeps all others from being served."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from serving_clients import Client, hf_engine, served

from quintet.runtime.http_service import limits
from quintet.runtime.serving import request_costs

COMPLETE = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def client(policy_directory: Path) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "max_connections", lambda: 8)
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
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.2)
    for sent in (b"", b"POST /v1/comp", HEAD):
        assert answer(open_connection(client, sent)) == b""


def test_a_body_that_arrives_byte_by_byte_is_given_up(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.4)
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


def test_a_size_that_a_transfer_encoding_replaces_is_refused(client: Client) -> None:
    head = HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection = open_connection(client, head + b"100000\r\n")
    assert connection.recv(100).startswith(b"HTTP/1.1 411 ")


def test_targets_that_are_no_path_of_the_server_are_refused(client: Client) -> None:
    """As proxies get them: the server is no proxy, and no other path gets around the token."""
    for target in (b"http://localhost/v1/models", b"http://other.example/health", b"localhost:80", b"*"):
        connection = open_connection(client, b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        assert connection.recv(1000).startswith(b"HTTP/1.1 404 ")


def test_an_http_1_0_client_is_served(client: Client) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2, "ignore_eos": True, "stream": True}).encode()
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(body)
    response = answer(open_connection(client, head + body))
    assert b" 200 OK\r\n" in response
    assert response.endswith(b"data: [DONE]\n\n")


def test_connections_without_requests_make_room_for_new_ones(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SILENT_SECONDS", 0.1)
    silent = [open_connection(client, source=f"127.0.0.{2 + number % 3}") for number in range(20)]
    time.sleep(0.5)
    for _ in range(3):
        assert client.ask(COMPLETE, {"prompt": "a", "max_tokens": 1})["choices"]
    silent[0].settimeout(5)
    assert answer(silent[0]).startswith(b"HTTP/1.1 503 "), "the oldest made room, and is told why"
    for connection in silent:
        connection.close()


def test_a_client_with_too_many_requests_is_told_to_retry(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_costs, "MAX_UNFINISHED", 3)
    assert client.ask(COMPLETE, {"prompt": "a", "max_tokens": 1, "n": 3})["choices"]
    connection = client.connect()
    connection.request("POST", COMPLETE, json.dumps({"prompt": "a", "n": 4}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert (response.status, response.headers["Retry-After"]) == (429, "1")
    assert client.ask(COMPLETE, {"prompt": "a", "max_tokens": 1, "n": 3})["choices"], "finished ones do not count"
