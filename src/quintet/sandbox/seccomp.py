"""Confinement of the current process: it can no longer start processes, open connections or change files.

Linux only (x86-64, AArch64), without privileges: a seccomp filter, no capabilities, no new privileges. Still allowed:
reading every file that the user can read unless Landlock restricts it (`quintet.sandbox.landlock`), and threads, memory
and time within the resource limits.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path

Instruction = tuple[int, int, int, int]
"""Instruction of a classic BPF program: code, jump if true, jump if false, operand."""

MAX_FILE_BYTES = 4 << 20
"""Size limit of each file that a limited process writes, standard output included."""
MAX_OPEN_FILES = 64
MAX_THREADS = 256
MAX_PENDING_SIGNALS = 256
"""Signals that wait, and timers, of the user of a confined process."""
CONFINEMENT_FAILED = 97
"""Exit status of a process that cannot be confined."""

DUMPABLE_VARIABLE = "QUINTET_DUMPABLE"
"""Environment variable that keeps core dumps and debuggers possible if it is 1."""

# prctl(2)
PDEATHSIG, GET_DUMPABLE, DUMPABLE, KEEP_CAPABILITIES, SECCOMP, CAPBSET_DROP, NO_NEW_PRIVS = 1, 3, 4, 8, 22, 24, 38
# capabilities(7)
DAC_READ_SEARCH, KILL_ANY, SETGID, SETUID = 1 << 2, 1 << 5, 1 << 6, 1 << 7
FIRST_UNUSED_USER = 0x60000000
LOAD, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LAST_KNOWN_SYSCALL = 451
"""Later system calls (and calls of other interfaces, with higher numbers) return ENOSYS, as in an old kernel."""
CLONE_THREAD = 0x10000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NOT_STREAM = 0xE
"""Bits of the types of sockets other than SOCK_STREAM."""
ALLOWED_IOCTLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX; others could type into a terminal or make a
descriptor send signals."""
ALLOWED_FCNTLS = (0, 1, 2, 3, 4, 9, 11, 1030, 1032, 1034)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETOWN, F_GETSIG, F_DUPFD_CLOEXEC, F_GETPIPE_SZ and F_GET_SEALS;
others lock files, notify, or make a descriptor send signals (F_SETOWN, F_SETSIG)."""
ALLOWED_PRCTLS = (3, 15, 16, 21, 23, 39, 0x53564D41)
"""PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS and PR_SET_VMA."""

# audit architecture and system call numbers by machine (asm/unistd_64.h, asm-generic/unistd.h)
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ARGUMENT_CHECKED = {
    "x86_64": {"open": 2, "openat": 257, "clone": 56, "kill": 62, "tgkill": 234, "prctl": 157, "prlimit64": 302}
    | {"ioctl": 16, "fcntl": 72, "socketpair": 53},
    "aarch64": {"openat": 56, "clone": 220, "kill": 129, "tgkill": 131, "prctl": 167, "prlimit64": 261}
    | {"ioctl": 29, "fcntl": 25, "socketpair": 199},
}
FLAGS_IN_MEMORY = (435, 437)
"""clone3 and openat2, the same numbers on all machines: a filter cannot read their flags. They return ENOSYS, so
that the C library falls back to the older calls."""


def _allowed_system_calls() -> dict[str, dict[str, int]]:
    """Return the numbers of the system calls that are allowed with any arguments, by machine and name."""
    lines = files("quintet.sandbox").joinpath("system_calls.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    machines = enumerate(ARCHITECTURES, 1)
    return {machine: {row[0]: int(row[i]) for row in rows if row[i] != "-"} for i, machine in machines}


CAPABILITY_HEADER = struct.pack("Ii", 0x20080522, 0)
"""Version 3, this process."""
ALLOWED = _allowed_system_calls()
"""Read when this module is imported: a process may no longer be able to read files when it is confined."""
_confined = False


class ConfinementError(RuntimeError):
    """This kernel or machine cannot confine a process without privileges."""


def is_confined() -> bool:
    """Return whether this process is confined."""
    return _confined


def confine(*, read_files: bool = True, capabilities: int = 0) -> None:
    """Confine this process irrevocably.

    Without `read_files`, it can no longer open any file: everything that it needs must have been imported. It keeps
    those of `capabilities` that it has.

    Raises:
        ConfinementError: the machine or kernel does not support it; the process works as before.
    """
    global _confined
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        raise ConfinementError(f"processes can be confined on Linux (x86-64, AArch64), not on {sys.platform} {machine}")
    _drop_capabilities(capabilities)
    steps = _program(machine, os.getpid(), read_files)
    program = b"".join(struct.pack("HBBI", *step) for step in steps)
    instructions = ctypes.create_string_buffer(program, len(program))
    table = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))
    filters = ctypes.create_string_buffer(table, len(table))
    if not forbid_new_privileges() or _prctl(SECCOMP, 2, ctypes.addressof(filters)):
        raise ConfinementError("the kernel refuses seccomp filters")
    _confined = True


def _program(machine: str, process_id: int, read_files: bool) -> Iterator[Instruction]:
    """Yield the instructions of the filter: check the arguments of some calls, allow listed ones, refuse the rest."""
    checked = ARGUMENT_CHECKED[machine]
    yield from [(LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    yield from [(GREATER, 0, 1, LAST_KNOWN_SYSCALL), _refusal(errno.ENOSYS)]
    for number in FLAGS_IN_MEMORY:
        yield from [(EQUAL, 0, 1, number), _refusal(errno.ENOSYS)]
    for number in ALLOWED[machine].values():
        yield from [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for name in () if read_files else {"open", "openat"} & checked.keys():
        yield from [(EQUAL, 0, 1, checked[name]), _refusal(errno.EACCES)]
    yield from _where(checked["clone"], 0, (ANY_BIT, 1, 0, CLONE_THREAD))
    yield from _where(checked["openat"], 2, (ANY_BIT, 0, 1, WRITING), errno.EACCES)
    if "open" in checked:
        yield from _where(checked["open"], 1, (ANY_BIT, 0, 1, WRITING), errno.EACCES)
    yield from _where(checked["kill"], 0, (EQUAL, 1, 0, process_id))
    yield from _where(checked["tgkill"], 0, (EQUAL, 1, 0, process_id))
    # pairs of stream sockets, as asyncio has them, cannot be connected elsewhere
    yield from _where(checked["socketpair"], 1, (ANY_BIT, 0, 1, NOT_STREAM))
    # prlimit64 changes a limit if the third argument, an address, is not null; check both halves
    yield from _where(checked["prlimit64"], 2, (EQUAL, 1, 0, 0))
    yield from _where(checked["prlimit64"], 2, (EQUAL, 1, 0, 0), high=True)
    yield from _only(checked["ioctl"], 1, ALLOWED_IOCTLS)
    yield from _only(checked["fcntl"], 1, ALLOWED_FCNTLS)
    yield from _only(checked["prctl"], 0, ALLOWED_PRCTLS)
    for number in checked.values():
        yield from [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    yield _refusal()


def _only(number: int, argument: int, values: Sequence[int]) -> Iterator[Instruction]:
    """Refuse a call unless the lower half of an argument has one of the values; then load the call number again."""
    yield from [(EQUAL, 0, len(values) + 3, number), (LOAD, 0, 0, 16 + 8 * argument)]
    for index, value in enumerate(values):
        yield (EQUAL, len(values) - index, 0, value)
    yield from [_refusal(), (LOAD, 0, 0, 0)]


def _where(
    number: int, argument: int, test: Instruction, code: int = errno.EPERM, high: bool = False
) -> Sequence[Instruction]:
    """Refuse a call unless the test of an argument skips the refusal; then load the call number again."""
    offset = 16 + 8 * argument + (4 if high else 0)
    return [(EQUAL, 0, 4, number), (LOAD, 0, 0, offset), test, _refusal(code), (LOAD, 0, 0, 0)]


def _refusal(code: int = errno.EPERM) -> Instruction:
    return (RETURN, 0, 0, REFUSE | code)


def _drop_capabilities(kept: int = 0) -> None:
    """Drop the privileges of root except `kept`, also those that an executed program could regain."""
    for capability in range(64):
        _prctl(CAPBSET_DROP, capability)
    _set_capabilities(kept & _capabilities())


def _capabilities() -> int:
    """Return the permitted capabilities of this process, the first 32 of them."""
    data = ctypes.create_string_buffer(24)
    _libc().capget(CAPABILITY_HEADER, data)
    return int(struct.unpack_from("I", data, 4)[0])


def _set_capabilities(capabilities: int) -> None:
    _libc().capset(CAPABILITY_HEADER, struct.pack("6I", capabilities, capabilities, 0, 0, 0, 0))


def become_unused_user() -> bool:
    """Change this process of root to a user that owns nothing, and return whether that worked.

    Limits per user then count this process alone, and hold, which they do not for root. The process can still read the
    files of root, such as Python's own: Landlock must restrict it.
    """
    needed = KILL_ANY | SETGID | SETUID | DAC_READ_SEARCH
    if sys.platform != "linux" or os.geteuid() != 0 or _capabilities() & needed != needed:
        return False
    number = FIRST_UNUSED_USER + os.getpid()
    _prctl(KEEP_CAPABILITIES, 1)
    try:
        os.setgroups([])
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)
    except OSError:
        # a user namespace that has no such user
        return False
    _set_capabilities(DAC_READ_SEARCH)
    die_with_parent()
    return True


def unused_user_reads(directories: Iterable[str]) -> bool:
    """Return whether a process that calls `become_unused_user` can list directories: a file server may refuse it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with suppress(OSError):
            is_changed = become_unused_user()
            for directory in directories:
                os.scandir(directory).close()
            status = int(not is_changed)
        os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def forbid_new_privileges() -> bool:
    """Give up privileges that programs could gain, as filters require; return whether that worked."""
    return _prctl(NO_NEW_PRIVS, 1) == 0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        _prctl(PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Prevent other processes of this user from reading the memory and environment of this process.

    This also prevents core dumps and debuggers, unless `DUMPABLE_VARIABLE` is 1.
    """
    if sys.platform == "linux" and os.environ.get(DUMPABLE_VARIABLE) != "1":
        _prctl(DUMPABLE, 0)


def die_first_without_memory() -> None:
    """Have the kernel end this process and its forks first when memory runs out, and hide its memory."""
    if sys.platform == "linux":
        # the file of a process with hidden memory belongs to root
        _prctl(DUMPABLE, 1)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
        hide_memory()


def is_memory_hidden() -> bool:
    """Return whether other processes of this user are prevented from reading the memory of this process."""
    return sys.platform == "linux" and _prctl(GET_DUMPABLE) == 0


def limit_resources(memory: int, cpu_seconds: int | None = None) -> None:
    """Limit the address space of this process, bytes, and disable core files. With `cpu_seconds`, also limit CPU time,
    file sizes and open files."""
    bounds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: memory}
    if cpu_seconds is not None:
        bounds |= {resource.RLIMIT_CPU: cpu_seconds, resource.RLIMIT_FSIZE: MAX_FILE_BYTES}
        bounds |= {resource.RLIMIT_NOFILE: MAX_OPEN_FILES}
    _set_limits(bounds)


def limit_threads(*, own_user: bool = False) -> None:
    """Limit the threads, timers and locked memory of this process.

    The kernel counts per user: beside the threads that run on this machine now, `MAX_THREADS` more may start, or just
    these with `own_user`, a user of this process alone. Root in the first user namespace has no limit of threads.
    """
    if sys.platform == "linux":
        others = 0 if own_user else int(Path("/proc/loadavg").read_text(encoding="utf-8").split()[3].partition("/")[2])
        bounds = {resource.RLIMIT_NPROC: MAX_THREADS + others, resource.RLIMIT_MEMLOCK: 0}
        _set_limits({**bounds, resource.RLIMIT_SIGPENDING: MAX_PENDING_SIGNALS})


def _set_limits(bounds: Mapping[int, int]) -> None:
    for kind, bound in bounds.items():
        _, hard_limit = resource.getrlimit(kind)
        bound = bound if hard_limit == resource.RLIM_INFINITY else min(bound, hard_limit)
        resource.setrlimit(kind, (bound, bound))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *arguments: int) -> int:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return int(_libc().prctl(option, *padded))
