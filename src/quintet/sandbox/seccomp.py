"""Confinement of the current process: it can no longer start processes, open connections or change files.

Linux only (x86-64, AArch64), without privileges: a seccomp filter, no capabilities, no new privileges. Still allowed:
reading every file that the user can read, threads, and memory and time within the resource limits.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Sequence
from functools import cache

Instruction = tuple[int, int, int, int]
"""Instruction of a classic BPF program: code, jump if true, jump if false, operand."""

MAX_FILE_BYTES = 4 << 20
"""Size limit of each file that a limited process writes, standard output included."""
MAX_OPEN_FILES = 64
CONFINEMENT_FAILED = 97
"""Exit status of a process that cannot be confined."""

# prctl(2)
PDEATHSIG, DUMPABLE, SECCOMP, CAPBSET_DROP, NO_NEW_PRIVS = 1, 4, 22, 24, 38
LOAD, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LAST_KNOWN_SYSCALL = 451
"""Later system calls (and calls of other interfaces, with higher numbers) return ENOSYS, as in an old kernel."""
CLONE_THREAD = 0x10000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NOT_STREAM = 0xE
"""Bits of the types of sockets other than SOCK_STREAM."""
REFUSED_IOCTLS = (0x5412, 0x5452, 0x8901, 0x8902)
"""TIOCSTI, and those by which a descriptor sends signals: FIOASYNC, FIOSETOWN, SIOCSPGRP."""
REFUSED_FCNTLS = (5, 6, 7, 8, 10, 15, 37, 38, 1024, 1026)
"""Locks, leases and notifications, and those by which a descriptor sends signals: F_SETOWN, F_SETSIG, F_SETOWN_EX."""

# audit architecture and system call numbers by machine (asm/unistd_64.h, asm-generic/unistd.h)
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ARGUMENT_CHECKED = {
    "x86_64": {"open": 2, "openat": 257, "clone": 56, "kill": 62, "tgkill": 234, "prctl": 157, "prlimit64": 302}
    | {"ioctl": 16, "fcntl": 72, "socketpair": 53, "execve": 59, "execveat": 322, "clone3": 435, "openat2": 437},
    "aarch64": {"openat": 56, "clone": 220, "kill": 129, "tgkill": 131, "prctl": 167, "prlimit64": 261}
    | {"ioctl": 29, "fcntl": 25, "socketpair": 199, "execve": 221, "execveat": 281, "clone3": 435, "openat2": 437},
}
NEWER = (424, 425, 428, 429, 430, 432, 434, 438, 440, 442, 447)
"""pidfd_*, io_uring_setup, the new mount calls, process_madvise, memfd_secret; same numbers on all machines."""
REFUSED = {
    "x86_64": (
        *(41, 42, 49, 50),  # socket, connect, bind, listen
        *(57, 58, 101, 112, 109),  # fork, vfork, ptrace, setsid, setpgid
        *(200, 129, 297, 310, 311, 312),  # tkill, rt_(tg)sigqueueinfo, process_vm_*, kcmp
        *(76, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94),  # truncate, rename, mkdir … lchown
        *(132, 133, 188, 189, 190, 197, 198, 199, 235),  # utime, mknod, *xattr, utimes
        *(258, 259, 260, 261, 263, 264, 265, 266, 268, 280, 316),  # the same with a directory
        *(29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220),  # System V memory, semaphores and queues, those that exist too
        *(240, 241, 242, 243, 244, 245, 319),  # POSIX queues, memfd_create
        *(105, 106, 113, 114, 116, 117, 119, 122, 123, 126, 135),  # set*id, capset, personality
        *(154, 155, 159, 160, 161, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172, 173),  # limits, mounts, machine
        *(73, 141, 142, 144, 203, 251, 256, 314),  # flock; priorities and scheduling, also of other processes
        *(175, 176, 179, 227, 246, 248, 249, 250, 272, 279, 298, 303, 304, 305, 308, 313, 320, 321, 323),
    ),
    "aarch64": (
        *(198, 203, 200, 201, 117, 157, 154, 130, 138, 240, 270, 271, 272),
        *(45, 33, 34, 35, 36, 37, 38, 276, 52, 53, 54, 55, 88, 5, 6, 7, 14, 15, 16),
        *(194, 196, 195, 190, 193, 191, 186, 189, 188, 187, 192),
        *(180, 181, 182, 183, 184, 185, 279),
        *(146, 144, 145, 143, 159, 147, 149, 151, 152, 91, 92),
        *(41, 171, 164, 51, 89, 170, 40, 39, 224, 225, 142, 161, 162),
        *(32, 140, 118, 119, 122, 30, 274),
        *(105, 106, 60, 112, 104, 217, 218, 219, 97, 239, 241, 264, 265, 266, 268, 273, 294, 280, 282),
    ),
}

_confined = False


class ConfinementError(RuntimeError):
    """This kernel or machine cannot confine a process without privileges."""


def is_confined() -> bool:
    """Return whether this process is confined."""
    return _confined


def confine(*, read_files: bool = True) -> None:
    """Confine this process irrevocably.

    Without `read_files`, it can no longer open any file: everything that it needs must have been imported.

    Raises:
        ConfinementError: the machine or kernel does not support it; the process works as before.
    """
    global _confined
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        raise ConfinementError(f"processes can be confined on Linux (x86-64, AArch64), not on {sys.platform} {machine}")
    _drop_capabilities()
    steps = _program(machine, os.getpid(), read_files)
    program = b"".join(struct.pack("HBBI", *step) for step in steps)
    instructions = ctypes.create_string_buffer(program, len(program))
    table = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))
    filters = ctypes.create_string_buffer(table, len(table))
    if not forbid_new_privileges() or _prctl(SECCOMP, 2, ctypes.addressof(filters)):
        raise ConfinementError("the kernel refuses seccomp filters")
    _confined = True


def _program(machine: str, process_id: int, read_files: bool) -> Iterator[Instruction]:
    """Yield the instructions of the filter: refuse listed calls, check the arguments of some, allow the rest."""
    call_numbers = ARGUMENT_CHECKED[machine]
    yield from [(LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    yield from [(GREATER, 0, 1, LAST_KNOWN_SYSCALL), _refusal(errno.ENOSYS)]
    # the flags of these two are in memory, which a filter cannot read; the C library falls back to the older calls
    for name in ("clone3", "openat2"):
        yield from [(EQUAL, 0, 1, call_numbers[name]), _refusal(errno.ENOSYS)]
    for number in (*REFUSED[machine], *NEWER, call_numbers["execve"], call_numbers["execveat"]):
        yield from [(EQUAL, 0, 1, number), _refusal()]
    for name in () if read_files else {"open", "openat"} & call_numbers.keys():
        yield from [(EQUAL, 0, 1, call_numbers[name]), _refusal(errno.EACCES)]
    yield from _where(call_numbers["clone"], 0, (ANY_BIT, 1, 0, CLONE_THREAD))
    yield from _where(call_numbers["openat"], 2, (ANY_BIT, 0, 1, WRITING), errno.EACCES)
    if "open" in call_numbers:
        yield from _where(call_numbers["open"], 1, (ANY_BIT, 0, 1, WRITING), errno.EACCES)
    yield from _where(call_numbers["kill"], 0, (EQUAL, 1, 0, process_id))
    yield from _where(call_numbers["tgkill"], 0, (EQUAL, 1, 0, process_id))
    yield from _where(call_numbers["prctl"], 0, (EQUAL, 0, 1, PDEATHSIG))
    # pairs of stream sockets, as asyncio has them, cannot be connected elsewhere
    yield from _where(call_numbers["socketpair"], 1, (ANY_BIT, 0, 1, NOT_STREAM))
    for call, requests in (("ioctl", REFUSED_IOCTLS), ("fcntl", REFUSED_FCNTLS)):
        for request in requests:
            yield from _where(call_numbers[call], 1, (EQUAL, 0, 1, request))
    # prlimit64 changes a limit if the third argument, an address, is not null; check both halves
    yield from _where(call_numbers["prlimit64"], 2, (EQUAL, 1, 0, 0))
    yield from _where(call_numbers["prlimit64"], 2, (EQUAL, 1, 0, 0), high=True)
    yield (RETURN, 0, 0, ALLOW)


def _where(
    number: int, argument: int, test: Instruction, code: int = errno.EPERM, high: bool = False
) -> Sequence[Instruction]:
    """Refuse a call unless the test of an argument skips the refusal; then load the call number again."""
    offset = 16 + 8 * argument + (4 if high else 0)
    return [(EQUAL, 0, 4, number), (LOAD, 0, 0, offset), test, _refusal(code), (LOAD, 0, 0, 0)]


def _refusal(code: int = errno.EPERM) -> Instruction:
    return (RETURN, 0, 0, REFUSE | code)


def _drop_capabilities() -> None:
    """Drop the privileges of root, also those that an executed program could regain."""
    for capability in range(64):
        _prctl(CAPBSET_DROP, capability)
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _libc().capset(header, nothing)


def forbid_new_privileges() -> bool:
    """Give up privileges that programs could gain, as filters require; return whether that worked."""
    return _prctl(NO_NEW_PRIVS, 1) == 0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        _prctl(PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Prevent other processes of this user from reading the memory and environment of this process."""
    if sys.platform == "linux":
        _prctl(DUMPABLE, 0)


def limit_resources(memory: int, cpu_seconds: int | None = None) -> None:
    """Limit the address space of this process, bytes, and disable core files. With `cpu_seconds`, also limit CPU time,
    file sizes and open files."""
    bounds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: memory}
    if cpu_seconds is not None:
        bounds |= {resource.RLIMIT_CPU: cpu_seconds, resource.RLIMIT_FSIZE: MAX_FILE_BYTES}
        bounds |= {resource.RLIMIT_NOFILE: MAX_OPEN_FILES}
    for kind, bound in bounds.items():
        _, hard_limit = resource.getrlimit(kind)
        bound = bound if hard_limit == resource.RLIM_INFINITY else min(bound, hard_limit)
        resource.setrlimit(kind, (bound, bound))


def restrict_process(memory: int, *, confined: bool = True) -> None:
    """Hide and limit the memory of this process, bytes, and confine it if that is possible."""
    hide_memory()
    if sys.platform == "linux":
        limit_resources(memory)
    try:
        if confined:
            confine()
    except ConfinementError:
        return


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *arguments: int) -> int:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return int(_libc().prctl(option, *padded))
