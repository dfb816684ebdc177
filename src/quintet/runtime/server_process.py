"""Settings of the interpreter of a process that answers clients."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTED_OBJECTS = 20_000
"""Number of new containers after which the youngest are collected: a large request has many, and none is garbage."""
SWITCH_SECONDS = 0.0002
"""Time for which a thread may keep the interpreter from others, a 25th of Python's."""


@contextmanager
def server_interpreter() -> Iterator[None]:
    """Reduce how long requests wait for garbage collection and for other threads.

    All present objects are excluded from garbage collection, which stops all threads for 0.2 s with those of torch and
    transformers; they are included again at the end, since triton reports what a process that exits has not freed.

    The engine's thread gives the interpreter away at each operation of torch. With Python's interval of 5 ms it waits
    for as long at each of them while another thread parses or tokenizes a request, and so did the event loop.
    """
    thresholds, switch_seconds = gc.get_threshold(), sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_OBJECTS, *thresholds[1:])
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_seconds)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
