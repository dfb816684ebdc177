"""If these fail, commands that the tests start are not as a user's: forks of a warm process have some of its state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_processes
from warm_processes import Popen

SUPPORT = Path(warm_processes.__file__).parent
STATE = [sys.executable, str(SUPPORT / "process_state.py"), "an argument"]
PIPES: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "text": True,
}


def script(directory: Path, text: str) -> list[str]:
    path = directory / "program.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_a_program_starts_with_the_packages_imported_as_a_child_of_the_server(tmp_path: Path) -> None:
    program = script(tmp_path, "import os, sys; print('torch' in sys.modules, os.getppid())")
    parents = []
    for _ in range(2):
        process = Popen(program, **PIPES)
        is_imported, parent = process.communicate(timeout=60)[0].split()
        assert process.is_warm
        assert is_imported == "True"
        parents.append(int(parent))
    assert parents[0] == parents[1] != os.getpid()
    assert b"fork_server.py" in Path(f"/proc/{parents[0]}/cmdline").read_bytes()


def test_a_fork_has_the_state_of_a_started_interpreter(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary"), "ADDED": "1"}
    environment.pop("PWD", None)
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": environment,
        "capture_output": True,
        "text": True,
        "timeout": 120,
    }
    warm, other = (warm_processes.run(STATE, check=True, **options).stdout for _ in range(2))
    cold = subprocess.run(STATE, check=True, **options).stdout
    states = [json.loads(output) for output in (cold, warm, other)]
    for state in states:
        state["environment"].pop("TORCHINDUCTOR_CACHE_DIR", None)  # set while torch is imported, or where it is needed
    for state in states[1:]:
        state["atexit"] -= 1  # it ends the fork
    numbers = [state.pop("random") for state in states]
    assert states[1] == states[0]
    assert states[2] == states[0]
    assert all(len(set(values)) == 3 for values in zip(*numbers, strict=True))


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("raise ValueError('a message')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_a_fork_ends_with_the_status_of_its_program(tmp_path: Path, text: str, status: int) -> None:
    done = [runner(script(tmp_path, text), capture_output=True) for runner in (warm_processes.run, subprocess.run)]
    assert [process.returncode for process in done] == [status, status]
    last_lines = [process.stderr.splitlines()[-1:] for process in done]
    assert last_lines[0] == last_lines[1]


def test_a_fork_runs_code_of_the_command_line() -> None:
    code = "import sys; import __main__; value = 3; print(sys.argv, __main__.value, sys.path[0] == '')"
    command = [sys.executable, "-c", code, "an argument"]
    warm, cold = (runner(command, capture_output=True, text=True) for runner in (warm_processes.run, subprocess.run))
    assert (warm.stdout, warm.returncode) == (cold.stdout, cold.returncode)


def test_commands_with_other_options_start_an_interpreter() -> None:
    process = Popen([sys.executable, "-X", "dev", "-m", "this"], **PIPES)
    assert process.communicate(timeout=60)[0]
    assert not process.is_warm


def test_a_variable_that_packages_read_at_import_starts_an_interpreter(tmp_path: Path) -> None:
    program = script(tmp_path, "import sys; print('torch' in sys.modules)")
    process = Popen(program, env=os.environ | {"HF_HOME": str(tmp_path)}, **PIPES)
    assert process.communicate(timeout=60)[0] == "False\n"
    assert not process.is_warm


def test_a_dead_server_is_an_error_and_its_forks_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_processes, "_servers", {})
    program = script(tmp_path, "import os, time; print(os.getppid(), flush=True); time.sleep(600)")
    process = Popen(program, **PIPES)
    assert process.is_warm, "the parent that is killed next would be this process"
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert process.stdout.read() == ""  # the fork itself has ended, not only its status pipe
    process.communicate()
    with pytest.raises(RuntimeError, match="the fork server has ended"):
        Popen(program, **PIPES)
