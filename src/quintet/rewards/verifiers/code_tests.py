"""The tests of a row, in the forms that data sets give them, and how a program's words are compared."""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

from quintet.rewards.reading import number

__all__ = ["Case", "cases_of"]

ASSERTS = ("asserts", "assert_case", "test_list", "assert_code")


class Case(Protocol):
    """One test."""

    @property
    def stdin(self) -> str:
        """What the program reads."""
        ...

    def program(self, solution: str) -> str:
        """What is run."""
        ...

    def accepts(self, output: str) -> bool:
        """Whether what it wrote is right."""
        ...


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A program reads `stdin` and writes `expected`."""

    stdin: str
    expected: str

    def program(self, solution: str) -> str:
        return solution

    def accepts(self, output: str) -> bool:
        mine, theirs = _lines(output), _lines(self.expected)
        return mine == theirs or (len(mine) == len(theirs) and all(map(_same_words, mine, theirs)))


def _lines(text: str) -> list[str]:
    """Lines without what can't be seen at their ends, or at the end of all."""
    return [line.strip() for line in text.strip().splitlines()]


def _same_words(mine: str, theirs: str) -> bool:
    """Word by word, numbers by value within a millionth."""
    a, b = mine.split(), theirs.split()
    return len(a) == len(b) and all(x == y or _near(x, y) for x, y in zip(a, b, strict=True))


def _near(mine: str, theirs: str) -> bool:
    if "." not in mine + theirs:
        return False
    a, b = number(mine), number(theirs)
    return a is not None and b is not None and abs(a - b) * 1_000_000 <= max(abs(b), Fraction(1))


@dataclass(frozen=True, slots=True)
class Call:
    """A function, or a method of `Solution`, gives `expected` for `arguments`."""

    name: str
    arguments: Sequence[Any]
    expected: Any
    stdin: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def program(self, solution: str) -> str:
        called = json.dumps([self.name, list(self.arguments)])
        lines = [
            "import json as _json",
            f"_name, _arguments = _json.loads({called!r})",
            "_owner = Solution() if 'Solution' in globals() else None",
            "_function = getattr(_owner, _name) if hasattr(_owner, _name) else globals()[_name]",
            f"print({self.token!r} + _json.dumps(_function(*_arguments)))",
        ]
        return "\n".join([solution, *lines, ""])

    def accepts(self, output: str) -> bool:
        _, found, given = output.rpartition(self.token)
        try:
            value = json.loads(given)
        except ValueError:
            return False
        return bool(found) and bool(value == self.expected or [value] == self.expected)


@dataclass(frozen=True, slots=True)
class Assertion:
    """Statements that raise unless the program is right; they run behind it."""

    statements: str
    stdin: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def program(self, solution: str) -> str:
        # a program that ends itself early never comes to the last line
        return "\n".join([solution, self.statements, f"print({self.token!r})", ""])

    def accepts(self, output: str) -> bool:
        return output.rstrip().endswith(self.token)


def cases_of(truth: Any, extra: Mapping[str, Any]) -> list[Case]:
    """The tests that a row brings.

    `truth` (a mapping, a list, or JSON of either) has `inputs` and `outputs`, with `fn_name` where a function is
    called; or is a list of `{"input": …, "output": …}`; or of assertions, alone or under `asserts`, `assert_case` or
    `test_list`; or is text with assertions, as HumanEval's `check`, whose `entry_point` stands in the truth or `extra`.

    Raises:
        ValueError: it is none of these.
    """
    given = _loaded(truth)
    cases = list(_cases(given, extra))
    if not cases:
        raise ValueError("the row has no tests: inputs and outputs, or assertions")
    return cases


def _loaded(truth: Any) -> Any:
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(truth)
        except ValueError:
            return truth
    return truth


def _cases(given: Any, extra: Mapping[str, Any]) -> Iterator[Case]:
    if isinstance(given, str):
        yield from _asserted(given, extra)
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _cases(one, extra)
    elif isinstance(given, dict):
        yield from _of_mapping(given, {**extra, **given})


def _of_mapping(given: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[Case]:
    name = row.get("fn_name") or row.get("func_name")
    if "inputs" in given and "outputs" in given:
        for put, out in zip(given["inputs"], given["outputs"], strict=True):
            yield _case(put, out, name)
    elif "input" in given and "output" in given:
        yield _case(given["input"], given["output"], name)
    else:
        for key in (*ASSERTS, "test"):
            if given.get(key):
                yield from _cases(_loaded(given[key]), row)


def _case(put: Any, out: Any, name: str | None) -> Case:
    if name:
        return Call(name, _arguments(put), _value(out))
    return Dialogue(_text(put), _text(out))


def _arguments(put: Any) -> list[Any]:
    """Arguments as a list, or as text with JSON on each line."""
    return [json.loads(line) for line in put.splitlines() if line.strip()] if isinstance(put, str) else list(put)


def _value(out: Any) -> Any:
    if not isinstance(out, str):
        return out
    try:
        return json.loads(out)
    except ValueError:
        return out


def _text(words: Any) -> str:
    """What is read or written; some data sets give it line by line."""
    return "\n".join(map(str, words)) if isinstance(words, list | tuple) else str(words)


def _asserted(text: str, extra: Mapping[str, Any]) -> Iterator[Case]:
    """Each assertion at the top as a test of its own, after all that isn't one; `check(f)` where one is defined."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the row's tests are no Python: {error}") from error
    before = [ast.unparse(one) for one in statements if not isinstance(one, ast.Assert)]
    asserted = [ast.unparse(one) for one in statements if isinstance(one, ast.Assert)]
    checks = any(isinstance(one, ast.FunctionDef) and one.name == "check" for one in statements)
    if checks and not asserted and extra.get("entry_point"):
        asserted = [f"check({extra['entry_point']})"]
    for one in asserted or ["pass"] * bool(before):
        yield Assertion("\n".join([*before, one]))
