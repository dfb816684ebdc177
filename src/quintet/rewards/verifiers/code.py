"""Python programs, verified by tests in confined processes.

`docs/rewards.md` describes the rules, `quintet.sandbox.program_worker` the processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from quintet.rewards import time_budget
from quintet.rewards.score import WRONG, Score
from quintet.rewards.verifiers.code_extraction import extract_program
from quintet.rewards.verifiers.code_tests import Case, parse_tests
from quintet.sandbox.program_runner import program_runner

TEST_SECONDS: Final = 4.0
"""Wall-clock time limit of one test."""
MAX_TESTS: Final = 16
"""Only the first tests of a row are run."""
RESERVED_SHARE: Final = 0.15
"""Share of the response's time budget in which no test runs, so that the verification itself ends in time."""


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Score the share of tests that the last program of the text passes, see `extract_program`.

    A program that hangs, dies or exceeds its limits fails the test; the verification itself does not fail.

    Raises:
        ValueError: the row has no tests.
        ConfinementError: programs cannot be confined on this machine.
    """
    cases = parse_tests(ground_truth, extra)[:MAX_TESTS]
    program = extract_program(text, cases[0].names)
    passed = sum(run_tests(cases, program)) if program.strip() else 0
    score = passed / len(cases) if program.strip() else WRONG
    return Score(score, reward_components={"tests": float(len(cases)), "passed": float(passed)})


def run_tests(cases: Sequence[Case], program: str, seconds: float = TEST_SECONDS) -> Iterator[bool]:
    """Yield whether a program passes each test in at most `seconds`; once the response's time is over, it fails.

    Raises:
        ConfinementError: programs cannot be confined on this machine.
    """
    runner = program_runner()
    left = time_budget.seconds_left(math.inf)
    reserved = 0.0 if math.isinf(left) else left * RESERVED_SHARE
    for case in cases:
        case_seconds = min(time_budget.seconds_left(math.inf) - reserved, seconds)
        yield case_seconds > 0 and case.passes(runner, program, case_seconds)
