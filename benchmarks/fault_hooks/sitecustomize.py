"""Inject a fault into one rank of a run, for `benchmarks/fault_drill.py`; no part of the product.

Python imports this module at its start if `PYTHONPATH` has its directory. The variable `QUINTET_FAULT` is a JSON object
with the rank, the method at which the fault occurs (`at`, see `METHODS`), what occurs (`action`), and the path
`marker`: the fault occurs once, at the first call of the method after the file `<marker>.go` was created, and writes
its time to `marker`. Faults at the start of a rank do not wait for that file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

METHODS = {
    "engine step": ("quintet.runtime.engines.engine_worker", None, "take_steps"),
    "engine load": ("quintet.rollout.engines.hf.engine", "HfEngine", "load_weights"),
    "learner": ("quintet.runtime.worker", "Worker", "execute"),
    "message": ("quintet.runtime.calls.messages", "MessageSocket", "_send"),
    "start": ("quintet.cli.ranks", None, "_run_as_rank"),
}
"""Module, class and name of each method."""
HELD: list[bytes] = []
"""Allocated memory."""


class CorruptedSocket:
    """A socket that changes one byte of the next data sent."""

    def __init__(self, connected: Any, offset: int) -> None:
        self._socket = connected
        self._offset: int | None = offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendall(self, data: bytes) -> None:
        if self._offset is not None:
            data, self._offset = corrupt(data, self._offset), None
        self._socket.sendall(data)


def corrupt(data: bytes, offset: int) -> bytes:
    """Return the data with another byte at an offset: a digit becomes another digit, so that JSON remains JSON."""
    changed = bytearray(data)
    digits = [index for index in range(abs(offset), len(data)) if chr(data[index]).isdigit()] if offset < 0 else []
    index = digits[-1] if digits else min(abs(offset), len(data) - 1)
    changed[index] ^= 1
    return bytes(changed)


def act(action: str, argument: float, arguments: Sequence[Any]) -> Sequence[Any]:
    """Let the fault occur; return the arguments with which the method is called then."""
    if action == "raise":
        raise RuntimeError("injected error")
    if action == "raise ValueError":
        raise ValueError("injected error")
    if action == "exit":
        os._exit(int(argument))
    if action == "sleep":
        time.sleep(argument)
    if action == "allocate":
        HELD.extend(b"1" * (1 << 20) for _ in range(int(argument)))
    if action == "corrupt message":
        arguments[0]._socket = CorruptedSocket(arguments[0]._socket, int(argument))
    return arguments


def patch(module: ModuleType, fault: dict[str, Any]) -> None:
    """Replace the method of the fault."""
    _, owner_name, name = METHODS[fault["at"]]
    owner = getattr(module, owner_name) if owner_name else module
    method, marker = getattr(owner, name), Path(fault["marker"])

    def is_due() -> bool:
        return (fault["at"] == "start" or os.path.exists(f"{marker}.go")) and not marker.exists()

    @wraps(method)
    def faulty(*arguments: Any, **named: Any) -> Any:
        if is_due():
            if fault["at"] == "start":
                time.sleep(fault["delay"])
            marker.write_text(str(time.time()))
            arguments = tuple(act(fault["action"], fault.get("argument", 0), arguments))
        return method(*arguments, **named)

    setattr(owner, name, faulty)


class PatchingFinder:
    """Patches a module when it is imported."""

    def __init__(self, name: str, patch_module: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._patch = patch_module

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            self._patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


FAULT: dict[str, Any] = json.loads(os.environ.get("QUINTET_FAULT", "{}"))
if FAULT and os.environ.get("RANK") == str(FAULT["rank"]):
    finder: Any = PatchingFinder(METHODS[FAULT["at"]][0], lambda module: patch(module, FAULT))
    sys.meta_path.insert(0, finder)
