"""Python programs, verified by tests in confined processes.

`docs/rewards.md` and `quintet.sandbox.seccomp` describe the restrictions and their limits.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, Final

from quintet.rewards import time_budget
from quintet.rewards.score import WRONG, Score
from quintet.rewards.verifiers.code_extraction import extract_program
from quintet.rewards.verifiers.code_tests import Case, parse_tests
from quintet.sandbox import seccomp

TEST_SECONDS: Final = 4.0
"""Wall-clock time limit of one test."""
MEMORY_BYTES: Final = 1 << 30
"""Address space limit of a program."""
MAX_TESTS: Final = 16
"""Only the first tests of a row are run."""
RESERVED_SHARE: Final = 0.15
"""Share of the response's time budget in which no test runs, so that the verification itself ends in time."""
CONFINEMENT_FAILED: Final = 97
"""Exit status of `quintet.sandbox.seccomp`."""
PYTHON = (sys.executable, "-I", "-B")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Run:
    """Exit status (negative: a signal; None: timeout) and output of a program."""

    status: int | None
    output: str


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Score the share of tests that the last program of the text passes, see `extract_program`.

    A program that hangs, dies or exceeds its limits fails the test; the verification itself does not fail.

    Raises:
        ValueError: the row has no tests.
        ConfinementError: programs cannot be confined on this machine.
    """
    cases = parse_tests(ground_truth, extra)[:MAX_TESTS]
    program = extract_program(text)
    passed = sum(run_tests(cases, program))
    score = passed / len(cases) if program.strip() else WRONG
    return Score(score, reward_components={"tests": float(len(cases)), "passed": float(passed)})


def run_tests(cases: Sequence[Case], program: str, seconds: float = TEST_SECONDS) -> Iterator[bool]:
    """Yield whether a program passes each test in at most `seconds`; once the response's time is over, it fails.

    Raises:
        ConfinementError: programs cannot be confined on this machine.
    """
    check_confinement()
    left = time_budget.seconds_left(math.inf)
    reserved = 0.0 if math.isinf(left) else left * RESERVED_SHARE
    for case in cases:
        yield _passes(case, program, min(time_budget.seconds_left(math.inf) - reserved, seconds))


def _passes(case: Case, program: str, seconds: float) -> bool:
    if seconds <= 0:
        return False
    result = run(case.program(program), case.stdin, seconds)
    return result.status == 0 and case.accepts(result.output)


def run(program: str, stdin: str, seconds: float, memory: int = MEMORY_BYTES, *, with_errors: bool = False) -> Run:
    """Run a Python program confined and with resource limits. It leaves nothing on disk, however this process ends.
    `with_errors` includes standard error in the output."""
    with _file(program) as source, _file(stdin) as stdin_file, tempfile.TemporaryFile() as output:
        command = [*_confinement_command(seconds, memory), *PYTHON, f"/dev/fd/{source.fileno()}"]
        process = subprocess.Popen(  # noqa: S603 - no shell, and confined before it runs
            command,
            stdin=stdin_file,
            stdout=output,
            stderr=subprocess.STDOUT if with_errors else subprocess.DEVNULL,
            pass_fds=(source.fileno(),),
            env=ENVIRONMENT,
            cwd="/",
        )
        status = _wait(process, seconds)
        output.seek(0)
        return Run(status, output.read(seccomp.MAX_FILE_BYTES).decode("utf-8", "replace"))


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()


def _confinement_command(seconds: float, memory: int) -> Sequence[str]:
    limits = (str(math.ceil(seconds) + 1), str(memory))
    return (sys.executable, "-I", "-S", "-B", seccomp.__file__, *limits)


def _file(text: str) -> IO[bytes]:
    """Return an unnamed file with this text, positioned at its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file


@cache
def check_confinement() -> None:
    """
    Raises:
        ConfinementError: programs cannot be confined on this machine.
    """
    if run("", "", 20.0).status == CONFINEMENT_FAILED:
        raise seccomp.ConfinementError(
            "programs of a model only run if the kernel can confine them: Linux (x86-64, AArch64) with seccomp"
        )
