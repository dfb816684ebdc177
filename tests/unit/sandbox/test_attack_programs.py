"""If these fail, a program that a model writes reaches something outside of its process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
USER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="programs run on Linux only")


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attack_programs

    yield attack_programs
    for name in ("attack_programs", "hostile_programs"):
        sys.modules.pop(name)


@needs_linux
def test_hostile_programs_have_no_effect_outside(attacks: ModuleType) -> None:
    """`python benchmarks/attack_programs.py` runs a thousand."""
    result = attacks.run(45, seed=5)
    assert result["effects"] == []
    assert result["programs"] == 45
    assert len(result["kinds"]) == 15


@needs_linux
@needs_root
def test_they_have_none_as_another_user_than_root_either() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "attack_programs.py", "--count", "20", "--seed", "6", "--user", str(USER)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'"user": {USER}' in done.stdout


READER = """
import glob, sys
readable = []
for pid in sys.argv[1:]:
    for name in ("environ", "mem", "maps"):
        try:
            readable.append(bool(open(f"/proc/{pid}/{name}", "rb").read(0 if name == "mem" else 1)) or name == "mem")
        except PermissionError:
            pass
print(len(readable))
"""
BOMB = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
stacks, count = libc.mmap(None, ctypes.c_size_t(64 << 20), 3, 0x22, -1, 0), 0
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
while count < 5000 and libc.clone(pause, stacks + 4096 * (count + 1), 0x10F00, None) > 0:
    count += 1
print(count, flush=True)
"""


def as_user(attacks: ModuleType) -> dict[str, Any]:
    return {"preexec_fn": partial(attacks.become, USER), "text": True, "cwd": "/"}


def children(pid: str) -> list[str]:
    return [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@contextmanager
def env_service(attacks: ModuleType, environment: dict[str, str]) -> Iterator[list[str]]:
    """Serve envs as another user; yield the numbers of the command, its fork server and its worker."""
    command = [sys.executable, "-m", "quintet", "serve-envs", "--env", "sokoban", "--port", "0", "--workers", "1"]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment}, **as_user(attacks))
    try:
        deadline, pids = time.monotonic() + 60, [str(service.pid)]
        while len(pids) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
            servers = children(str(service.pid))
            pids = [str(service.pid), *servers, *(worker for server in servers for worker in children(server))]
        assert service.stdout is not None
        assert "http" in service.stdout.readline()
        yield pids
    finally:
        service.terminate()
        service.communicate(timeout=30)


@needs_linux
@needs_root
@pytest.mark.parametrize("is_dumpable", [False, True])
def test_memory_and_environment_of_commands_and_their_workers_are_hidden(
    attacks: ModuleType, is_dumpable: bool
) -> None:
    """Also from programs of the same user, unless a debugger must see them."""
    with env_service(attacks, {"QUINTET_DUMPABLE": str(int(is_dumpable))}) as pids:
        assert len(pids) == 3
        command = [sys.executable, "-c", READER, *pids]
        reader = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60, **as_user(attacks))
    assert int(reader.stdout) == (3 * len(pids) if is_dumpable else 0)


@needs_linux
@needs_root
def test_threads_of_another_user_than_root_are_bounded_and_its_programs_end_first_without_memory(
    attacks: ModuleType,
) -> None:
    script = f"""if True:
    from quintet.sandbox.program_runner import program_runner
    print(program_runner().run_script({BOMB!r}, "", 9.0).output)
    print(open(f"/proc/{{program_runner()._server._process.pid}}/oom_score_adj").read())
    """
    threads = int(Path("/proc/loadavg").read_text().split("/")[1].split()[0])
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60, **as_user(attacks))
    # other tests may start threads at the same time
    count, score = map(int, done.stdout.split())
    assert 200 < count < threads + 1000
    assert score == 1000
