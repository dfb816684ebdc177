"""Tests of a data row in the formats of common datasets."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quintet.rewards.verifiers.code_comparison import parse_json, same_output, same_result
from quintet.sandbox.program_runner import NoResultError, ProgramRunner

ASSERTS = ("asserts", "assert_case", "test_list", "assert_code")


class Case(Protocol):
    """Test of a program."""

    @property
    def names(self) -> Sequence[str]:
        """Functions or classes that the program must define."""

    def passes(self, runner: ProgramRunner, program: str, seconds: float) -> bool:
        """Return whether a program passes the test in time."""


@dataclass(frozen=True, slots=True)
class InputOutput:
    """Program that reads `stdin` and writes `expected`."""

    stdin: str
    expected: str
    names: Sequence[str] = ()

    def passes(self, runner: ProgramRunner, program: str, seconds: float) -> bool:
        run = runner.run_script(program, self.stdin, seconds)
        return run.status == 0 and self.accepts(run.output)

    def accepts(self, output: str) -> bool:
        """Return whether the output is correct."""
        return same_output(output, self.expected)


@dataclass(frozen=True, slots=True)
class Call:
    """Function, or method of `Solution`, that returns `expected` for `arguments`."""

    name: str
    arguments: Sequence[Any]
    expected: Any

    @property
    def names(self) -> Sequence[str]:
        return [self.name]

    def passes(self, runner: ProgramRunner, program: str, seconds: float) -> bool:
        try:
            return self.accepts(runner.call(program, self.name, self.arguments, seconds))
        except NoResultError:
            return False

    def accepts(self, result: Any) -> bool:
        """Return whether the result is correct."""
        return same_result(result, self.expected)


@dataclass(frozen=True, slots=True)
class Assertion:
    """Statements that use the program's names and raise if it is wrong."""

    statements: str
    names: Sequence[str] = ()
    preamble: str = ""
    """Imports of the program and the statements."""

    def passes(self, runner: ProgramRunner, program: str, seconds: float) -> bool:
        return runner.run_tests(program, self.statements, seconds, preamble=self.preamble, subjects=self.names)


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
            return parse_json(ground_truth)
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
        return [parse_json(line) for line in value.splitlines() if line.strip()]
    return list(value)


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
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
    entry_point = extra.get("entry_point")
    if has_check and not assertions and entry_point:
        assertions = [f"check({entry_point})"]
    names = [str(entry_point)] if entry_point else _called_names(statements)
    for assertion in assertions or ["pass"] * bool(before):
        yield Assertion("\n".join([*before, assertion]), names)


def _called_names(statements: Sequence[ast.stmt]) -> list[str]:
    """Return the names that assertions call and that neither the statements define nor Python has."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported = {
        alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return sorted(name for name in called - defined - imported - assigned if not hasattr(builtins, name))
