"""Reports the features of a client, for `try_clients.py`."""

from __future__ import annotations

import json
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
