"""A process that judges: reads answers from its connection, one line a message, and says a line on each.

It is forked by `quintet.processes.keeper`. What verifiers and users' functions print goes to standard error.
"""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quintet.processes import confinement
from quintet.processes.kept import told
from quintet.processes.wire import Lines, decoded, encoded
from quintet.rewards import budget
from quintet.rewards.functions import load_function, outcome_of, outcomes_of
from quintet.rewards.verifiers.catalogue import VERIFIERS

__all__ = ["Setup", "work"]

MEMORY_BYTES = 4 << 30
"""Address space of a process that runs our own rules."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process is for: our own rules, or a user's function (`file.py:function` or an address)."""

    function: str | None = None
    arguments: Mapping[str, Any] | None = None
    batched: bool = False
    seal: bool = True
    """Give up all that our own rules don't need."""
    timeout_seconds: float = 10.0


def work(connection: socket.socket, given: Message) -> None:
    """Judge until the connection ends; `given` are the fields of a `Setup`."""
    setup = Setup(**given)
    try:
        judge = _prepared(setup)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - handed on, whatever a user's file raises
        connection.sendall(encoded({"broken": told(error)}))
        return
    connection.sendall(encoded({"ready": True}))
    for line in Lines().read(connection):
        for reply in _replies(judge, decoded(line), setup.timeout_seconds):
            connection.sendall(encoded(reply))


def _prepared(setup: Setup) -> Callable[[Message], Message]:
    """What judges one message, after all that this process may do has been settled."""
    if setup.function is None:
        _settle(setup.seal)
        return _by_rules
    call = load_function(setup.function, setup.arguments or {}, batched=setup.batched, timeout=setup.timeout_seconds)
    return lambda message: _by_function(call, message, setup.batched)


def _settle(seal: bool) -> None:
    confinement.hide_memory()
    if sys.platform == "linux":
        confinement.limit(MEMORY_BYTES)
    if not seal:
        return
    try:
        confinement.confine()
    except confinement.Unconfinable:
        # our own rules run no words of a policy; those that might ask whether the process is sealed
        return


def _replies(judge: Callable[[Message], Message], messages: list[Message], timeout: float) -> Iterator[Message]:
    for message in messages:
        budget.begin(timeout)
        yield _judged(judge, message)


def _judged(judge: Callable[[Message], Message], message: Message) -> Message:
    try:
        return judge(message)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a verdict that fails is data
        return {"failure": told(error)}


def _by_rules(message: Message) -> Message:
    verifier = VERIFIERS.get(message["verifier"]).load()
    score = verifier(message["text"], message["truth"], message["extra"])
    if not math.isfinite(score.score):
        raise ValueError(f"{message['verifier']} gave {score.score}")
    return {"score": score.score, "predicted": score.predicted, "parts": dict(score.parts)}


def _by_function(call: Callable[[Message], Any], message: Message, batched: bool) -> Message:
    given = call(message["told"])
    if batched:
        return {"many": outcomes_of(given, len(message["told"]["solution_strs"]))}
    return outcome_of(given)
