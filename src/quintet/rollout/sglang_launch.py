"""The process under which an SGLang server runs: `python sglang_launch.py`, by a Python that has SGLang. It needs
nothing of Quintet: SGLang may have an environment of its own.

It reads the server's arguments, one line of JSON, from its standard input: a key doesn't stand in the list of
processes, and every argument has the name that `ServerArgs` gives it. When that input ends, however the run ended, it
takes itself and all that SGLang started along.
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

__all__ = ["main"]

INPUT = 0


def main() -> None:
    """Serve until told to end."""
    # this file's directory comes first there, and has a module named as SGLang's package
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
    arguments = json.loads(_line())
    threading.Thread(target=_end_with_run, daemon=True).start()
    serve(arguments)


def serve(arguments: dict[str, Any]) -> None:
    """Run the server; only here SGLang is imported."""
    # it would change what log-probs are: those of a temperature are meant
    os.environ.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
    given = importlib.import_module("sglang.srt.server_args").ServerArgs(**arguments)
    importlib.import_module("sglang.srt.entrypoints.http_server").launch_server(given)


def _line() -> bytes:
    """Bytes up to the first line's end, and none beyond."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(INPUT, 1)
        if not piece:
            break
        line += piece
    return line


def _end_with_run() -> None:
    while os.read(INPUT, 1):
        continue
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
