"""Tests of programs in the rows of ROLL's code domain: `case_type` and `test_cases`."""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quintet.rewards.score import GroundTruthError
from quintet.rewards.verifiers.code_comparison import INTEGER, parse_literal
from quintet.rewards.verifiers.code_extraction import parse_python
from quintet.rewards.verifiers.code_tests import Assertion, Call, Case, InputOutput

TEXT_PREAMBLE = "import asyncio, json, re, time, traceback, uuid\nfrom typing import Any, Dict, List, Optional, Tuple\n"
INSIDE_QUOTES = re.compile(r"(?:[^'\\]|\\.|'(?!''))*", re.DOTALL)
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-5, 1e-8
"""Tolerances of lines that are single numbers."""


class Output(InputOutput):
    """Program that reads `stdin` and writes `expected`."""

    __slots__ = ()

    def accepts(self, output: str) -> bool:
        """Compare the stripped text, with and without spaces around lines and empty lines, or lines as numbers."""
        lines, expected = output.splitlines(), self.expected.strip()
        expected_lines = [line.strip() for line in self.expected.split("\n") if line]
        filled = [line for line in lines if line]
        return (
            "\n".join(lines).strip() == expected
            or "\n".join(line.strip() for line in lines).strip() == expected
            or expected_lines in (lines, filled)
            or _same_numbers(filled, expected_lines)
        )


def _same_numbers(lines: Sequence[str], expected: Sequence[str]) -> bool:
    """Compare lines that are one number each within a tolerance, integers exactly.

    ROLL applies the tolerance to integers, too, unless all lines are digits.
    """
    return len(lines) == len(expected) and all(map(_same_number, lines, expected))


def _same_number(line: str, expected: str) -> bool:
    if INTEGER.fullmatch(line.strip()) and INTEGER.fullmatch(expected):
        return int(line) == int(expected)
    try:
        a, b = float(line), float(expected)
    except ValueError:
        return False
    return a == b or (math.isfinite(b) and abs(a - b) <= ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * abs(b))


class FunctionCall(Call):
    """Function, or method of `Solution`, that returns `expected` for `arguments`."""

    __slots__ = ()

    def accepts(self, result: Any) -> bool:
        """Compare the result with the expected value, or with its only element; a tuple counts as a list."""
        return _equal_results(result, self.expected)


def _equal_results(result: Any, expected: Any) -> bool:
    result = list(result) if isinstance(result, tuple) else result
    if result == expected:
        return True
    return isinstance(expected, list) and bool(expected) and (result == expected[0] or _as_lists(result) == expected[0])


def _as_lists(result: Any) -> Any:
    """Return a list that starts with a tuple as a list of lists."""
    if isinstance(result, list) and result and isinstance(result[0], tuple):
        return [list(item) if isinstance(item, tuple) else item for item in result]
    return result


def parse_test_cases(case_type: str, test_cases: Any, function: str | None) -> list[Case]:
    """Return the tests of a row: input and output, or a call of `function`; assertions; or `check` of a candidate.

    Raises:
        GroundTruthError: there are none, or they lack an entry.
    """
    tests = _parse(test_cases)
    name = "" if function in (None, "None") else str(function)
    kinds: Mapping[str, Callable[[], Iterator[Case]]] = {
        "input": lambda: (_input_output(test, name) for test in tests),
        "assert": lambda: map(_assertion, tests),
        "pytest": lambda: map(_assertion, tests),
        "check_based": lambda: _checks(tests[0]),
    }
    if case_type not in kinds:
        raise GroundTruthError(f"case_type {case_type!r} is unknown; known: {', '.join(kinds)}, text")
    try:
        return list(kinds[case_type]())
    except (LookupError, TypeError, AttributeError) as error:
        raise GroundTruthError(f"test_cases of case_type {case_type!r} lack an entry: {error!r}") from error


def _parse(test_cases: Any) -> list[Any]:
    tests = parse_literal(test_cases) if isinstance(test_cases, str) else test_cases
    if not isinstance(tests, list | tuple) or not tests:
        raise GroundTruthError("the row has no tests: test_cases must be a list, or its JSON")
    return list(tests)


def text_tests(test_cases: Any, response: str) -> list[Case]:
    """Return tests of assertions about the text itself, which stands for `{response}` in them.

    Raises:
        GroundTruthError: there are none.
    """
    tests = _parse(test_cases)
    statements = [str(test["assert_code"] if isinstance(test, Mapping) else test) for test in tests]
    return [Assertion(TEXT_PREAMBLE + _checked(code.replace("{response}", response))) for code in statements]


def text_literal(text: str) -> str | None:
    r"""Return Python source of the text that `'''text'''` is, with escapes such as `\n` read as Python reads them.

    None if it is no literal, or if the text ends it and the rest would run as code.
    """
    quote = "'''"
    inside = INSIDE_QUOTES.match(text + quote)
    if inside is None or inside.end() != len(text):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # unknown escapes
            return repr(ast.literal_eval(quote + text + quote))
    except (ValueError, SyntaxError, MemoryError):
        return None


def _input_output(test: Mapping[str, Any], name: str) -> Case:
    stdin, expected = test["stdin"], test["expected_stdout"]
    if not name:
        return Output(_joined(stdin), _joined(expected))
    arguments = [parse_literal(line) for line in stdin.split("\n") if line.strip()]
    if arguments and (mapping := _number_keys(arguments[0])) is not None:
        # JSON has no keys that are numbers; such a mapping is the only argument
        arguments = [mapping]
    return FunctionCall(name, arguments, _expected(parse_literal(expected)))


def _joined(lines: Any) -> str:
    if lines is None or isinstance(lines, Mapping):
        raise TypeError(f"{lines!r:.80} is no text")
    return "\n".join(lines) if isinstance(lines, list | tuple) else str(lines)


def _expected(value: Any) -> Any:
    mapping = _number_keys(value[0] if isinstance(value, list) and value else value)
    return value if mapping is None else [mapping]


def _number_keys(value: Any) -> dict[int, Any] | None:
    if not isinstance(value, dict):
        return None
    try:
        return {int(key): item for key, item in value.items()}
    except ValueError:
        return None


def _assertion(test: Mapping[str, Any]) -> Case:
    """Run assertions after the program, and the test functions that they define."""
    code = test["assert_code"]
    names = re.findall(r"^[ \t]*def (test_[^(\n]*)", code, re.MULTILINE)
    return Assertion(_checked("\n".join([code, *(f"{name}()" for name in names)])))


def _checked(statements: str) -> str:
    if parse_python(statements) is None:
        raise GroundTruthError(f"the tests of the row are not Python: {statements!r:.80}")
    return statements


def _checks(test: Mapping[str, Any]) -> Iterator[Case]:
    """Yield one test per line of the body of `check`: a `check` with only this line."""
    lines = [line for line in test["assert_code"].split("\n") if line]
    name = test.get("entry_point", "candidate")
    preamble = test.get("import_prefix") or ""
    parts = ["\n".join([lines[0], line, f"check({name})"]) for line in lines[1:] or [""]]
    if any(parse_python(part) is None for part in parts):
        # statements of several lines, with which ROLL rejects all programs
        parts = [_checked("\n".join([*lines, f"check({name})"]))]
    yield from (Assertion(part, [name], preamble, name) for part in parts)
