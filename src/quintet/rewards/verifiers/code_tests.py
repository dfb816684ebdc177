"""Tests of a data row in the formats of common datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quintet.rewards.score import GroundTruthError
from quintet.rewards.verifiers.code_assertions import assertion_tests
from quintet.rewards.verifiers.code_comparison import parse_literal, same_output, same_result
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
    entry_point: str | None = None
    """Name that is the program's even if Python has it, too."""

    def passes(self, runner: ProgramRunner, program: str, seconds: float) -> bool:
        subjects = [self.entry_point] if self.entry_point else []
        return runner.run_tests(program, self.statements, seconds, preamble=self.preamble, subjects=subjects)


def assertion_cases(text: str, row: Mapping[str, Any]) -> Iterator[Assertion]:
    """Yield the tests of a text; the row may name `entry_point`, `test_setup_code` and `test_imports`.

    Raises:
        GroundTruthError: the text has no tests.
    """
    imports = row.get("test_imports") or ()
    preamble = "\n".join([str(row.get("test_setup_code") or ""), *map(str, imports)])
    entry_point = row.get("entry_point")
    statements, names = assertion_tests(text, entry_point)
    yield from (Assertion(each, names, preamble, entry_point) for each in statements)


def parse_tests(ground_truth: Any, extra: Mapping[str, Any]) -> list[Case]:
    """Return the tests of a row.

    `ground_truth` (a mapping, a list, or JSON of either) has `inputs` and `outputs`, with `fn_name` for a function
    call; or is a list of `{"input": …, "output": …}`; or of assertions, directly or under `asserts`, `assert_case` or
    `test_list`; or is text with assertions, functions `test_…`, classes of `unittest`, or HumanEval's `check` with its
    `entry_point` in the ground truth or `extra`.

    Raises:
        GroundTruthError: the ground truth has another form.
    """
    cases = list(_cases(_parse_literal(ground_truth), extra))
    if not cases:
        raise GroundTruthError("the row has no tests: inputs and outputs, or assertions")
    return cases


def _parse_literal(ground_truth: Any) -> Any:
    """Parse text with JSON, or the Python literal, of a list or mapping."""
    is_literal = isinstance(ground_truth, str) and ground_truth.lstrip()[:1] in ("{", "[")
    return parse_literal(ground_truth) if is_literal else ground_truth


def _cases(tests: Any, extra: Mapping[str, Any]) -> Iterator[Case]:
    if isinstance(tests, str):
        yield from assertion_cases(tests, extra)
    elif isinstance(tests, list | tuple):
        for test in tests:
            yield from _cases(test, extra)
    elif isinstance(tests, Mapping):
        yield from _of_mapping(tests, {**extra, **tests})
    elif tests is not None:
        raise GroundTruthError(f"{tests!r:.80} is no test of a program: write a mapping or assertions")


def _of_mapping(tests: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[Case]:
    name = _function_name(row)
    if "inputs" in tests and "outputs" in tests:
        inputs, outputs = (_list(tests[key], key) for key in ("inputs", "outputs"))
        if len(inputs) != len(outputs):
            raise GroundTruthError(f"the tests have {len(inputs)} inputs, but {len(outputs)} outputs")
        for stdin, stdout in zip(inputs, outputs, strict=True):
            yield _case(stdin, stdout, name)
    elif "input" in tests and "output" in tests:
        yield _case(tests["input"], tests["output"], name)
    else:
        for key in (*ASSERTS, "test"):
            if tests.get(key):
                yield from _cases(_parse_literal(tests[key]), row)


def _function_name(row: Mapping[str, Any]) -> Any:
    """Return the function that a row calls, which LiveCodeBench has in JSON of `metadata`; None for a program.

    Raises:
        ValueError: a test is `functional`, but the row does not name the function.
    """
    metadata = _parse_literal(row.get("metadata"))
    sources = [row, metadata] if isinstance(metadata, Mapping) else [row]
    name = next((each[key] for each in sources for key in ("fn_name", "func_name") if each.get(key)), None)
    if name is None and row.get("testtype") == "functional":
        raise ValueError("the test is functional, but the row has no func_name")
    return None if row.get("testtype") == "stdin" else name


def _list(value: Any, key: str) -> Sequence[Any]:
    value = _parse_literal(value)
    if not isinstance(value, list | tuple):
        raise GroundTruthError(f"{key} of the tests is no list, but {value!r:.80}")
    return value


def _case(stdin: Any, stdout: Any, name: Any) -> Case:
    if name:
        return Call(str(name), _arguments(stdin), _value(stdout))
    return InputOutput(_text(stdin), _text(stdout))


def _arguments(value: Any) -> list[Any]:
    """Parse arguments: a list, or text with JSON or a Python literal on each line."""
    if isinstance(value, str):
        return [parse_literal(line) for line in value.splitlines() if line.strip()]
    if not isinstance(value, list | tuple):
        raise GroundTruthError(f"the arguments {value!r:.80} of a call are no list")
    return list(value)


def _value(value: Any) -> Any:
    try:
        return parse_literal(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _text(value: Any) -> str:
    """Return input or output as one text; some datasets have a list of lines."""
    if isinstance(value, list | tuple):
        return "\n".join(map(_text, value))
    if not isinstance(value, str | int | float):
        raise GroundTruthError(f"input or output {value!r:.80} of a test is no text")
    return str(value)
