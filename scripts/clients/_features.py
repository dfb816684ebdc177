"""Reports the features of a client, for `try_clients.py`."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

URL, MODEL, DIRECTORY = sys.argv[1:4]
SCHEMA = {
    "type": "object",
    "properties": {"way": {"enum": ["left", "right"]}},
    "required": ["way"],
    "additionalProperties": False,
}


@contextmanager
def feature(name: str) -> Iterator[None]:
    """Report whether the code in the block works."""
    problem = ""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever a client raises is its problem
        problem = "".join(traceback.format_exception_only(error)).strip()[:600]
    print(json.dumps({"feature": name, "problem": problem}), flush=True)


def run_command(command: list[str]) -> None:
    """Run a program of a client.

    Raises:
        AssertionError: it fails; the message has its exit status, negative for a signal, and its last output.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"exit status {done.returncode}: {(done.stdout + done.stderr)[-500:]}"
