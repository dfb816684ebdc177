"""If these fail, a process that knows the secret of a run makes another one run code, allocate memory or hang."""

from __future__ import annotations

import importlib
import json
import os
import random
import socket
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from standalone_workers import ThreadWorker

from quintet.errors import MachineError
from quintet.rollout.engines.shared_weights import SharedTensor, SharedWeights, SharedWeightsReader
from quintet.runtime.calls.connection import WorkerConnection, WorkerLostError
from quintet.runtime.calls.listener import ControllerAddress
from quintet.runtime.calls.messages import NO_CODE, ConnectionLostError, MessageSocket, RemoteCallError
from quintet.runtime.calls.remote_call import RemoteCall, decode_header
from quintet.runtime.calls.remote_interface import REMOTE_OBJECTS, properties_of, remote_methods
from quintet.runtime.engines.engine_worker import LocalEngineWorker
from quintet.runtime.worker import Worker
from quintet.runtime.worker_process import WorkerProcess

MAX_BYTES = 64 << 20
"""Memory that a message of some kilobytes may cost."""


def frame(kind: bytes, content: bytes, length: int | None = None) -> bytes:
    """A message with correct checksums."""
    prefix = kind + (len(content) if length is None else length).to_bytes(8)
    return prefix + zlib.crc32(prefix).to_bytes(4) + content + zlib.crc32(content).to_bytes(4)


def call_frame(**content: Any) -> bytes:
    content = {"target": "engine", "method": "step", "arguments": {}, "tensors": [], **content}
    return frame(b"C", json.dumps(content).encode())


def nested(depth: int) -> bytes:
    return b'{"list": [' * depth + b"]}" * depth


HUGE = 1 << 62
BAD_TENSORS: dict[str, Any] = {
    "all of the memory": [["float32", [1 << 40]]],
    "all of it by dimensions": [["float64", [1 << 20, 1 << 20, 1 << 20]]],
    "all of it by many": [["uint8", [1 << 30]]] * 10_000,
    "a negative size": [["float32", [-1]]],
    "two negative sizes": [["float32", [-8, -8]]],
    "a size beyond integers": [["float32", [HUGE, HUGE]]],
    "no size by a huge one": [["float32", [0, HUGE, HUGE]]],
    "a size as a text": [["float32", ["8"]]],
    "a fractional size": [["float32", [1.5]]],
    "a boolean": [["float32", [True]]],
    "another type": [["complex64", [1]]],
    "a type of python": [["__class__", [1]]],
    "a list as a type": [[["float32"], [1]]],
    "no shape": [["float32"]],
    "a shape that is no list": [["float32", 8]],
    "a number": 7,
    "null": None,
    "a text": "float32",
    "a mapping": {"float32": [1]},
}
BAD_ARGUMENTS: dict[str, Any] = {
    "a list": [],
    "two tags": {"requests": {"list": [], "tensor": 0}},
    "no tag": {"requests": {}},
    "an unknown tag": {"requests": {"pickle": "gASVCgAAAAAAAACMBnN5c3RlbZQu"}},
    "a tensor that is not there": {"requests": {"tensor": 3}},
    "a tensor by name": {"requests": {"tensor": "data"}},
    "an attribute": {"requests": {"remote": "engine.__class__.__init__.__globals__"}},
    "a private attribute": {"requests": {"remote": "learners._snapshot_source"}},
    "another object": {"requests": {"remote": "os"}},
    "a reference to a list": {"requests": {"remote": ["engine"]}},
    "a request without fields": {"requests": {"list": [{"request": {}}]}},
    "a batch of another form": {"requests": {"batch": {"__class__": 1}}},
    "a batch of nothing": {"requests": {"batch": None}},
    "a configuration with another key": {"config": {"experiment": {"__init__": 1}}},
    "a configuration that is a number": {"config": {"experiment": 7}},
    "a path that is a number": {"policy": {"path": 7}},
    "a shared tensor without fields": {"weights": {"shared_tensor": []}},
    "an event that is no JSON": {"requests": {"env_event": "{"}},
}


HOSTILE: dict[str, bytes] = {
    "noise": random.Random(0).randbytes(4096),
    "HTTP": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 4,
    "pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "another kind": frame(b"X", b"{}"),
    "a result": frame(b"R", b'{"value": null, "tensors": []}'),
    "a longer header than any": frame(b"C", b"{}", length=1 << 40),
    "a negative length": b"C" + b"\xff" * 8 + zlib.crc32(b"C" + b"\xff" * 8).to_bytes(4),
    "a wrong checksum": frame(b"C", b"{}")[:-1] + b"\0",
    "no JSON": frame(b"C", b"{"),
    "no text": frame(b"C", b"\xff\xfe\x00"),
    "a long number": frame(b"C", b"9" * 100_000),
    "a nested header": frame(b"C", b"[" * 200_000 + b"]" * 200_000),
    "nested arguments": frame(
        b"C", b'{"target": "engine", "method": "step", "tensors": [], "arguments": {"requests": ' + nested(900) + b"}}"
    ),
    "a list": frame(b"C", b"[]"),
    "no arguments": frame(b"C", b'{"target": "engine", "method": "step", "tensors": []}'),
    "no tensors": frame(b"C", b'{"target": "engine", "method": "step", "arguments": {}}'),
    "tensors of a group": call_frame(broadcasts_tensors=True, tensors=[["uint8", [1]]]),
    **{f"tensors: {name}": call_frame(tensors=tensors) for name, tensors in BAD_TENSORS.items()},
    **{f"arguments: {name}": call_frame(arguments=arguments) for name, arguments in BAD_ARGUMENTS.items()},
}


def send_all(connected: socket.socket, data: bytes) -> None:
    """Send data that the other end may not read to its end, and then that there is no more."""

    def send() -> None:
        with suppress(OSError):
            connected.sendall(data)
            connected.shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()


class ServedWorker:
    """A worker in a thread, and the socket of its controller."""

    def __init__(self) -> None:
        self.controller, self._theirs = socket.socketpair()
        self._ended = ThreadPoolExecutor(1).submit(self._serve)

    def _serve(self) -> None:
        with self._theirs, closing(Worker()) as worker:
            process = WorkerProcess(ControllerAddress("", 0, ""), 1, "the run")
            process.serve(MessageSocket(self._theirs, process._receive_broadcast), worker)

    def error(self) -> BaseException | None:
        """Wait for the end of the worker, and return the error by which it has ended."""
        return self._ended.exception(20.0)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_worker_ends_with_a_message_when_its_controller_sends_something_else(name: str) -> None:
    """Any other error would be a traceback in the log, and more memory than the message an attack on the node."""
    before = psutil.Process().memory_info().rss
    worker = ServedWorker()
    send_all(worker.controller, HOSTILE[name])
    error = worker.error()
    assert isinstance(error, ConnectionLostError), error
    assert "the connection was closed" not in str(error) or name == "tensors: no size by a huge one"
    assert psutil.Process().memory_info().rss - before < MAX_BYTES


def test_a_header_takes_no_memory_before_it_has_arrived() -> None:
    before = psutil.Process().memory_info().rss
    worker = ServedWorker()
    send_all(worker.controller, frame(b"C", b"[" * 1000, length=1 << 30)[:1000])
    assert "the connection was closed" in str(worker.error())
    assert psutil.Process().memory_info().rss - before < MAX_BYTES


def names_of(target: str) -> set[str]:
    """Attributes of what a target is in a worker that has built nothing, and others that an attacker would try."""
    worker = Worker()
    components = {"worker": worker, **{name: part for name, part in worker._components.items() if part is not None}}
    return {
        *dir(components.get(target, object())),
        *("__import__", "system", "stop", "__globals__", "", ".", "step.__globals__", "step\0", "STEP", " step"),
        *(name for protocol in REMOTE_OBJECTS.values() for name in remote_methods(protocol)),
    }


def test_no_other_attribute_can_be_called() -> None:
    """All names of the objects of a worker and of their methods, on every target and on paths below it."""
    called, allowed = 0, {("worker", "stop")}
    for target, protocol in REMOTE_OBJECTS.items():
        allowed |= {(target, name) for name in (*remote_methods(protocol), *properties_of(protocol))}
    targets = [*REMOTE_OBJECTS, "os", "builtins", "", "engine._engine", "worker._components", "engine.__class__"]
    for target in targets:
        for name in sorted(names_of(target)):
            if (target, name) not in allowed:
                with pytest.raises(ValueError, match="is not a remote method"):
                    decode_header({"target": target, "method": name, "arguments": {}, "tensors": []}, NO_CODE.check)
                called += 1
    assert called > 1000


def test_a_worker_lives_on_after_calls_with_other_arguments() -> None:
    worker = ThreadWorker(1)
    for arguments in ({"self": 1}, {"requests": [], "other": 1}, {"requests": 7}, {"__class__": 1}, {}):
        with pytest.raises(RemoteCallError):
            worker.call(RemoteCall("engine", "step", arguments))
    assert worker.call(RemoteCall("worker", "close_judge_servers")) is None


def test_a_result_that_cannot_be_sent_is_an_error_of_the_call() -> None:
    class Secretive(Worker):
        def execute(self, call: RemoteCall) -> Any:
            return object()

    worker = ThreadWorker(1, Secretive())
    for _ in range(2):
        with pytest.raises(RemoteCallError, match="type object cannot be sent"):
            worker.call(RemoteCall("engine", "weights"))


@pytest.mark.parametrize("action", ["close", "__class__", "load_weights", "_step", "", "sleep "])
def test_an_engine_has_no_other_actions(action: str) -> None:
    with pytest.raises(ValueError, match="an engine has no action"):
        LocalEngineWorker().control(action)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in HOSTILE if not name.startswith("arguments: a configuration")])
def test_the_controller_survives_what_a_worker_sends_and_loses_it(name: str) -> None:
    ours, theirs = socket.socketpair()
    worker = WorkerConnection(2, 77, "host", MessageSocket(ours))
    started = worker.start(RemoteCall("engine", "weights"))
    sent = HOSTILE[name].replace(b"C", b"R", 1) if HOSTILE[name][:1] == b"C" else HOSTILE[name]
    with theirs, ours:
        send_all(theirs, sent)
        if name == "a result":
            assert started.finish() is None
            return
        with pytest.raises(WorkerLostError, match=r"rank 2 \(process 77\)"):
            started.finish()


RESULTS: dict[str, Any] = {
    "an unknown tag": {"value": {"pickle": "gASV"}, "tensors": []},
    "no value": {"tensors": []},
    "tensors beyond memory": {"value": {"tensor": 0}, "tensors": [["float32", [1 << 45]]]},
    "a tensor that is not there": {"value": {"tensor": 0}, "tensors": []},
    "a list": [],
    "a report of another form": {"value": {"engine_report": {"generations": 7}}, "tensors": []},
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_malformed_result_is_the_loss_of_its_worker(name: str) -> None:
    ours, theirs = socket.socketpair()
    worker = WorkerConnection(2, 77, "host", MessageSocket(ours))
    started = worker.start(RemoteCall("engine", "weights"))
    with theirs, ours:
        theirs.sendall(frame(b"R", json.dumps(RESULTS[name]).encode()))
        with pytest.raises(WorkerLostError, match="cannot be understood"):
            started.finish()


@pytest.mark.parametrize("content", [[], {}, 7, None, {"error_type": {}, "message": []}, {"error_type": ""}])
def test_a_malformed_error_is_an_error(content: Any) -> None:
    ours, theirs = socket.socketpair()
    worker = WorkerConnection(2, 77, "host", MessageSocket(ours))
    started = worker.start(RemoteCall("engine", "weights"))
    with theirs, ours:
        theirs.sendall(frame(b"E", json.dumps(content).encode()))
        with pytest.raises((WorkerLostError, RemoteCallError, MachineError)):
            started.finish()


@pytest.fixture
def shared() -> Iterator[SharedTensor]:
    weights = SharedWeights()
    yield weights.write([("w", torch.arange(4.0))])[0]
    weights.close()


def changed(shared: SharedTensor, **changes: Any) -> list[SharedTensor]:
    return [SharedTensor(**{**{name: getattr(shared, name) for name in shared.__slots__}, **changes})]


def test_weights_are_read_from_no_other_file(shared: SharedTensor, tmp_path: Path) -> None:
    """torch would create the file, or enlarge it."""
    (name, tensor) = next(iter(SharedWeightsReader().read([shared])))
    assert (name, tensor.tolist()) == ("w", [0.0, 1.0, 2.0, 3.0])
    victim, link = tmp_path / "victim", Path(shared.file).with_name("link")
    victim.write_bytes(b"secret")
    link.symlink_to(victim)
    missing = tmp_path / "missing"
    for changes in (
        {"file": str(victim), "file_bytes": 6},
        {"file": str(victim), "file_bytes": 1 << 20},
        {"file": str(link), "file_bytes": 6},
        {"file": str(missing), "file_bytes": 64},
        {"file_bytes": shared.file_bytes * 2},
        {"dtype": "__name__"},
        {"dtype": "load"},
    ):
        with pytest.raises((ValueError, OSError)):
            list(SharedWeightsReader().read(changed(shared, **changes)))
    assert victim.read_bytes() == b"secret"
    assert not missing.exists()
    assert os.stat(shared.file).st_size == shared.file_bytes


def test_a_listener_survives_strangers_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/attacks.py` opens twenty times as many connections."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "benchmarks"))
    counted = importlib.import_module("attack_workers").run(100, seed=3)
    assert counted["errors"] == []
    assert (counted["connections"], counted["accepted"], counted["deaths"]) == (100, 0, 0)
    assert len(counted["kinds"]) == 14
    assert counted["honest_calls"] > 0
