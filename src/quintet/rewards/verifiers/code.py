"""Python programs, judged by tests: each runs as a process under limits that can do little but compute.

What a program may not do and what isn't covered stands in `docs/rewards.md` and `quintet.processes.confinement`.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, Final

from quintet.processes import confinement
from quintet.rewards import budget
from quintet.rewards.score import WRONG, Score
from quintet.rewards.verifiers.code_tests import Case, cases_of

__all__ = ["Run", "judge", "program_of", "run"]

TEST_SECONDS: Final = 4.0
"""Wall time of one test."""
MEMORY_BYTES: Final = 1 << 30
"""Address space of a program."""
MOST_TESTS: Final = 16
"""The first so many of a row's tests count."""
KEPT: Final = 0.15
"""Share of the answer's time in which no test runs any more, so that it isn't ended itself."""
UNCONFINED: Final = 97
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
PYTHON = (sys.executable, "-I", "-B")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Run:
    """How a program ended: its status (negative: a signal; None: its time was over) and what it wrote."""

    status: int | None
    output: str


def judge(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    """The share of tests that the last code block of the text passes; without a block the whole text is the program.

    A program that hangs, dies or takes too much fails the test it was at; it is no failure of the judgement.

    Raises:
        ValueError: the row has no tests that can be run.
        Unconfinable: programs can't be confined here.
    """
    cases = cases_of(truth, extra)[:MOST_TESTS]
    _check_confined()
    program, left = program_of(text), budget.seconds_left(math.inf)
    kept = 0.0 if math.isinf(left) else left * KEPT
    passed = sum(_passes(case, program, budget.seconds_left(math.inf) - kept) for case in cases)
    score = passed / len(cases) if program.strip() else WRONG
    return Score(score, parts={"tests": float(len(cases)), "passed": float(passed)})


def program_of(text: str) -> str:
    """The last fenced block, closed or cut off; the whole text where there is none."""
    blocks: list[str] = FENCE.findall(text)
    return blocks[-1] if blocks else text


def _passes(case: Case, program: str, seconds: float) -> bool:
    if seconds <= 0:
        return False
    done = run(case.program(program), case.stdin, min(seconds, TEST_SECONDS))
    return done.status == 0 and case.accepts(done.output)


def run(program: str, stdin: str, seconds: float, memory: int = MEMORY_BYTES) -> Run:
    """Run a Python program confined and under limits. Nothing of it stays on disk, whatever ends this process."""
    with _file(program) as source, _file(stdin) as words, tempfile.TemporaryFile() as output:
        command = [*_confined(seconds, memory), *PYTHON, f"/dev/fd/{source.fileno()}"]
        process = subprocess.Popen(  # noqa: S603 - no shell, and confined before it runs
            command,
            stdin=words,
            stdout=output,
            stderr=subprocess.DEVNULL,
            pass_fds=(source.fileno(),),
            env=ENVIRONMENT,
            cwd="/",
        )
        status = _ended(process, seconds)
        output.seek(0)
        return Run(status, output.read(confinement.FILE_BYTES).decode("utf-8", "replace"))


def _ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()


def _confined(seconds: float, memory: int) -> Sequence[str]:
    limits = (str(math.ceil(seconds) + 1), str(memory))
    return (sys.executable, "-I", "-S", "-B", confinement.__file__, *limits)


def _file(text: str) -> IO[bytes]:
    """A nameless file with that text, to be read from its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file


@cache
def _check_confined() -> None:
    done = run("", "", 20.0)
    if done.status == UNCONFINED:
        raise confinement.Unconfinable(
            "programs of a model run only where the kernel can confine them: Linux (x86-64, AArch64) with seccomp"
        )
