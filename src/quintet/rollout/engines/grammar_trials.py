"""Trials of grammars: a process compiles each in a child of its own under limits, before the server does.

Forked by `quintet.sandbox.forkserver`. The first line that it reads has the arguments of llguidance's tokenizer, each
further one a grammar; it replies with the memory of the compiled grammar, why it is invalid, or the exceeded limit.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from quintet.errors import MachineError
from quintet.rollout.engines.compiled_grammars import compile_grammar
from quintet.sandbox.json_lines import LineBuffer, decode, encode
from quintet.sandbox.leased_processes import LeasedProcess, LeasedProcesses
from quintet.sandbox.seccomp import limit_resources

CPU_SECONDS: Final = 3
"""Processor time limit of a trial."""
MEMORY_BYTES: Final = 128 << 20
"""Memory limit of a trial, in addition to that of the tokenizer."""
WAIT_SECONDS: Final = 60.0
"""Time to wait for a reply. Time in which a busy machine runs other processes does not count for `CPU_SECONDS`."""
NICENESS: Final = 10
"""Trials take the processor time that the engine leaves."""
Reply = Mapping[str, Any]
"""`bytes` that the grammar takes, `error` why it is invalid, or exceeded `limit`."""
TIME_EXCEEDED: Reply = {"limit": f"compiling it takes more than {CPU_SECONDS} s"}
MEMORY_EXCEEDED: Reply = {"limit": f"compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory"}


class GrammarTrials(LeasedProcesses[LeasedProcess]):
    """The process for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        """`tokenizer` has the arguments of `LLTokenizer`."""
        super().__init__(f"{__name__}:work", LeasedProcess, 1, "compile grammars")
        self._tokenizer = encode(tokenizer)

    def num_bytes(self, kind: str, spec: str) -> int:
        """Return the memory that a compiled grammar takes.

        Raises:
            ValueError: it is invalid, or exceeds a limit.
            MachineError: the process does not start.
        """
        request = encode({"kind": kind, "spec": spec})
        reply = self.call(lambda process: _exchange(process, request))
        if "bytes" not in reply:
            raise ValueError(f"{kind}: {reply['limit']}" if "limit" in reply else reply["error"])
        return int(reply["bytes"])

    def _fork(self) -> LeasedProcess:
        process = super()._fork()
        if not process.send(self._tokenizer, WAIT_SECONDS):
            raise MachineError("the process that compiles grammars does not start", "see its output above")
        return process


def _exchange(process: LeasedProcess, request: bytes) -> Reply:
    deadline = time.monotonic() + WAIT_SECONDS
    try:
        process.connection.settimeout(WAIT_SECONDS)
        process.connection.sendall(request)
        line = next(LineBuffer().read(process.connection), None)
    except OSError:
        line = None
    if line is not None:
        return dict(decode(line))
    process.ended, process.is_spent = True, time.monotonic() >= deadline
    return TIME_EXCEEDED if process.is_spent else MEMORY_EXCEEDED


def work(connection: socket.socket, _: Mapping[str, Any]) -> None:
    """Try grammars until the connection ends."""
    from llguidance import LLTokenizer

    os.nice(NICENESS)
    lines = LineBuffer().read(connection)
    if (arguments := next(lines, None)) is None:
        return
    tokenizer = LLTokenizer(**json.loads(arguments))
    for line in lines:
        child = os.fork()
        if child == 0:
            _try(connection, tokenizer, decode(line))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            connection.sendall(encode(TIME_EXCEEDED if status in _TIME_SIGNALS else MEMORY_EXCEEDED))


_TIME_SIGNALS: Final = (-signal.SIGKILL, -signal.SIGXCPU)
"""Ends of a child that has exceeded its processor time; Rust aborts without memory."""


def _try(connection: socket.socket, tokenizer: Any, request: Mapping[str, str]) -> None:
    """Compile a grammar in the child, and send the reply; never returns."""
    try:
        # Rust writes a line when it aborts
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        address_space, before = _memory_bytes()
        limit_resources(address_space + MEMORY_BYTES, CPU_SECONDS)
        try:
            compile_grammar(tokenizer, request["kind"], request["spec"])
            reply: Reply = {"bytes": max(_memory_bytes()[1] - before, 0)}
        except ValueError as error:
            reply = {"error": str(error)}
        connection.sendall(encode(reply))
        os._exit(0)
    finally:
        os._exit(1)


def _memory_bytes() -> tuple[int, int]:
    """Return the address space and the resident memory of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[:2]
    address_space, resident = (int(count) * resource.getpagesize() for count in pages)
    return address_space, resident
