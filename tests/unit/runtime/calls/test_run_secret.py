"""If these fail, a process that knows the port of a run becomes its worker or its controller, or keeps workers out."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from quintet.errors import MachineError
from quintet.runtime.calls import listener as listener_module
from quintet.runtime.calls.listener import ControllerAddress, WorkerHello, WorkerListener
from quintet.runtime.calls.run_secret import VARIABLE, RunSecret, proof
from quintet.runtime.worker_process import _connect_twice

HELLO = WorkerHello("calls", "a", 1, 2, "h", "the run")


@pytest.fixture
def listener() -> Iterator[WorkerListener]:
    with closing(WorkerListener("127.0.0.1", {1: "", 2: ""}, "the run", lost_seconds=60.0)) as listener:
        yield listener


def is_connected(listener: WorkerListener, hello: WorkerHello = HELLO) -> bool:
    """Connect a worker that knows the secret; return whether the listener takes it."""
    with ExitStack() as connections:
        for connected in _connect_twice(ControllerAddress.of(listener), hello):
            connections.enter_context(connected)
        return [worker.rank for worker in listener.wait_for([hello.rank], 10.0)] == [hello.rank]


def test_a_process_without_the_secret_is_no_worker(listener: WorkerListener, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(listener.address, timeout=5) as stranger:
        stranger.sendall(b"nonce\n")
        nonce = stranger.recv(1000).decode().split()[0]
        message = json.dumps({"purpose": "calls", "worker": "a", "rank": 1, "pid": 1, "host": "h", "fingerprint": ""})
        stranger.sendall(f"{proof('guessed', 'worker', nonce, 'nonce', message)} {message}\n".encode())
        assert stranger.recv(1000) == b"it does not know the secret of the run\n"
    assert listener.take_connected_workers([1, 2]) == []
    assert "refused a connection from 127.0.0.1: it does not know the secret of the run" in caplog.text


def test_a_worker_tells_nothing_to_a_process_that_is_not_the_controller() -> None:
    received: list[bytes] = []

    def pretend(server: socket.socket) -> None:
        connected, _ = server.accept()
        with connected:
            received.append(connected.recv(1000))
            connected.sendall(f"0123 {proof('guessed', 'controller', 'x', '0123')}\n".encode())
            received.append(connected.recv(1000))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(MachineError, match="does not know the secret of this run"):
            _connect_twice(ControllerAddress(*server.getsockname()[:2], "the secret"), HELLO)
        thread.join(10.0)
    assert len(received[0]) == 33
    assert received[1] == b""


def test_an_earlier_proof_opens_no_second_connection(listener: WorkerListener) -> None:
    """The controller's number differs in each handshake."""
    message = "{}"
    earlier = proof(listener.token, "worker", "number of an earlier handshake", "nonce", message)
    with socket.create_connection(listener.address, timeout=5) as stranger:
        stranger.sendall(f"nonce\n{earlier} {message}\n".encode())
        assert b"it does not know the secret" in stranger.recv(1000) + stranger.recv(1000)


def test_the_rendezvous_store_does_not_have_the_secret(tmp_path: Path) -> None:
    store = HashStore()
    secret = RunSecret(directory=tmp_path)
    with closing(WorkerListener("127.0.0.1", {1: ""}, "the run", 60.0, secret=secret)) as listener:
        listener.publish(store)
        assert listener.token.encode() not in store.get("controller")
        assert ControllerAddress.wait_for(store, secret, 1.0) == ControllerAddress.of(listener)
        with pytest.raises(MachineError, match=f"use a run directory that all nodes share, or set {VARIABLE}"):
            ControllerAddress.wait_for(store, RunSecret(directory=tmp_path / "another"), 0.1)


def test_nobody_else_can_read_the_secret(tmp_path: Path) -> None:
    for _ in range(2):  # the second run replaces the file of the first one
        RunSecret(directory=tmp_path / "processes").create()
    (file,) = (tmp_path / "processes").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", "../secret", "a" * 31, "/etc/passwd", "A" * 32])
def test_the_store_cannot_name_another_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret_").write_text("x")
    with pytest.raises(MachineError, match="does not know the secret"):
        RunSecret(directory=tmp_path).find(name, 0.1)


def test_the_secret_of_the_environment_is_not_handed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "0123456789abcdef")
    secret = RunSecret.taken_from_environment(tmp_path)
    assert VARIABLE not in os.environ
    assert (secret.create(), secret.find("", 0.0)) == (("0123456789abcdef", ""), "0123456789abcdef")
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(MachineError, match=f"{VARIABLE} has 5 characters"):
        RunSecret.taken_from_environment(tmp_path)


def test_the_listener_survives_a_lack_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept = socket.socket.accept
    failures = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "aborted")]

    def failing(server: socket.socket) -> Any:
        if failures:
            raise failures.pop(0)
        return accept(server)

    monkeypatch.setattr(socket.socket, "accept", failing)
    caplog.set_level(logging.WARNING)
    with closing(WorkerListener("127.0.0.1", {1: ""}, "the run", lost_seconds=60.0)) as listener:
        assert is_connected(listener)
    assert "Too many open files" in caplog.text


def test_silent_connections_keep_no_worker_out(listener: WorkerListener) -> None:
    with ExitStack() as stack:
        for _ in range(3 * listener_module.MAX_HANDSHAKES):
            stack.enter_context(socket.create_connection(listener.address, timeout=5))
        assert is_connected(listener)
        handshakes = [thread for thread in threading.enumerate() if thread.name == "worker-handshake"]
        assert len(handshakes) <= listener_module.MAX_HANDSHAKES + 5


def test_a_connection_that_sends_byte_by_byte_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HELLO_SECONDS", 0.5)
    with (
        closing(WorkerListener("127.0.0.1", {1: ""}, "the run", lost_seconds=60.0)) as listener,
        socket.create_connection(listener.address, timeout=5) as stranger,
    ):
        started = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - started < 8.0:
                stranger.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - started < 5.0
