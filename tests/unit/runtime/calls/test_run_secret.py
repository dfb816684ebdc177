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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from quintet.errors import MachineError
from quintet.runtime.calls import handshake
from quintet.runtime.calls import listener as listener_module
from quintet.runtime.calls.handshake import WorkerHello
from quintet.runtime.calls.listener import ControllerAddress, WorkerListener
from quintet.runtime.calls.run_secret import VARIABLE, RunSecret, proof
from quintet.runtime.worker_process import _connect_twice

HELLO = WorkerHello("calls", "a", 1, 2, "h", "the run")
NONCE, TOKEN = "0123456789abcdef" * 2, "the secret of this run"


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


def handshake_of(stranger: socket.socket, address: tuple[str, int], token: str, **changes: Any) -> bytes:
    """Introduce a process that knows `token`, with changes of its message; return the controller's last line."""
    stranger.sendall(f"{NONCE}\n".encode())
    nonce = stranger.recv(1000).decode().split()[0]
    message = json.dumps({**asdict(HELLO), **changes})
    parts = ("worker", *map(str, address), nonce, NONCE, message)
    stranger.sendall(f"{proof(token, *parts)} {message}\n".encode())
    answer = b""
    while received := stranger.recv(1000):
        answer += received
    return answer


def test_a_process_without_the_secret_is_no_worker(listener: WorkerListener, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(listener.address, timeout=5) as stranger:
        assert handshake_of(stranger, listener.address, "guessed") == b"it does not know the secret of the run\n"
    assert listener.take_connected_workers([1, 2]) == []
    assert "refused a connection from 127.0.0.1: it does not know the secret of the run" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"purpose": "worker"},
        {"purpose": "last_heartbeat"},
        {"worker": ["a"]},
        {"rank": "1"},
        {"rank": [1]},
        {"pid": {}},
        {"role": "controller"},
    ],
)
def test_a_worker_with_a_malformed_message_is_refused(listener: WorkerListener, changes: dict[str, Any]) -> None:
    with socket.create_connection(listener.address, timeout=5) as stranger:
        assert handshake_of(stranger, listener.address, listener.token, **changes) == b""
    assert is_connected(listener)


def pretended_controller(answer: Callable[[socket.socket, bytes], None]) -> tuple[Exception, list[bytes]]:
    """Connect a worker to a process that answers its first line so; return the worker's error, and what it has sent."""
    received: list[bytes] = []

    def pretend(server: socket.socket) -> None:
        connected, _ = server.accept()
        with connected:
            received.append(connected.recv(1000))
            answer(connected, received[0].strip())
            with suppress(ConnectionError):  # it has not read everything
                received.append(connected.recv(1000))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(MachineError, match="does not know the secret of this run") as raised:
            _connect_twice(ControllerAddress(*server.getsockname()[:2], TOKEN), HELLO)
        thread.join(10.0)
    return raised.value, received


@pytest.mark.parametrize(
    "answer",
    [
        lambda nonce: f"{NONCE} {proof('guessed', 'controller', '127.0.0.1', '1', nonce, NONCE)}",
        lambda nonce: f"{nonce} {nonce}",
        lambda nonce: nonce,
        lambda nonce: "",
        lambda nonce: "\0" * 3000,
        lambda nonce: "x" * 10_000,
    ],
    ids=["wrong secret", "reflected", "one word", "empty", "zeros", "too long"],
)
def test_a_worker_tells_nothing_to_a_process_that_is_not_the_controller(answer: Callable[[str], str]) -> None:
    error, received = pretended_controller(
        lambda connected, nonce: connected.sendall(f"{answer(nonce.decode())}\n".encode())
    )
    assert "127.0.0.1:" in str(error)
    assert len(received[0]) == 33
    assert b"".join(received[1:]) == b""


def test_a_process_between_worker_and_controller_is_noticed() -> None:
    """Anybody can put another address into the rendezvous store, and pass on what the worker sends there."""
    with closing(WorkerListener("127.0.0.1", {1: ""}, "the run", 60.0, secret=RunSecret(TOKEN))) as listener:

        def pass_on(connected: socket.socket, nonce: bytes) -> None:
            with socket.create_connection(listener.address, timeout=5) as controller:
                controller.sendall(nonce + b"\n")
                connected.sendall(controller.recv(1000))

        _, received = pretended_controller(pass_on)
    assert received[1:] == [b""]


def test_an_earlier_proof_opens_no_second_connection(listener: WorkerListener) -> None:
    """The controller's number differs in each handshake."""
    message = json.dumps(asdict(HELLO))
    earlier = proof(listener.token, "worker", *map(str, listener.address), "0" * 32, NONCE, message)
    with socket.create_connection(listener.address, timeout=5) as stranger:
        stranger.sendall(f"{NONCE}\n{earlier} {message}\n".encode())
        assert b"it does not know the secret" in stranger.recv(1000) + stranger.recv(1000)


def test_the_controllers_own_proof_is_none_of_a_worker(listener: WorkerListener) -> None:
    """Each side computes its proof from other words, so that neither can be sent back."""
    with socket.create_connection(listener.address, timeout=5) as stranger:
        stranger.sendall(f"{NONCE}\n".encode())
        nonce, own_proof = stranger.recv(1000).decode().split()
        stranger.sendall(f"{own_proof} {json.dumps(asdict(HELLO))}\n".encode())
        assert b"it does not know the secret" in stranger.recv(1000)
    assert nonce != NONCE


def test_a_worker_that_is_closed_for_strangers_connects_again(
    listener: WorkerListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, cut = listener_module.receive_hello, [True, True]

    def closed_for_others(connected: socket.socket, *arguments: Any) -> Any:
        hello = receive(connected, *arguments)
        if cut:
            cut.pop()
            with listener._lock:
                listener._handshakes.remove(connected)
        return hello

    monkeypatch.setattr(listener_module, "receive_hello", closed_for_others)
    assert is_connected(listener)
    assert not cut


def test_the_rendezvous_store_does_not_have_the_secret(tmp_path: Path) -> None:
    store = HashStore()
    secret = RunSecret(directory=tmp_path)
    with closing(WorkerListener("127.0.0.1", {1: ""}, "the run", 60.0, secret=secret)) as listener:
        listener.publish(store)
        assert listener.token.encode() not in store.get("controller")
        assert ControllerAddress.wait_for(store, secret, 1.0) == ControllerAddress.of(listener)
        with pytest.raises(MachineError, match=f"use a run directory that all nodes share, or set {VARIABLE}"):
            ControllerAddress.wait_for(store, RunSecret(directory=tmp_path / "another"), 0.1)


@pytest.mark.parametrize("written", ["garbage", "7", "[]", '["127.0.0.1", "port", ""]', '["127.0.0.1", 1]', '"host"'])
def test_what_another_program_writes_into_the_store_is_no_address(tmp_path: Path, written: str) -> None:
    store = HashStore()
    store.set("controller", written)
    with pytest.raises(MachineError, match="does not have the address of a controller"):
        ControllerAddress.wait_for(store, RunSecret(TOKEN), 1.0)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 1 << 20), ("127.0.0.1", -1), ("a" * 100 + ".b", 1), ("", 0)])
def test_an_address_that_is_none_is_named(host: str, port: int) -> None:
    with pytest.raises(MachineError, match="rank 1 cannot connect to the controller"):
        _connect_twice(ControllerAddress(host, port, TOKEN), HELLO)


def test_nobody_else_can_read_the_secret(tmp_path: Path) -> None:
    for _ in range(2):  # the second run replaces the file of the first one
        RunSecret(directory=tmp_path / "processes").create()
    (file,) = (tmp_path / "processes").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_secret_of_a_run_ends_with_it(tmp_path: Path) -> None:
    WorkerListener("127.0.0.1", {1: ""}, "the run", 60.0, secret=RunSecret(directory=tmp_path)).close()
    assert not list(tmp_path.iterdir())


def replaced_by_a_link(file: Path) -> None:
    target = file.parent / "elsewhere"
    file.rename(target)
    file.symlink_to(target)


def replaced_by_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: file.chmod(0o644), "is not private .*mode 644"),
        (lambda file: file.chmod(0o660), "is not private .*mode 660"),
        (replaced_by_a_pipe, "is not private"),
        (replaced_by_a_link, "does not know the secret"),
        (lambda file: file.write_text("guessed"), "does not know the secret"),
        (lambda file: file.write_text("0" * 65), "does not know the secret"),
        (lambda file: file.unlink(), "does not know the secret"),
    ],
)
def test_a_file_that_somebody_else_may_have_written_is_no_secret(
    tmp_path: Path, change: Callable[[Path], None], problem: str
) -> None:
    """Who may write into the directory could otherwise choose the secret, and so become the controller."""
    secret = RunSecret(directory=tmp_path)
    _, name = secret.create()
    change(tmp_path / f"secret_{name}")
    with pytest.raises(MachineError, match=problem):
        secret.find(name, 0.1)


def test_a_file_of_another_user_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = RunSecret(directory=tmp_path)
    _, name = secret.create()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(MachineError, match=f"is not private .*user 4711.*\n.*set {VARIABLE}"):
        secret.find(name, 0.1)


def test_a_file_system_without_permissions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode=0o777: opened(path, flags, 0o644))
    with pytest.raises(MachineError, match=f"is not private .*\n.*set {VARIABLE}"):
        RunSecret(directory=tmp_path).create()
    assert not any(file.read_text() for file in tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot write the secret of the run"):
        RunSecret(directory=tmp_path / "file").create()


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


def test_the_listener_survives_a_lack_of_threads(
    listener: WorkerListener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failures = threading.Thread.start, [RuntimeError("can't start new thread")]

    def failing(thread: threading.Thread) -> None:
        if thread.name == "worker-handshake" and failures:
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    assert is_connected(listener)
    assert not failures
    assert "can't start new thread" in caplog.text


def test_refusals_of_workers_are_logged_after_many_of_strangers(
    listener: WorkerListener, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(40):
        with socket.create_connection(listener.address, timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionError):
                assert stranger.recv(1000) == b""
    with pytest.raises(MachineError, match="another configuration or version"):
        _connect_twice(ControllerAddress.of(listener), replace(HELLO, fingerprint="another"))
    while "another configuration" not in caplog.text:
        time.sleep(0.01)
    assert len(caplog.records) == listener_module.MAX_REFUSALS + 2
    assert "refused 32 connections, the last from 127.0.0.1" in caplog.text
    assert "rank 1 started with another configuration" in caplog.text


def test_silent_connections_keep_no_worker_out(listener: WorkerListener) -> None:
    with ExitStack() as stack:
        for _ in range(3 * listener_module.MAX_HANDSHAKES):
            stack.enter_context(socket.create_connection(listener.address, timeout=5))
        assert is_connected(listener)
        handshakes = [thread for thread in threading.enumerate() if thread.name == "worker-handshake"]
        assert len(handshakes) <= listener_module.MAX_HANDSHAKES + 5


def test_a_connection_that_sends_byte_by_byte_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HELLO_SECONDS", 0.5)
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
