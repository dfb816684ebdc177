"""Tests that are Python: assertions, functions, classes of `unittest`, and HumanEval's `check`."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from typing import Any, Final

from quintet.rewards.score import GroundTruthError
from quintet.rewards.verifiers.code_extraction import parse_python

UNITTEST: Final = """
import unittest as _unittest
_result = _unittest.TestResult()
_unittest.defaultTestLoader.loadTestsFromTestCase({name}).run(_result)
assert _result.wasSuccessful() and _result.testsRun
"""
_DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def assertion_tests(text: str, entry_point: Any) -> tuple[list[str], list[str]]:
    """Return the statements of each test of a text, and the names that the program must define.

    A test is a top-level assertion after the statements before it, a function `test_…` without parameters, a class of
    `unittest`, a call of `check` with the entry point, or the whole text if it only calls something.

    Raises:
        GroundTruthError: the text is not Python, or has no tests.
    """
    module = parse_python(text)
    if module is None:
        raise GroundTruthError(f"the tests of the row are not Python: {text!r:.80}")
    statements = [*_without_guards(module.body)]
    tests = [*_assertions(statements), *_functions(statements, entry_point)]
    if not tests and not _acts(statements):
        raise GroundTruthError(f"the row has no tests: {text!r:.80} asserts nothing")
    whole = "\n".join(map(ast.unparse, statements))
    return tests or [whole], [str(entry_point)] if entry_point else _called_names(statements)


def _without_guards(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, also those below `if __name__ == "__main__"`, without calls of test runners."""
    for node in statements:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            yield from _without_guards(node.body)
        elif not (isinstance(node, ast.Expr) and ast.unparse(node).startswith(("unittest.main(", "pytest.main("))):
            yield node


def _acts(statements: Sequence[ast.stmt]) -> bool:
    """Return whether there are statements that call something, beside definitions."""
    others = [node for node in statements if not isinstance(node, _DEFINITIONS)]
    return any(isinstance(part, ast.Call) for node in others for part in ast.walk(node))


def _assertions(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield each assertion after the statements before it; the last one with those behind it, too.

    If some of them have an effect, earlier assertions are evaluated, too, whatever they give.
    """
    last = max((n for n, node in enumerate(statements) if isinstance(node, ast.Assert)), default=-1)
    has_state = any(not isinstance(node, (ast.Assert, *_DEFINITIONS)) for node in statements)
    before = [ast.unparse(node) for node in statements if isinstance(node, _DEFINITIONS)]
    for number, node in enumerate(statements):
        if number == last:
            yield "\n".join([*before, *map(ast.unparse, statements[number:])])
        elif isinstance(node, ast.Assert):
            yield "\n".join([*before, ast.unparse(node)])
            before += [f"try:\n    {ast.unparse(node.test)}\nexcept Exception:\n    pass"] * has_state
        else:
            before.append(ast.unparse(node))


def _functions(statements: Sequence[ast.stmt], entry_point: Any) -> Iterator[str]:
    """Yield calls of functions and classes that are tests, after all statements but assertions."""
    before = "\n".join(ast.unparse(node) for node in statements if not isinstance(node, ast.Assert))
    called = {part.func.id for part in _calls(statements) if isinstance(part.func, ast.Name)}
    for node in statements:
        if isinstance(node, ast.ClassDef):
            yield from (f"{before}\n{call}" for call in _class_tests(node))
        elif isinstance(node, ast.FunctionDef) and node.name not in called:
            if node.name == "check" and not any(isinstance(each, ast.Assert) for each in statements):
                yield f"{before}\ncheck({_required(entry_point)})"
            elif node.name.startswith("test"):
                yield f"{before}\n{_call(node)}"


def _class_tests(node: ast.ClassDef) -> Iterator[str]:
    """Yield the tests of a class of `unittest`, or of one that pytest finds by its name."""
    if any("TestCase" in ast.unparse(base) for base in node.bases):
        yield UNITTEST.format(name=node.name)
    elif node.name.startswith("Test"):
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test")]
        yield from (f"{node.name}().{_call(method, parameters=1)}" for method in methods)


def _call(function: ast.FunctionDef, parameters: int = 0) -> str:
    if len(function.args.args) > parameters:
        raise GroundTruthError(f"{function.name} of the tests has parameters: fixtures are not available")
    return f"{function.name}()"


def _required(entry_point: Any) -> Any:
    if not entry_point:
        raise GroundTruthError("the tests define check, but the row has no entry_point")
    return entry_point


def _calls(statements: Sequence[ast.stmt]) -> list[ast.Call]:
    return [part for node in statements for part in ast.walk(node) if isinstance(part, ast.Call)]


def _called_names(statements: Sequence[ast.stmt]) -> list[str]:
    """Return the names that tests call and that neither they nor Python define."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    called = {node.func.id for node in _calls(statements) if isinstance(node.func, ast.Name)}
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    imported = {alias.asname or alias.name for alias in imports}
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return sorted(name for name in called - defined - imported - assigned if not hasattr(builtins, name))
