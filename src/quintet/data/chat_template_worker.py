"""Process that renders chat templates: reads requests as JSON lines and sends a line per conversation.

Forked by `quintet.sandbox.forkserver`. It imports jinja2 but not transformers, so that it starts quickly; its Jinja
environment equals the one of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from functools import lru_cache
from typing import Any, Final

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quintet.sandbox.confinement import restrict_process
from quintet.sandbox.json_lines import LineBuffer, encode
from quintet.sandbox.sandboxed_process import MAX_MESSAGE_CHARS

CPU_SECONDS: Final = 2.0
"""Processor time limit of one conversation. Time in which a busy machine runs other processes does not count."""
MEMORY_BYTES: Final = 512 << 20
"""Limit of the address space."""
MIN_OUTPUT_CHARS, OUTPUT_PER_INPUT = 1 << 20, 64
TIME_LIMIT: Final = f"{CPU_SECONDS:g} s of processor time"
MEMORY_LIMIT: Final = f"{MEMORY_BYTES >> 20} MiB of memory"
OUTPUT_LIMIT: Final = f"{MIN_OUTPUT_CHARS:,} characters plus {OUTPUT_PER_INPUT} times the size of the input"


class _OutputLimitError(Exception):
    """The texts of a request are too long."""


def max_output_chars(request: bytes) -> int:
    """Return the maximum number of characters of all texts of a request."""
    return MIN_OUTPUT_CHARS + OUTPUT_PER_INPUT * len(request)


def work(connection: socket.socket, _: Mapping[str, Any]) -> None:
    """Render until the connection ends. SIGPROF kills a process that exceeds the time limit, also in compiled code."""
    restrict_process(MEMORY_BYTES)
    for line in LineBuffer().read(connection):
        for reply in _replies(line):
            connection.sendall(reply)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _replies(line: bytes) -> Iterator[bytes]:
    """Yield the text of each conversation, up to one with an error of the template or an exceeded limit."""
    request, max_chars = json.loads(line), max_output_chars(line)
    variables = request["variables"]
    if request["date"] is not None:
        variables["strftime_now"] = date.fromisoformat(request["date"]).strftime
    for conversation in request["conversations"]:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = _reply(request["template"], {**variables, **conversation}, max_chars)
        yield encode(reply)
        if "text" not in reply:
            return
        max_chars -= len(reply["text"])


def _reply(template: str, variables: Mapping[str, Any], max_chars: int) -> Mapping[str, str]:
    try:
        return {"text": _render(_compile(template), variables, max_chars)}
    except MemoryError:
        return {"limit": MEMORY_LIMIT}
    except _OutputLimitError:
        return {"limit": OUTPUT_LIMIT}
    except Exception as error:  # noqa: BLE001 - a template may raise anything; the caller reports it
        return {"error": str(error)[:MAX_MESSAGE_CHARS]}


def _render(template: jinja2.Template, variables: Mapping[str, Any], max_chars: int) -> str:
    pieces: list[str] = []
    for piece in template.generate(variables):
        max_chars -= len(piece)
        if max_chars < 0:
            raise _OutputLimitError
        pieces.append(piece)
    return "".join(pieces)


class _GenerationBlocks(Extension):
    """`{% generation %}` marks responses for transformers' masks and has no effect on the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return caller()


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without jinja2's escapes of HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - transformers' name
    return datetime.now().strftime(format)
