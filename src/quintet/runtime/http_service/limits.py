"""Limits of the connections and requests of all HTTP services, and of JSON in their bodies."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

from quintet.runtime.http_service.request_error import RequestError

MAX_CONNECTIONS = 1 << 14
"""Maximum number of connections, if this process may open as many files."""
RESERVED_SHARE = 8
"""A client has at most all but one of so many parts of the connections, so that others can connect."""
MAX_REFUSED = 256
"""Connections beyond the maximum that are told so at the same time; further ones are closed at once."""
REFUSED_SECONDS = 2.0
"""How long what a refused client sends is read. If it were not, its system would discard the response."""
REFUSED_BYTES = 1 << 20
"""How much of what a refused client sends is read."""
SILENT_SECONDS = 1.0
"""A connection on which nothing has arrived for so long can make room for another one."""
OTHER_FILES = 128 + MAX_REFUSED
"""Open files that are not connections."""
ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before those with data are handled."""
RECEIVE_BYTES = 256 << 10
"""Maximum number of bytes that are received at once."""
HEAD_BYTES = 64 << 10
"""Maximum size of request line and headers."""
HEAD_SECONDS = 10.0
"""Time for request line and headers."""
PAUSE_SECONDS = 1.0
"""Connections are checked ten times per second. If this much time has passed between two checks, the server was paused
or busy, and the time is not counted against the limits of the clients."""
IDLE_SECONDS = 60
"""Time until the next request of a connection."""
MAX_BODY_BYTES = 16 << 20
"""Default maximum size of a request's body."""
BODY_SECONDS = 20.0
"""Time for a body, in addition to the time by its size."""
BODY_BYTES_PER_SECOND = 1 << 20
"""Slowest transfer of a body."""
SEND_BYTES = 256 << 10
"""Maximum size of a piece of a response; the next one is sent when the client has received it."""
SEND_SECONDS = 60.0
"""Time for a client to receive a response, or an event of a stream."""
LARGE_BODY_BYTES = 128 << 10
"""Size above which bodies take turns of their own."""
MAX_LARGE_BYTES = 512 << 20
"""Maximum size of all large bodies that are received or handled at the same time."""


def max_connections() -> int:
    """Return the maximum number of connections, after allowing this process to open as many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = MAX_CONNECTIONS + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return MAX_CONNECTIONS
    num_files = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    return max(num_files - OTHER_FILES, num_files // 2)


def check_separators(data: bytes, maxima: Mapping[str, int]) -> None:
    """Check how often characters occur in a body before it is parsed.

    Raises:
        RequestError: one occurs more often than its maximum.
    """
    for separator, maximum in maxima.items():
        if len(data) > maximum and (count := data.count(separator.encode())) > maximum:
            message = f"the body contains {count} times {separator!r}, the maximum is {maximum}"
            raise RequestError(message, status=413, code="too_large")


def check_depth(value: Any, maximum: int) -> None:
    """
    Raises:
        RequestError: objects and lists are nested too deeply; handling them recursively would fail.
    """
    level = [value]
    for _ in range(maximum):
        children = (child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise RequestError(f"the body is nested more than {maximum} levels deep", code="invalid_json")
