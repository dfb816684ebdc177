"""If these fail, one program takes what other processes of the machine need, or outlives its judge."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quintet.sandbox import landlock, seccomp
from quintet.sandbox.program_runner import ENVIRONMENT, ProgramRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs run on Linux only")
is_root_with_landlock = os.geteuid() == 0 and landlock.kernel_version() >= 1
needs_own_users = pytest.mark.skipif(not is_root_with_landlock, reason="programs of root change their user by Landlock")
CLONE = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
stacks, count = libc.mmap(None, ctypes.c_size_t(64 << 20), 3, 0x22, -1, 0), 0
while count < 5000 and libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), stacks + 4096 * (count + 1), 0x10F00, None) > 0:
    count += 1
print(count, flush=True)
"""  # noqa: E501
TIMERS = """
import ctypes, struct
libc, timer, count = ctypes.CDLL(None), ctypes.c_int(), 0
signals = struct.pack("qii", 0, 34, 0) + bytes(48)
while count < 5000 and libc.timer_create(1, signals, ctypes.byref(timer)) == 0:
    count += 1
print(count)
"""
IN_FLIGHT = """
import socket
left, right = socket.socketpair()
count = 0
try:
    while count < 5000:
        sent = socket.socket(fileno=socket.socket.detach(socket.socketpair()[0]))
        socket.send_fds(left, [b"x"], [sent.fileno()])
        sent.close()
        count += 1
except OSError:
    print(count)
"""
OPEN_FILES = """
count = 0
try:
    files = []
    while count < 5000:
        files.append(open("/dev/null"))
        count += 1
except OSError:
    print(count)
"""
STANDARD_INPUT = """
import os
count = 0
try:
    while count < 5000:
        count += os.write(0, bytes(65536)) // 65536
except OSError:
    print(count)
"""


@pytest.fixture(scope="module")
def runner() -> Iterator[ProgramRunner]:
    runner = ProgramRunner()
    yield runner
    runner.close()


@pytest.mark.parametrize(
    ("program", "most"),
    [
        pytest.param(CLONE, seccomp.MAX_THREADS, marks=needs_own_users, id="threads"),
        pytest.param(TIMERS, seccomp.MAX_PENDING_SIGNALS, marks=needs_own_users, id="timers"),
        pytest.param(IN_FLIGHT, 5 * seccomp.MAX_OPEN_FILES, id="descriptors in messages"),
        pytest.param(OPEN_FILES, seccomp.MAX_OPEN_FILES, id="descriptors"),
        pytest.param(STANDARD_INPUT, seccomp.MAX_FILE_BYTES >> 16, id="standard input"),
    ],
)
def test_what_a_program_takes_is_bounded(runner: ProgramRunner, program: str, most: int) -> None:
    output = runner.run_script(program, "", 10.0, with_errors=True).output
    assert 0 < int(output) <= most


@pytest.mark.parametrize("name", ["AS", "CORE", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "SIGPENDING", "CPU"])
def test_a_program_cannot_raise_its_limits(runner: ProgramRunner, name: str) -> None:
    program = f"import resource as r\nr.setrlimit(r.RLIMIT_{name}, (r.RLIM_INFINITY,) * 2)"
    assert "not allowed to raise" in runner.run_script(program, "", 10.0, with_errors=True).output


def test_the_environment_of_a_program_has_six_variables_and_none_of_the_run(runner: ProgramRunner) -> None:
    names = set(runner.run_script("import os\nprint(*os.environ)", "", 10.0).output.split())
    assert names == {*ENVIRONMENT, "PYTHONUNBUFFERED"}


@needs_own_users
def test_each_program_of_root_is_a_user_of_its_own(runner: ProgramRunner) -> None:
    program = "import os\nprint(*{*os.getresuid(), *os.getresgid()}, *os.getgroups())"
    users = [int(runner.run_script(program, "", 10.0).output) for _ in range(2)]
    assert users[0] != users[1]
    assert min(users) > seccomp.FIRST_UNUSED_USER


@needs_own_users
def test_programs_stay_root_where_another_user_cannot_import_modules(tmp_path: Path) -> None:
    assert seccomp.unused_user_reads([sys.prefix])
    assert not seccomp.unused_user_reads([sys.prefix, str(tmp_path / "missing")])


def test_a_program_ends_with_the_server_that_has_started_it() -> None:
    """Also after it has changed its user, which makes the kernel forget that it shall. Without memory it ends first."""
    runner = ProgramRunner()
    server = runner._server._process
    thread = threading.Thread(target=_sleep, args=(runner,))
    thread.start()
    pid = _wait_for(lambda: next(filter(_is_confined, _children(server.pid)), 0))
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    server.kill()
    thread.join(20)
    _wait_for(lambda: not _is_confined(pid))
    runner.close()


def _sleep(runner: ProgramRunner) -> None:
    with suppress(OSError):
        runner.run_script("import time\ntime.sleep(60)", "", 60.0)


RESTRICTED = """
import json, sys
from quintet.sandbox.confinement import restrict_process
restrict_process(1 << 30)
import wave, quintet.errors
for path in sys.argv[1:]:
    try:
        open(path).close()
    except PermissionError:
        print("refused")
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(landlock.kernel_version() < 1, reason="the kernel has no Landlock")
def test_verifiers_and_templates_read_directories_of_python_only_and_end_first_without_memory(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    command = [sys.executable, "-c", RESTRICTED, "/etc/passwd", str(tmp_path / "secret"), "/proc/self/environ"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/usr")
    assert process.stdout is not None
    lines = list(iter(process.stdout.readline, "\n"))
    score = Path(f"/proc/{process.pid}/oom_score_adj").read_text()
    process.communicate(timeout=60)
    assert lines == ["refused\n"] * 3
    assert score == "1000\n"


def _children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, path.read_text().split())


def _is_confined(pid: int) -> bool:
    """Return whether a process lives and has a filter."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return "Seccomp:\t2" in status and "State:\tZ" not in status
    return False


def _wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value
