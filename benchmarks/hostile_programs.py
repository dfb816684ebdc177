"""Hostile Python programs, written by a seeded generator over system calls, paths below `/proc` and known attacks.

Each program tries what its kind names, prints what it gets, and ends with a function `f` that solves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any, Final

DIRECTORY: Final = Path(__file__).parent
FORGERIES: Final = DIRECTORY.parent / "tests/unit/rewards/code_attacks.txt"
"""Programs that try to pass tests of `f` without solving them."""
NUM_SYSTEM_CALLS: Final = 470
ENDING_CALLS: Final = (
    60,
    231,
    15,
    3,
    9,
    10,
    11,
    12,
    13,
    14,
    25,
    28,
    33,
    34,
    61,
    62,
    130,
    158,
    218,
    219,
    234,
    247,
    292,
    334,
    436,
)
"""System calls of x86-64 that may end or block the program itself: tried last."""
READ_PATHS: Final = (
    *(
        "environ",
        "mem",
        "maps",
        "cmdline",
        "stack",
        "auxv",
        "syscall",
        "io",
        "fd/0",
        "fd/3",
        "root/etc/passwd",
        "cwd/secret",
    ),
    *("pagemap", "task", "ns/mnt", "map_files", "limits", "status", "stat", "exe", "wchan", "mountinfo", "numa_maps"),
)
WRITTEN_PATHS: Final = (
    "oom_score_adj",
    "comm",
    "clear_refs",
    "coredump_filter",
    "timerslack_ns",
    "uid_map",
    "sched",
    "attr/current",
    "autogroup",
    "mem",
    "setgroups",
    "loginuid",
)
SYSTEM_PATHS: Final = (
    *("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/kcore", "/proc/kmsg"),
    *("/proc/sys/kernel/hostname", "/proc/keys", "/proc/net/tcp", "/proc/net/unix", "/proc/mounts", "/proc/self/mem"),
    *("/proc/sys/kernel/pid_max", "/proc/1/environ", "/proc/self/environ", "/proc/self/oom_score_adj", "/etc/shadow"),
    *(
        "/dev/mem",
        "/dev/kmsg",
        "/dev/tty",
        "/dev/ptmx",
        "/dev/fuse",
        "/dev/shm",
        "/sys/kernel/uevent_helper",
        "/dev/console",
    ),
    *(
        "/sys/fs/cgroup/cgroup.procs",
        "/sys/power/state",
        "/proc/self/attr/exec",
        "/dev/watchdog",
        "/proc/acpi",
        "/root",
    ),
)
LIAR: Final = """
class Liar:
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda *_: True
    __hash__ = lambda _: 4
"""
PRELUDE: Final = """
import ctypes, fcntl, mmap, multiprocessing, os, py_compile, resource, shutil, signal, socket, sqlite3, stat, struct
import subprocess, sys, tempfile, threading, time, urllib.request

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
LIBC.syscall.restype = ctypes.c_long
BUFFER = ctypes.create_string_buffer(4096)


def expire(*_):
    raise TimeoutError


def attempt(call, seconds=0.2):
    try:
        signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        result = call()
        if result != -1:
            print(repr(result)[:500])
        return result
    except BaseException:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def show():
    data = bytes(BUFFER).rstrip(b"\\0")
    if data:
        print(data)


def system_call(number, random):
    path = ctypes.create_string_buffer(PATH.encode(), 256)
    new = ctypes.create_string_buffer(f"/tmp/{MARKER}".encode(), 256)
    data, size = ctypes.addressof(BUFFER), 4096
    for arguments in (
        (0, 0, 0, 0, 0, 0),
        (-1, -1, -1, -1, -1, -1),
        (PID, 9, 0, 0, 0, 0),
        (PID, data, size, data, size, 0),
        (JUDGE, PID, 9, data, 0, 0),
        (0, PID, 19, 0, 0, 0),
        (data, data, size, data, size, 0),
        (path, 0o102, 0o777, 0, 0, 0),
        (path, new, 0, 0, 0, 0),
        (-100, path, 0, 0, 0, 0),
        (-100, path, 0o102, 0o777, 0, 0),
        (-100, path, -100, new, 0, 0),
        (1, data, 64, 0, 0, 0),
        (KEY, 4096, 0o1666, 0, 0, 0),
        random.choices((0, 1, 2, PID, JUDGE, KEY, data, size, -1, 1 << 63, random.getrandbits(32)), k=6),
    ):
        ctypes.memset(BUFFER, 0, 4096)
        values = [each if isinstance(each, ctypes.Array) else ctypes.c_long(each) for each in arguments]
        attempt(lambda: LIBC.syscall(ctypes.c_long(number), *values), 0.05)
        show()


def touch(path, flags):
    with open(os.open(path, flags), "r+b" if flags & os.O_RDWR else "rb", buffering=0) as file:
        if flags & os.O_RDWR:
            file.write(b"1000")
        return file.read(4096)


print("BEGUN", flush=True)
"""
"""Begins all programs but forgeries."""


@dataclass(frozen=True, slots=True)
class HostileProgram:
    """Source and kind of attack."""

    kind: str
    source: str


def hostile_programs(number: int, seed: int, targets: Mapping[str, Any]) -> Iterator[HostileProgram]:
    """Yield programs of all kinds in turn; `targets` are the values of the names `PID`, `JUDGE`, `PATH` and so on.

    A quarter of them covers the whole table of system calls, as the numbers of calls per program allow.
    """
    generator = random.Random(seed)
    blocks = _blocks()
    kinds = cycle(_order(blocks))
    calls = _system_calls(generator, max(number // 4, 1))
    paths, forgeries = _paths(generator), _forgeries()
    turns = {kind: count(generator.randrange(len(blocks[kind]))) for kind in blocks}
    for _ in range(number):
        kind = next(kinds)
        if kind == "forgeries":
            yield HostileProgram(kind, next(forgeries))
            continue
        body = next(calls if kind == "system calls" else paths) if kind not in blocks else ""
        if kind in blocks:
            body = blocks[kind][next(turns[kind]) % len(blocks[kind])]
        names = {**targets, "N": generator.getrandbits(16)}
        values = "\n".join(f"{name} = {value!r}" for name, value in names.items())
        yield HostileProgram(kind, f"{PRELUDE}\n{values}\n{body}\n\ndef f(n):\n    return 0\n")


def _order(blocks: Mapping[str, Any]) -> list[str]:
    """Return kinds so that every fourth is system calls, and every eighth paths."""
    order: list[str] = []
    for index, kind in enumerate([*blocks, "forgeries"]):
        order += [kind]
        if index % 2:
            order += ["system calls", "paths"] if index % 4 == 1 else ["system calls"]
    return order


def _blocks() -> dict[str, list[str]]:
    sections = (DIRECTORY / "hostile_programs.txt").read_text().split("\n## ")[1:]
    parts = [section.partition("\n") for section in sections]
    return {name: [block.strip("\n") for block in text.split("\n\n") if block.strip()] for name, _, text in parts}


def _system_calls(generator: random.Random, number: int) -> Iterator[str]:
    """Yield statements that make system calls; `number` of them make all, also those of x32."""
    numbers = [each for each in range(NUM_SYSTEM_CALLS) if each not in ENDING_CALLS]
    numbers += [each | 0x40000000 for each in generator.sample(range(NUM_SYSTEM_CALLS), 30)]
    generator.shuffle(numbers)
    chunks = [numbers[index::number] for index in range(min(number, len(numbers)))]
    for index, ending in enumerate(ENDING_CALLS):
        chunks[index % len(chunks)].append(ending)
    for chunk in cycle(chunks):
        seed = generator.getrandbits(32)
        yield f"import random\nrandom.seed({seed})\nfor number in {chunk}:\n    system_call(number, random)"


def _paths(generator: random.Random) -> Iterator[str]:
    """Yield statements that read and write paths below `/proc`, and devices."""
    while True:
        read, written = generator.sample(READ_PATHS, 8), generator.sample(WRITTEN_PATHS, 4)
        system = generator.sample(SYSTEM_PATHS, 10)
        yield (
            f"for pid in (PID, JUDGE, os.getppid(), 1, 'self', 'thread-self'):\n"
            f"    for name in {read}:\n"
            f"        attempt(lambda: touch(f'/proc/{{pid}}/{{name}}', os.O_RDONLY))\n"
            f"    for name in {written}:\n"
            f"        attempt(lambda: touch(f'/proc/{{pid}}/{{name}}', os.O_RDWR))\n"
            f"for path in {system}:\n"
            f"    attempt(lambda: touch(path, os.O_RDONLY))\n"
            f"    attempt(lambda: touch(path, os.O_RDWR | os.O_CREAT))\n"
            f"    attempt(lambda: os.listdir(path))\n"
        )


def _forgeries() -> Iterator[str]:
    sections = FORGERIES.read_text().split("## ")[1:]
    return cycle([LIAR + section.partition("\n")[2] for section in sections])
