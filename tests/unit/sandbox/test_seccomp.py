"""If these fail, a confined process can do more than Python programs need, or Python programs cannot run confined."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from quintet.sandbox import seccomp

pytestmark = pytest.mark.attack

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
MACHINES = list(seccomp.ARCHITECTURES)
O_ASYNC_REQUESTS = {"fcntl": (8, 10, 15, 5, 6, 7, 1024, 1026), "ioctl": (0x5452, 0x8901, 0x8902, 0x5412)}
"""Requests that make a descriptor send signals, lock files, or type into a terminal."""


@pytest.mark.parametrize("machine", MACHINES)
def test_every_system_call_that_is_not_listed_is_refused(machine: str) -> None:
    program = list(seccomp._program(machine, 1234, True))
    listed = {*seccomp.ALLOWED[machine].values(), *seccomp.ARGUMENT_CHECKED[machine].values()}
    for number in range(600):
        later = number > seccomp.LAST_KNOWN_SYSCALL or number in seccomp.FLAGS_IN_MEMORY
        refusal = seccomp.REFUSE | (errno.ENOSYS if later else errno.EPERM)
        if number not in listed:
            assert verdict(program, machine, number) == refusal, number
        elif number in seccomp.ALLOWED[machine].values():
            assert verdict(program, machine, number, 99) == seccomp.ALLOW, number


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_that_reach_other_processes_are_refused(machine: str) -> None:
    program = list(seccomp._program(machine, 1234, True))
    calls = seccomp.ARGUMENT_CHECKED[machine]
    refused = seccomp.REFUSE | errno.EPERM
    for name in ("kill", "tgkill"):
        assert verdict(program, machine, calls[name], 1234) == seccomp.ALLOW
        assert {verdict(program, machine, calls[name], other) for other in (0, 1, 2**32 - 1)} == {refused}
    for name, requests in O_ASYNC_REQUESTS.items():
        assert {verdict(program, machine, calls[name], 3, request) for request in requests} == {refused}
    allowed = {"fcntl": seccomp.ALLOWED_FCNTLS, "ioctl": seccomp.ALLOWED_IOCTLS}
    for name, requests in allowed.items():
        assert {verdict(program, machine, calls[name], 3, request) for request in requests} == {seccomp.ALLOW}
    assert {verdict(program, machine, calls["prctl"], option) for option in (1, 4, 22, 36, 0x59616D61)} == {refused}
    assert verdict(program, machine, calls["prctl"], 15) == seccomp.ALLOW
    assert verdict(program, machine, calls["clone"], seccomp.CLONE_THREAD) == seccomp.ALLOW
    assert verdict(program, machine, calls["clone"], 17) == refused
    assert verdict(program, machine, calls["socketpair"], 1, 2) == refused
    assert verdict(program, machine, calls["prlimit64"], 0, 7, 1) == refused
    assert verdict(program, machine, calls["prlimit64"], 0, 7, 0) == seccomp.ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_files_cannot_be_written_nor_read_if_they_are_not_needed(machine: str) -> None:
    opened = seccomp.ARGUMENT_CHECKED[machine]["openat"]
    program = list(seccomp._program(machine, 1234, True))
    assert verdict(program, machine, opened, 3, 0, 0) == seccomp.ALLOW
    assert verdict(program, machine, opened, 3, 0, 0o101) == seccomp.REFUSE | errno.EACCES
    assert verdict(list(seccomp._program(machine, 1, False)), machine, opened) == seccomp.REFUSE | errno.EACCES


def test_a_process_of_another_machine_type_is_killed() -> None:
    program = list(seccomp._program("x86_64", 1234, True))
    assert verdict(program, "aarch64", 0) == seccomp.KILL


@pytest.mark.skipif(not HEADER.exists(), reason=f"needs {HEADER}")
def test_the_numbers_are_those_of_the_kernel() -> None:
    numbers = {name: int(number) for name, number in re.findall(r"__NR_(\w+) (\d+)", HEADER.read_text())}
    listed = seccomp.ALLOWED["x86_64"] | seccomp.ARGUMENT_CHECKED["x86_64"]
    assert listed.items() <= numbers.items()


CONFINED = """
import importlib, json, sys
from quintet.sandbox.seccomp import confine

confine()
failed = {}
skipped = {"antigravity", "this", "idlelib", "lib2to3", "turtle", "turtledemo", "tkinter", "test"}
for name in sorted(sys.stdlib_module_names - skipped):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == name or error.name.startswith("_"), name
    except Exception as error:
        failed[name] = repr(error)

import asyncio, concurrent.futures, hashlib, os, queue, random, selectors, signal, sqlite3, threading, time, zoneinfo
import numpy

async def pipes():
    reader, writer = await asyncio.open_connection(sock=__import__("socket").socketpair()[0])
    writer.close()
    return await asyncio.to_thread(lambda: 3)

signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(0.05)
os.kill(os.getpid(), signal.SIGALRM)
with concurrent.futures.ThreadPoolExecutor(3) as threads:
    squares = list(threads.map(lambda n: n * n, range(4)))
os.set_blocking(os.pipe()[0], False)
results = [
    squares,
    asyncio.run(pipes()),
    round(float(numpy.linalg.det(numpy.eye(64) * 2) / 2**64), 6),
    sqlite3.connect(":memory:").execute("select 1 + 1").fetchone()[0],
    hashlib.sha256(b"").hexdigest()[:4],
    str(zoneinfo.ZoneInfo("UTC")),
    os.isatty(0),
    selectors.DefaultSelector().get_map() is not None,
    len(os.sched_getaffinity(0)) > 0,
]
print(json.dumps([failed, results]))
"""


def test_the_standard_library_and_numpy_run_confined() -> None:
    done = subprocess.run([sys.executable, "-c", CONFINED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    failed, results = json.loads(done.stdout)
    assert not failed
    assert results == [[0, 1, 4, 9], 3, 1.0, 2, "e3b0", "UTC", False, True, True]


def verdict(program: Sequence[seccomp.Instruction], machine: str, number: int, *arguments: int) -> int:
    """Return what the kernel makes of a call: classic BPF, as far as the filter uses it."""
    data = {0: number, 4: seccomp.ARCHITECTURES[machine], **dict(_halves(arguments))}
    at, loaded = 0, 0
    while True:
        operation, yes, no, operand = program[at]
        if operation == seccomp.RETURN:
            return operand
        if operation == seccomp.LOAD:
            loaded, jump = data.get(operand, 0), 0
        else:
            tests = {
                seccomp.EQUAL: loaded == operand,
                seccomp.GREATER: loaded > operand,
                seccomp.ANY_BIT: bool(loaded & operand),
            }
            jump = yes if tests[operation] else no
        at += 1 + jump


def _halves(arguments: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the offsets and values of the halves of 64-bit arguments."""
    for index, value in enumerate(arguments):
        yield 16 + 8 * index, value & 0xFFFFFFFF
        yield 20 + 8 * index, value >> 32
