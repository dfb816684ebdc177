"""Python programs that must pass all tests of a row, scored as by ROLL's `CodeSandboxRewardWorker` with `use_local`.

Unlike in ROLL, programs and assertions only run in confined processes, see `quintet.rewards.verifiers.code`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quintet.rewards.score import WRONG, Score, binary_score
from quintet.rewards.verifiers.code import run_tests
from quintet.rewards.verifiers.code_extraction import extract_program, python_blocks
from quintet.rewards.verifiers.code_sandbox_tests import parse_test_cases, text_literal, text_tests
from quintet.rewards.verifiers.options import CodeSandboxOptions

BLOCK = re.compile(r"```[\w+#.-]*+\s*+(.*?)```", re.DOTALL)
END_MARK = re.compile(r"(?:<\|\w+\|>|</s>|<pad>|<eos>|<end_of_turn>)\Z")
SOLUTION_START = "<|begin_of_solution|>"
THINKING_END = "</think>"


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any], options: CodeSandboxOptions) -> Score:
    """Score 1 if all tests of the row's `test_cases` pass. They are of its `case_type`: `input` (programs, or calls of
    `test_case_function`), `assert`, `pytest`, `check_based`, or `text`, assertions about the response.

    Raises:
        ValueError: the row has no tests, or they lack an entry.
        ConfinementError: programs cannot be confined on this machine.
    """
    answer, case_type = answer_part(text), str(extra.get("case_type", "input"))
    if case_type == "text":
        literal = text_literal(answer) if text else None
        cases = text_tests(extra.get("test_cases"), literal or "''")
        return binary_score(literal is not None and all(run_tests(cases, "", options.test_seconds)), None)
    cases = parse_test_cases(case_type, extra.get("test_cases"), extra.get("test_case_function"))
    program = extract_code(answer)
    if not program.strip():
        return Score(WRONG)
    return binary_score(all(run_tests(cases, program, options.test_seconds)), None)


def answer_part(text: str) -> str:
    """Return the text after the last `<|begin_of_solution|>` and the last `</think>`, without special tokens at its
    end."""
    while (mark_at_end := END_MARK.search(text)) is not None:
        text = text[: mark_at_end.start()]
    for mark in (SOLUTION_START, THINKING_END):
        if mark in text:
            text = text.rpartition(mark)[2].strip()
    return text


def extract_code(text: str) -> str:
    """Return the first closed Python block with a function, or else the first; without any fence the text.

    Blocks tagged as Python come first, then untagged ones that are Python, then those that ROLL sees.
    """
    blocks = python_blocks(text) or BLOCK.findall(text)
    if not blocks and "```" not in text:
        return extract_program(text).strip()
    return next((block for block in blocks if "def " in block), blocks[0] if blocks else "")
