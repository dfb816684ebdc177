"""Launcher of an SGLang server: `python launch.py`, run by the Python of an environment with SGLang. It imports nothing
from Quintet.

The arguments of `ServerArgs` are one line of JSON on standard input, so that the API key is not in the process list.
When standard input ends, because the run has ended in any way, the launcher kills its process group.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

STANDARD_INPUT = 0


def main() -> None:
    """Serve until standard input ends."""
    # this file's directory comes first and must not shadow modules that SGLang imports
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    arguments = json.loads(_line())
    threading.Thread(target=_end_with_run, daemon=True).start()
    serve(arguments)


def serve(arguments: dict[str, Any]) -> None:
    """Import SGLang and run the server."""
    # it would turn off the temperature in log-probs
    os.environ.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
    # features of images by earlier weights are not dropped with the other caches
    os.environ["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    os.environ["SGLANG_MM_AVOID_RETOKENIZE"] = "1"
    server_args = importlib.import_module("sglang.srt.server_args").ServerArgs(**arguments)
    importlib.import_module("sglang.srt.entrypoints.http_server").launch_server(server_args)


def _line() -> bytes:
    """Read the first line and nothing beyond it."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(STANDARD_INPUT, 1)
        if not chunk:
            break
        line += chunk
    return line


def _end_with_run() -> None:
    while os.read(STANDARD_INPUT, 1):
        continue
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
