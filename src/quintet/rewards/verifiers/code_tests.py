"""Tests of a data row in the formats of common datasets, and the comparison of program output."""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

from quintet.rewards.numbers import parse_number

ASSERTS = ("asserts", "assert_case", "test_list", "assert_code")


class Case(Protocol):
    """Test of a program."""

    @property
    def stdin(self) -> str:
        """Standard input of the program."""

    def program(self, solution: str) -> str:
        """Return the program to run for a solution."""

    def accepts(self, output: str) -> bool:
        """Return whether the output is correct."""


@dataclass(frozen=True, slots=True)
class InputOutput:
    """Program that reads `stdin` and writes `expected`."""

    stdin: str
    expected: str

    def program(self, solution: str) -> str:
        return solution

    def accepts(self, output: str) -> bool:
        lines, expected = _lines(output), _lines(self.expected)
        return lines == expected or (len(lines) == len(expected) and all(map(_same_words, lines, expected)))


def _lines(text: str) -> list[str]:
    """Split into lines without surrounding whitespace and trailing empty lines."""
    return [line.strip() for line in text.strip().splitlines()]


def _same_words(line: str, expected: str) -> bool:
    """Compare word by word, decimal numbers within a relative difference of 1e-6."""
    a, b = line.split(), expected.split()
    return len(a) == len(b) and all(x == y or _is_close(x, y) for x, y in zip(a, b, strict=True))


def _is_close(word: str, expected: str) -> bool:
    if "." not in word + expected:
        return False
    a, b = parse_number(word), parse_number(expected)
    return a is not None and b is not None and abs(a - b) * 1_000_000 <= max(abs(b), Fraction(1))


@dataclass(frozen=True, slots=True)
class Call:
    """Function, or method of `Solution`, that returns `expected` for `arguments`."""

    name: str
    arguments: Sequence[Any]
    expected: Any
    stdin: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def program(self, solution: str) -> str:
        call = json.dumps([self.name, list(self.arguments)])
        lines = [
            "import json as _json",
            f"_name, _arguments = _json.loads({call!r})",
            "_owner = Solution() if 'Solution' in globals() else None",
            "_function = getattr(_owner, _name) if hasattr(_owner, _name) else globals()[_name]",
            f"print({self.token!r} + _json.dumps(_function(*_arguments)))",
        ]
        return "\n".join([solution, *lines, ""])

    def accepts(self, output: str) -> bool:
        _, token, result = output.rpartition(self.token)
        try:
            value = json.loads(result)
        except ValueError:
            return False
        return bool(token) and bool(value == self.expected or [value] == self.expected)


@dataclass(frozen=True, slots=True)
class Assertion:
    """Statements after the program that raise if it is wrong."""

    statements: str
    stdin: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def program(self, solution: str) -> str:
        # a program that exits early does not reach the last line
        return "\n".join([solution, self.statements, f"print({self.token!r})", ""])

    def accepts(self, output: str) -> bool:
        return output.rstrip().endswith(self.token)


def parse_tests(ground_truth: Any, extra: Mapping[str, Any]) -> list[Case]:
    """Return the tests of a row.

    `ground_truth` (a mapping, a list, or JSON of either) has `inputs` and `outputs`, with `fn_name` for a function
    call; or is a list of `{"input": …, "output": …}`; or of assertions, directly or under `asserts`, `assert_case` or
    `test_list`; or is text with assertions, like HumanEval's `check` with its `entry_point` in the ground truth or
    `extra`.

    Raises:
        ValueError: the ground truth has another form.
    """
    cases = list(_cases(_parse_json(ground_truth), extra))
    if not cases:
        raise ValueError("the row has no tests: inputs and outputs, or assertions")
    return cases


def _parse_json(ground_truth: Any) -> Any:
    if isinstance(ground_truth, str) and ground_truth.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(ground_truth)
        except ValueError:
            return ground_truth
    return ground_truth


def _cases(tests: Any, extra: Mapping[str, Any]) -> Iterator[Case]:
    if isinstance(tests, str):
        yield from _assertions(tests, extra)
    elif isinstance(tests, list | tuple):
        for test in tests:
            yield from _cases(test, extra)
    elif isinstance(tests, dict):
        yield from _of_mapping(tests, {**extra, **tests})


def _of_mapping(tests: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[Case]:
    name = row.get("fn_name") or row.get("func_name")
    if "inputs" in tests and "outputs" in tests:
        for stdin, stdout in zip(tests["inputs"], tests["outputs"], strict=True):
            yield _case(stdin, stdout, name)
    elif "input" in tests and "output" in tests:
        yield _case(tests["input"], tests["output"], name)
    else:
        for key in (*ASSERTS, "test"):
            if tests.get(key):
                yield from _cases(_parse_json(tests[key]), row)


def _case(stdin: Any, stdout: Any, name: str | None) -> Case:
    if name:
        return Call(name, _arguments(stdin), _value(stdout))
    return InputOutput(_text(stdin), _text(stdout))


def _arguments(value: Any) -> list[Any]:
    """Parse arguments: a list, or text with JSON on each line."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    return list(value)


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _text(value: Any) -> str:
    """Return input or output as one text; some datasets have a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _assertions(text: str, extra: Mapping[str, Any]) -> Iterator[Case]:
    """Yield a test per top-level assertion, after all other statements; or `check(f)` if `check` is defined."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the tests of the row are not Python: {error}") from error
    before = [ast.unparse(node) for node in statements if not isinstance(node, ast.Assert)]
    assertions = [ast.unparse(node) for node in statements if isinstance(node, ast.Assert)]
    has_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in statements)
    if has_check and not assertions and extra.get("entry_point"):
        assertions = [f"check({extra['entry_point']})"]
    for assertion in assertions or ["pass"] * bool(before):
        yield Assertion("\n".join([*before, assertion]))
