"""Protections from a model's programs that are active on this machine, as a program finds them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from quintet.sandbox import landlock, seccomp
from quintet.sandbox.program_runner import ProgramRunner

PROBE: Final = """
import json, os, resource, socket

def is_refused(call, *arguments):
    try:
        call(*arguments)
    except PermissionError:
        return True
    return False

found = {"socket": is_refused(socket.socket), "file": is_refused(open, "/proc/self/status")}
print(json.dumps({**found, "user": os.getuid(), "threads": resource.getrlimit(resource.RLIMIT_NPROC)[0]}))
"""
PROBE_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Protection:
    """Protection, whether it is active, and what it does or what its lack means."""

    name: str
    active: bool
    note: str


def protections() -> Iterator[Protection]:
    """Run a program, and yield each protection from it."""
    found = _probe()
    yield _system_calls(bool(found.get("socket")))
    if found:
        yield _files(bool(found["file"]))
        yield _threads(found)
    yield _memory()


def _probe() -> Mapping[str, Any]:
    """Return what a program finds; nothing if programs do not run here."""
    if sys.platform != "linux":
        return {}
    with closing(ProgramRunner()) as runner:
        output = runner.run_script(PROBE, "", PROBE_SECONDS).output
    found: Mapping[str, Any] = json.loads(output or "{}")
    return found


def _system_calls(active: bool) -> Protection:
    if active:
        return Protection("system calls", True, "no processes, connections, signals or written files (seccomp)")
    note = (
        "no program of a model runs: it needs Linux on x86-64 or AArch64 with seccomp; other judged texts have limits"
    )
    return Protection("system calls", False, f"{note} of memory and time only")


def _files(active: bool) -> Protection:
    if active:
        return Protection("files", True, f"only Python's directories are read (Landlock {landlock.kernel_version()})")
    note = "without Landlock (Linux 5.13) all files of this user are read, also secrets: use a container"
    return Protection("files", False, note)


def _threads(found: Mapping[str, Any]) -> Protection:
    if found["user"] == 0:
        note = (
            "the threads of a program are not limited: run as another user, or give root Landlock and the capabilities"
        )
        return Protection("threads", False, f"{note} SETUID, SETGID, KILL and DAC_READ_SEARCH")
    if found["user"] != os.getuid():
        return Protection("threads", True, f"{found['threads']} per program, which is a user that owns nothing")
    return Protection("threads", True, f"{seccomp.MAX_THREADS} beside those that run on this machine")


def _memory() -> Protection:
    if seccomp.is_memory_hidden():
        return Protection("memory", True, "commands leave no core dump, and no other program of this user reads them")
    if sys.platform != "linux":
        return Protection("memory", False, "other programs of this user may read the memory of commands")
    variable = f"{seccomp.DUMPABLE_VARIABLE}=1"
    return Protection("memory", False, f"{variable}: other programs of this user read the memory of commands, and keys")
