"""If these fail, a model's programs are judged wrongly, or may do more than compute."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
from pathlib import Path

import pytest

from quintet.rewards import time_budget
from quintet.rewards.verifiers import code
from quintet.sandbox import seccomp
from quintet.sandbox.program_runner import ProgramRunner, Run, check_confinement, program_runner

HAS_LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1) > 0
DOUBLE = "Here:\n```python\nprint(2 * int(input()))\n```\n"
STDIN = {"inputs": ["3\n", "4\n"], "outputs": ["6\n", "8"]}


@pytest.mark.parametrize(
    ("text", "truth", "extra", "score"),
    [
        (DOUBLE, STDIN, {}, 1.0),
        (DOUBLE, json.dumps(STDIN), {}, 1.0),
        (DOUBLE, [{"input": "3", "output": "6"}, {"input": "4", "output": "9"}], {}, 0.5),
        ("```python\nprint(1)\n```\n```python\nprint(2 * int(input()))", STDIN, {}, 1.0),
        ("print(2 * int(input()))", STDIN, {}, 1.0),
        ("```python\nprint(2 * int(input()) + 1e-9)\n```", {"inputs": ["3"], "outputs": ["6.0"]}, {}, 1.0),
        ("def twice(n): return n * 2", {"inputs": [[3], [4]], "outputs": [6, [8]], "fn_name": "twice"}, {}, 1.0),
        ("class Solution:\n def f(self, n): return 2 * n", {"inputs": ["3"], "outputs": ["6"]}, {"fn_name": "f"}, 1.0),
        ("def twice(n): return n + 2", ["assert twice(2) == 4", "assert twice(3) == 6"], {}, 0.5),
        ("def twice(n): return n * 2", {"test_list": ["assert twice(2) == 4"]}, {}, 1.0),
        ("def twice(n): return n * 2", "x = 4\nassert twice(2) == x\nassert twice(3) == x", {}, 0.5),
        ("def twice(n): return n * 2", "def check(f):\n    assert f(2) == 4", {"entry_point": "twice"}, 1.0),
        ("def twice(n): return n", "def check(f):\n    assert f(2) == 4", {"entry_point": "twice"}, 0.0),
        ("import sys\nsys.exit(0)", ["assert twice(2) == 4"], {}, 0.0),
        ("import os\nos._exit(0)", ["assert twice(2) == 4"], {}, 0.0),
        ("def twice(n", ["assert twice(2) == 4"], {}, 0.0),
        ("", {"inputs": [""], "outputs": [""]}, {}, 0.0),
    ],
)  # fmt: skip
def test_the_share_of_tests_that_pass(text: str, truth: object, extra: dict, score: float) -> None:
    assert code.verify(text, truth, extra).score == score


@pytest.mark.parametrize(
    "truth", ["", None, {}, {"inputs": [], "outputs": []}, "def (", {"inputs": ["1"], "outputs": []}]
)
def test_a_row_without_tests_is_a_fault_of_the_row(truth: object) -> None:
    with pytest.raises(ValueError, match=r"tests|argument"):
        code.verify("print(1)", truth, {})


def outcome(program: str, seconds: float = 5.0) -> Run:
    return program_runner().run_script(program, "", seconds)


def test_an_endless_loop_is_ended() -> None:
    started = time.monotonic()
    assert outcome("while True: pass", 0.3).status is None
    assert time.monotonic() - started < 3


def test_endless_output_is_truncated() -> None:
    done = outcome("while True: print('x' * 100_000)")
    assert done.status not in (0, None)
    assert len(done.output) <= seccomp.MAX_FILE_BYTES


def test_memory_is_bounded() -> None:
    done = outcome("try:\n    bytearray(3 << 30)\nexcept MemoryError:\n    print('no')")
    assert done.output == "no\n"


def refused(program: str) -> bool:
    """Whether the kernel says no to a line."""
    done = outcome(
        f"try:\n    {program}\nexcept (OSError, ValueError) as error:\n    print('refused')\nelse:\n    print('done')"
    )
    assert done.status == 0
    assert done.output in ("refused\n", "done\n")
    return done.output == "refused\n"


def test_confinement_tests_distinguish_rejected_from_working_calls() -> None:
    assert not refused("import math")
    assert not refused("import threading; a = threading.Thread(target=len, args=('',)); a.start(); a.join()")
    assert not refused("import statistics, numpy; open('/dev/null').read()")


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "import os; os.setsid()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import os; open(f'/proc/{os.getppid()}/environ').read()",
        "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import ctypes; ctypes.CDLL(None).unshare(0x10000000) and (_ for _ in ()).throw(OSError)",
    ],
)
def test_programs_cannot_start_or_signal_processes(program: str) -> None:
    assert refused(program)


@pytest.mark.skipif(not HAS_LANDLOCK, reason="the kernel has no Landlock")
@pytest.mark.parametrize("path", ["/etc/passwd", __file__, "/proc/1/cmdline", "/proc/self/environ", "/tmp"])
def test_programs_read_python_only(path: str) -> None:
    assert refused(f"import os; os.listdir({path!r})" if path == "/tmp" else f"open({path!r}).read()")


@pytest.mark.parametrize(
    "program",
    [
        "import fcntl, os; fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
        "import fcntl; fcntl.fcntl(1, 10, 9)",
        "import fcntl; fcntl.flock(0, fcntl.LOCK_EX)",
        "import fcntl, struct; fcntl.ioctl(0, 0x5452, struct.pack('i', 1))",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "import os; os.sched_setaffinity(os.getppid(), {0})",
        "import os; os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))",
    ],
)
def test_descriptors_and_scheduling_reach_no_other_process(program: str) -> None:
    assert refused(program)


def test_system_v_memory_of_others_is_neither_read_nor_removed() -> None:
    libc = ctypes.CDLL(None)
    memory = libc.shmget(0, 4096, 0o1666)
    try:
        for call in (f"shmctl({memory}, 0, None)", f"shmat({memory}, None, 0) + 1"):
            refused = -1 + call.endswith("+ 1")
            assert outcome(f"import ctypes\nprint(ctypes.CDLL(None).{call})").output == f"{refused}\n"
        assert libc.shmat(memory, None, 0) != -1
    finally:
        assert libc.shmctl(memory, 0, None) == 0


def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert refused(f"import socket; socket.create_connection({address!r}, 1)")
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert not refused("import socket; socket.socketpair()")
    assert refused("import socket; socket.socketpair(type=socket.SOCK_DGRAM)")
    assert refused("import socket; socket.socketpair()[0].bind(b'\\0quintet')")
    assert refused("import socket; socket.getaddrinfo('localhost', 80); socket.socket()")


def test_no_files_are_written_changed_or_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    for program in (
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({str(kept)!r}, 'a')",
        f"import os; os.open({str(kept)!r}, os.O_RDONLY | os.O_TRUNC)",
        f"import os; os.unlink({str(kept)!r})",
        f"import os; os.rename({str(kept)!r}, {str(tmp_path / 'moved')!r})",
        f"import os; os.truncate({str(kept)!r}, 0)",
        f"import os; os.chmod({str(kept)!r}, 0o777)",
        f"import os; os.mkdir({str(tmp_path / 'made')!r})",
        f"import os; os.symlink('/etc', {str(tmp_path / 'link')!r})",
        "import os; os.memfd_create('x')",
    ):
        assert refused(program), program
    assert kept.read_text() == "as it was"
    assert os.listdir(tmp_path) == ["kept"]


def test_the_environment_isn_t_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "abc")
    runner = ProgramRunner()
    try:
        output = runner.run_script("import os; print(os.environ)", "", 5.0).output
    finally:
        runner.close()
    assert "PATH" in output
    assert "abc" not in output


def test_the_tests_of_a_response_share_its_time_budget() -> None:
    """A program that hangs is wrong; its judgement isn't ended with it."""
    time_budget.start(2.0)
    try:
        started = time.monotonic()
        judged = code.verify("```python\nwhile True: pass\n```", {"inputs": ["1"] * 5, "outputs": ["1"] * 5}, {})
    finally:
        time_budget.start(None)
    assert judged.score == 0.0
    assert time.monotonic() - started < 2.0


def test_no_program_runs_without_confinement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgramRunner, "run_script", lambda *_: Run(seccomp.CONFINEMENT_FAILED, ""))
    check_confinement.cache_clear()
    with pytest.raises(seccomp.ConfinementError, match="seccomp"):
        code.verify(DOUBLE, STDIN, {})
    check_confinement.cache_clear()
