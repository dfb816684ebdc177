"""Worker process that verifies responses: reads jobs as JSON lines and sends a line per result.

Forked by `quintet.sandbox.forkserver`. Prints of verifiers and users' functions go to standard error.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from quintet.rewards import time_budget
from quintet.rewards.custom_function import load_function, parse_result, parse_results
from quintet.rewards.verifiers.registry import VERIFIERS
from quintet.rewards.verifiers.truth_checks import CHECKED_BEFORE_SCORING, check_ground_truth
from quintet.sandbox.confinement import restrict_process
from quintet.sandbox.sandboxed_process import error_message, serve

MEMORY_BYTES = 4 << 30
"""Address space limit of a process that runs built-in verifiers."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """Task of a process: built-in verifiers, or a user's function (`file.py:function` or a URL)."""

    function: str | None = None
    arguments: Mapping[str, Any] | None = None
    batched: bool = False
    confined: bool = True
    """Drop all rights that built-in verifiers do not need."""
    timeout_seconds: float = 10.0


def work(connection: socket.socket, setup_fields: Message) -> None:
    """Verify until the connection ends; `setup_fields` are the fields of a `Setup`."""
    setup = Setup(**setup_fields)
    serve(connection, lambda: partial(_replies, _prepare(setup), setup.timeout_seconds))


def _prepare(setup: Setup) -> Callable[[Message], Message]:
    """Restrict this process as far as its setup allows and return the function that scores one message."""
    if setup.function is None:
        # a process that cannot be confined works as well: verifiers that execute responses check `is_confined`
        restrict_process(MEMORY_BYTES, confined=setup.confined)
        return _verify
    call = load_function(setup.function, setup.arguments or {}, batched=setup.batched, timeout=setup.timeout_seconds)
    return lambda message: _call_function(call, message, setup.batched)


def _replies(score: Callable[[Message], Message], timeout: float, messages: list[Message]) -> Iterator[Message]:
    for message in messages:
        time_budget.start(timeout)
        try:
            reply = score(message)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a failed verification is recorded as data
            reply = {"failure": error_message(error)}
        yield reply


def _verify(message: Message) -> Message:
    entry = VERIFIERS.get(message["verifier"])
    options = (
        {} if entry.config is None else {"options": _options_from_json(entry.config, json.dumps(message["options"]))}
    )
    if entry.name in CHECKED_BEFORE_SCORING:
        check_ground_truth(entry.name, message["ground_truth"], message["extra"], message["options"])
    score = entry.load()(message["text"], message["ground_truth"], message["extra"], **options)
    if not math.isfinite(score.score):
        raise ValueError(f"{message['verifier']} returned {score.score}")
    return {
        "score": score.score,
        "extracted_answer": score.extracted_answer,
        "reward_components": dict(score.reward_components),
    }


@lru_cache(maxsize=1)
def _options_from_json(config: Any, text: str) -> Any:
    return config.model_validate_json(text)


def _call_function(call: Callable[[Message], Any], message: Message, batched: bool) -> Message:
    result = call(message["arguments"])
    if batched:
        return {"many": parse_results(result, len(message["arguments"]["solution_strs"]))}
    return parse_result(result)
