"""Restriction of the files that the current process can read, by the Linux security module Landlock (since Linux 5.13).

It also keeps the process from the memory, environment and descriptors of processes outside its domain, whoever their
user is, and since Linux 6.12 from sending signals and connecting to abstract sockets, also through descriptors.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from quintet.sandbox.seccomp import forbid_new_privileges

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls, with the same numbers on all machines."""
READ_FILE, READ_DIR = 1 << 2, 1 << 3
FIRST_FILE_RIGHTS: Final = (1 << 13) - 1
"""Rights of the first version: execute, write, read, create and remove."""
SCOPES: Final = 3
"""Signals and abstract sockets."""
VERSION_WITH_SCOPES: Final = 6
PATH_BENEATH: Final = 1
SYSTEM_PATHS: Final = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    *("/usr/share/zoneinfo", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"),
)


def python_paths() -> Iterator[str]:
    """Yield the paths that Python programs read: libraries of Python, its packages and the system."""
    yield from SYSTEM_PATHS
    for prefix in {sys.prefix, sys.base_prefix}:
        yield from (os.path.join(prefix, name) for name in ("lib", "lib64"))


def kernel_version() -> int:
    """Return the version of Landlock that the kernel has, 0 or less if it has none."""
    return ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1) if sys.platform == "linux" else 0


def read_ruleset(paths: Iterable[str]) -> int | None:
    """Return the descriptor of a ruleset that allows reading below `paths`, or None if the kernel has no Landlock."""
    libc, version = ctypes.CDLL(None, use_errno=True), kernel_version()
    if version < 1:
        return None
    attributes = struct.pack("QQQ", FIRST_FILE_RIGHTS, 0, SCOPES)[: 24 if version >= VERSION_WITH_SCOPES else 8]
    ruleset = int(libc.syscall(CREATE_RULESET, attributes, len(attributes), 0))
    for path in filter(os.path.exists, paths):
        _allow(libc, ruleset, path)
    return ruleset


def restrict(ruleset: int) -> bool:
    """Restrict this process irrevocably by a ruleset; return whether that worked.

    Open files and files in memory stay usable.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    return forbid_new_privileges() and bool(libc.syscall(RESTRICT_SELF, ruleset, 0) == 0)


def restrict_reading(paths: Iterable[str]) -> None:
    """Restrict this process irrevocably to reading below `paths`, if the kernel has Landlock."""
    if (ruleset := read_ruleset(paths)) is not None:
        restrict(ruleset)
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rights = READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
    libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    os.close(descriptor)
