"""Tests of programs in the rows of ROLL's code domain: `case_type` and `test_cases`."""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.rewards.verifiers.code_tests import Assertion, Case

STAR_IMPORTS = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
PREAMBLE = "\n".join(
    [
        *(f"from {name} import *" for name in STAR_IMPORTS),
        *(f"import {name}" for name in STAR_IMPORTS[:-2]),
        "from typing import List, Dict, Any, Optional, Tuple",
        "from math import inf",
        "sys.setrecursionlimit(600_000)",
        "",
    ]
)
"""Names that every program has, in the order in which they hide each other."""
AS_MODULE = "__name__ = 'solution'\n"
"""Keeps `if __name__ == '__main__'` from running."""
TEXT_PREAMBLE = "import asyncio, json, re, time, traceback, uuid\nfrom typing import Any, Dict, List, Optional, Tuple\n"
INSIDE_QUOTES = re.compile(r"(?:[^'\\]|\\.|'(?!''))*", re.DOTALL)
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-5, 1e-8
"""Tolerances of lines that are single numbers."""


@dataclass(frozen=True, slots=True)
class Output:
    """Program that reads `stdin` and writes `expected`."""

    stdin: str
    expected: str

    def program(self, solution: str) -> str:
        return PREAMBLE + solution

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
    """Compare lines that are one number each within a tolerance, unless all are digits."""
    if all(a.isdigit() and b.isdigit() for a, b in zip(lines, expected, strict=False)):
        return False
    try:
        pairs = [(float(a), float(b)) for a, b in zip(lines, expected, strict=True)]
    except ValueError:
        return False
    return all(a == b or (math.isfinite(b) and abs(a - b) <= _tolerance(b)) for a, b in pairs)


def _tolerance(expected: float) -> float:
    return ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * abs(expected)


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """Function, or method of `Solution`, that returns `expected` for `arguments`."""

    name: str
    arguments: Sequence[Any]
    expected: Any
    stdin: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def program(self, solution: str) -> str:
        owner = "Solution()" if "class Solution" in solution else "None"
        lines = [
            "import json as _json",
            f"_arguments = _json.loads({json.dumps(list(self.arguments))!r})",
            *(["_arguments = [{int(key): value for key, value in _arguments[0].items()}]"] * self._has_number_keys()),
            f"_owner = {owner}",
            f"_function = globals()[{self.name!r}] if _owner is None else getattr(_owner, {self.name!r})",
            "try:",
            "    _result = _function(*_arguments)",
            "except TypeError:",
            f"    _result = getattr(type(_owner), {self.name!r})(*_arguments)",
            "_json.dumps(_result)",
            f"print({self.token!r} + repr(_result))",
        ]
        return "\n".join([PREAMBLE + AS_MODULE + solution, *lines, ""])

    def _has_number_keys(self) -> bool:
        """Return whether the first argument has numbers as keys, which JSON writes as text; it is then the only one."""
        return bool(self.arguments) and _number_keys(self.arguments[0]) is not None

    def accepts(self, output: str) -> bool:
        """Compare the result with the expected value, or with its only element; a tuple counts as a list."""
        _, token, text = output.rpartition(self.token)
        try:
            result = ast.literal_eval(text.strip()) if token else None
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return False
        return bool(token) and _equal_results(result, self.expected)


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
        ValueError: there are none, or they lack an entry.
    """
    tests = _parse(test_cases)
    name = "" if function in (None, "None") else str(function)
    kinds: Mapping[str, Callable[[], Iterator[Case]]] = {
        "assert": lambda: map(_assertion, tests),
        "pytest": lambda: map(_assertion, tests),
        "check_based": lambda: _checks(tests[0]),
    }
    make = kinds.get(case_type, lambda: (_input_output(test, name) for test in tests))
    try:
        return list(make())
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"test_cases of case_type {case_type!r} lack an entry: {error!r}") from error


def _parse(test_cases: Any) -> list[Any]:
    tests = json.loads(test_cases) if isinstance(test_cases, str) else test_cases
    if not isinstance(tests, list | tuple) or not tests:
        raise ValueError("the row has no tests: test_cases must be a list, or its JSON")
    return list(tests)


def text_tests(test_cases: Any, response: str) -> list[Case]:
    """Return tests of assertions about the text itself, which stands for `{response}` in them.

    Raises:
        ValueError: there are none.
    """
    tests = _parse(test_cases)
    statements = [str(test["assert_code"] if isinstance(test, Mapping) else test) for test in tests]
    return [Assertion(TEXT_PREAMBLE + code.replace("{response}", response)) for code in statements]


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
    arguments = [json.loads(line) for line in stdin.split("\n") if line.strip()]
    return FunctionCall(name, arguments, _expected(json.loads(expected)))


def _joined(lines: Any) -> str:
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
    return _Asserted("\n".join([code, *(f"{name}()" for name in names)]), preamble=PREAMBLE + AS_MODULE)


def _checks(test: Mapping[str, Any]) -> Iterator[Case]:
    """Yield one test per line of the body of `check`: a `check` with only this line."""
    lines = [line for line in test["assert_code"].split("\n") if line]
    call = f"check({test.get('entry_point', 'candidate')})"
    for line in lines[1:] or [""]:
        yield _Asserted("\n".join([lines[0], line, call]), preamble=test.get("import_prefix", "") + PREAMBLE)


@dataclass(frozen=True, slots=True)
class _Asserted(Assertion):
    """Assertions after a program that has the usual names."""

    preamble: str = PREAMBLE

    def program(self, solution: str) -> str:
        return Assertion.program(self, self.preamble + solution)
