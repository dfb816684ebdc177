"""If these fail, a pool hangs on a busy process, loses the last words of a dead one, or kills what is in time."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from quintet.sandbox.sandboxed_process import serve
from quintet.sandbox.worker_processes import ProcessEnd, WorkerProcess, WorkerProcesses

BIG = 4 << 20


def work(connection: socket.socket, setup: Mapping[str, Any]) -> None:
    serve(connection, lambda: _replies)


def _replies(request: Mapping[str, Any]) -> Iterator[Any]:
    time.sleep(request.get("sleep", 0))
    yield request.get("text", "")
    if "exit" in request:
        os._exit(request["exit"])


class Pool:
    """A pool and what it has reported."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.ends: list[ProcessEnd] = []
        self.num_server_exits = 0
        self.processes = WorkerProcesses(f"{__name__}:work", self.receive, self.ended, self.server_died)

    def receive(self, process: WorkerProcess) -> None:
        for message in process.receive_messages():
            process.deadline = math.inf
            self.messages.append(message)

    def ended(self, process: WorkerProcess, end: ProcessEnd) -> None:
        assert process not in self.processes
        self.ends.append(end)

    def server_died(self) -> None:
        self.num_server_exits += 1

    def fork(self) -> WorkerProcess:
        process = self.processes.fork(WorkerProcess, {})
        assert process is not None
        self.until(lambda: bool(self.messages))
        assert self.messages.pop() == {"ready": True}
        return process

    def until(self, condition: Any) -> None:
        last = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < last
            self.processes.wait(1.0)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.processes.close()


def send(process: WorkerProcess, **request: Any) -> None:
    assert process.send(json.dumps(request).encode() + b"\n")


def test_the_last_message_arrives_before_the_exit_status(pool: Pool) -> None:
    send(pool.fork(), text="last words", exit=7)
    pool.until(lambda: pool.ends)
    assert pool.messages == ["last words"]
    assert pool.ends == [ProcessEnd(status=7)]
    assert pool.ends[0].describe("workers") == "its process ended with status 7"


def test_a_process_is_killed_at_its_deadline_and_another_is_not(pool: Pool) -> None:
    late, early = pool.fork(), pool.fork()
    send(late, sleep=60)
    late.deadline = time.monotonic() + 0.2
    pool.until(lambda: pool.ends)
    assert pool.ends == [ProcessEnd(timed_out=True)]
    assert list(pool.processes) == [early]


def test_a_reply_that_has_arrived_is_in_time_even_if_it_is_read_late(pool: Pool) -> None:
    process = pool.fork()
    send(process, text="in time")
    process.deadline = time.monotonic() + 0.5
    time.sleep(1.0)
    pool.processes.wait(0.0)
    assert pool.messages == ["in time"]
    assert process in pool.processes


def test_a_busy_process_blocks_no_message(pool: Pool) -> None:
    process = pool.fork()
    started = time.monotonic()
    pool.processes.send(process, json.dumps({"sleep": 1.0}).encode() + b"\n")
    for _ in range(2):
        pool.processes.send(process, json.dumps({"text": "x" * BIG}).encode() + b"\n")
    assert time.monotonic() - started < 0.9
    pool.until(lambda: len(pool.messages) == 3)
    assert [len(text) for text in pool.messages] == [0, BIG, BIG]


def test_a_fork_server_that_dies_is_replaced_and_counted_until_a_process_is_ready(pool: Pool) -> None:
    for count in (1, 2):
        pool.fork()
        os.kill(pool.processes.start_fork_server()._process.pid, signal.SIGKILL)
        pool.until(lambda number=count: pool.num_server_exits == number)
        assert pool.ends.pop().with_server
        assert pool.processes.num_failed_servers == count
    pool.processes.mark_ready(pool.fork())
    assert pool.processes.num_failed_servers == 0
