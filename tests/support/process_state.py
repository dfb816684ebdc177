"""Print the state of this process as JSON, once the packages that the fork server imports are imported.

Random numbers are under `random`: they differ from process to process.
"""

from __future__ import annotations

import atexit
import gc
import json
import locale
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import warnings
from typing import Any

from fork_server import import_packages


def process_state() -> dict[str, Any]:
    import numpy
    import torch

    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    return {
        "arguments": sys.argv,
        "atexit": atexit._ncallbacks(),
        "descriptors": sorted(number for number in descriptors if os.path.exists(f"/proc/self/fd/{number}")),
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "garbage": [gc.isenabled(), gc.get_threshold()],
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
        },
        "locale": locale.setlocale(locale.LC_ALL),
        "logging": [logging.root.level, list(map(str, logging.root.handlers)), logging.root.manager.disable],
        "main": sys.modules["__main__"].__file__,
        "niceness": os.nice(0),
        "path": sys.path,
        "random": [
            torch.initial_seed(),
            random.random(),
            float(numpy.random.random()),
            next(tempfile._RandomNameSequence()),
        ],
        "recursion": sys.getrecursionlimit(),
        "signals": {name.name: str(signal.getsignal(name)).split(" at 0x")[0] for name in signal.Signals},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "streams": [
            (stream.encoding, stream.errors, stream.line_buffering, stream.write_through)
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "temporary": tempfile.gettempdir(),
        "threads": [thread.name for thread in threading.enumerate()],
        "torch": [
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            str(torch.get_default_dtype()),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.distributed.is_initialized(),
        ],
        "umask": os.umask(os.umask(0o077)),
        "warnings": [list(map(str, warnings.filters)), sys.warnoptions],
    }


if __name__ == "__main__":
    import_packages()
    print(json.dumps(process_state()))
