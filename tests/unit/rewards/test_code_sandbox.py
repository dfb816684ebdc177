"""If these fail, programs in a ROLL file's code domain get other rewards than ROLL's, or run unconfined."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from quintet.rewards import time_budget
from quintet.rewards.verifiers.code_sandbox import answer_part, extract_code, verify
from quintet.rewards.verifiers.code_sandbox_tests import text_literal
from quintet.rewards.verifiers.options import CodeSandboxOptions

GOLDEN = json.loads((Path(__file__).parents[2] / "parity" / "golden" / "roll_rules.json").read_text())["code"]
DOUBLE = "```python\nprint(2 * int(input()))\n```"
DOUBLES = [{"stdin": "3", "expected_stdout": "6"}, {"stdin": "4", "expected_stdout": "8"}]


def score(text: str, tests: object, case_type: str = "input", seconds: float = 20.0, **row: object) -> float:
    extra = {"case_type": case_type, "test_cases": tests, **row}
    return verify(text, "", extra, CodeSandboxOptions(test_seconds=seconds)).score


def test_a_program_must_pass_all_tests() -> None:
    assert score(DOUBLE, DOUBLES) == 1.0
    assert score(DOUBLE, json.dumps(DOUBLES)) == 1.0
    assert score(DOUBLE, [*DOUBLES, {"stdin": "1", "expected_stdout": "3"}]) == 0.0
    assert score("", DOUBLES) == 0.0


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["case_type"])
def test_scores_are_those_of_roll(case: dict) -> None:
    row = {name: case[name] for name in ("case_type", "test_cases", "test_case_function")}
    assert verify(case["text"], "", row, CodeSandboxOptions()).score == case["score"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```py\nx = 1\n```\n```python\ndef f(): pass\n```\n```python\ndef g(): pass\n```", "def f(): pass\n"),
        ("```\nx = 1\n```\n```c++\ny = 2\n```", "x = 1\n"),
        ("```python\nx = 1", ""),
        ("  x = 1 ", "x = 1"),
    ],
)
def test_the_first_block_with_a_function_is_the_program(text: str, code: str) -> None:
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>a</think> b <|im_end|><|endoftext|>", "b"),
        ("a<|begin_of_solution|> b <|end_of_solution|>", "b"),
        ("a \n", "a \n"),
    ],
)
def test_the_answer_is_what_follows_the_thinking(text: str, answer: str) -> None:
    assert answer_part(text) == answer


def test_a_truncated_block_of_empty_lines_is_read_at_once() -> None:
    started = time.monotonic()
    assert extract_code("```python" + "\n" * 100_000) == ""
    assert time.monotonic() - started < 1


def test_an_endless_program_costs_one_time_limit() -> None:
    started = time.monotonic()
    assert score("while True: pass", DOUBLES * 10, seconds=0.5) == 0.0
    assert time.monotonic() - started < 4


def test_tests_end_with_the_time_of_the_response() -> None:
    time_budget.start(0.5)
    try:
        assert score("while True: pass", DOUBLES) == 0.0
        assert time_budget.seconds_left(0.0) > 0.0
    finally:
        time_budget.start(None)


def test_a_program_that_exits_early_passes_no_assertion() -> None:
    tests = [{"assert_code": "assert twice(2) == 4"}]
    assert score("```python\ndef twice(n):\n    return 0\nraise SystemExit(0)\n```", tests, "assert") == 0.0


def test_programs_and_assertions_about_text_are_confined(tmp_path: Path) -> None:
    stolen = tmp_path / "file"
    write = f"open({str(stolen)!r}, 'w').write('x')"
    for case_type in ("assert", "pytest", "check_based", "text"):
        assert score(f"```python\ndef f(): pass\n{write}\n```", [{"assert_code": write}], case_type) == 0.0
    assert score(f"```python\n{write}\n```", [{"stdin": "", "expected_stdout": ""}]) == 0.0
    assert not stolen.exists()


def test_a_text_that_ends_its_quotes_is_wrong_and_does_not_run() -> None:
    assert score("a''') or True  # '''", [{"assert_code": "assert {response} == 'b'"}], "text") == 0.0
    assert text_literal("a''' + '''b") is None
    assert text_literal("a\\''' + \\'''b") == repr("a''' + '''b")
    assert text_literal(r"\x") is None
    assert text_literal(r"a\n\d") == repr("a\n\\d")


@pytest.mark.parametrize(
    ("tests", "case_type"),
    [
        (None, "input"),
        ([], "assert"),
        ("[]", "text"),
        ([{"stdin": "1"}], "input"),
        (["assert True"], "assert"),
        ([{"assert_code": ""}], "check_based"),
        ({"stdin": "1"}, "input"),
    ],
)
def test_a_row_without_usable_tests_is_a_fault_of_the_row(tests: object, case_type: str) -> None:
    with pytest.raises(ValueError, match=r"no tests|lack an entry"):
        score(DOUBLE, tests, case_type)
