"""Limits of the connections and requests of all HTTP services."""

from __future__ import annotations

import resource

MAX_CONNECTIONS = 1024
"""Maximum number of connections; a client has at most half of them."""
OTHER_FILES = 128
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
"""Time between two checks of the connections, ten per second otherwise, that does not count as the clients' time."""
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
    return num_files - OTHER_FILES
