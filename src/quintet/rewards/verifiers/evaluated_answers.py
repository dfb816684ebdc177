"""Answers that generators of reasoning-gym evaluate as Python, in the process that reports the score.

Such an answer could name the solution, which is a variable there, or report a score itself.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping
from typing import Any, Final

LITERALS: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Generators that pass an answer to `eval` unless it equals the solution: they expect lists."""
EXPRESSIONS: Final = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Generators that pass an answer to sympy's `parse_expr`, which evaluates it."""
FUNCTIONS: Final = frozenset(
    {"exp", "log", "ln", "sqrt", "cbrt", "root", "Abs", "abs", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos"}
    | {"atan", "acot", "sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "pi", "E", "I", "oo"}
)
NAME: Final = re.compile(r"[^\W\d]\w*")
EXPRESSION: Final = re.compile(r"(?:[\w\s+\-*/^(),!]|\.(?!\s*[^\W\d]))*")
"""Arithmetic without attributes, items, texts and assignments."""
NEITHER: Final = "("
"""Text that is neither data nor an expression: generators score it like any answer that they cannot read."""


def without_code(generator: str, answer: str, entry: Mapping[str, Any]) -> str:
    """Return an answer that the generator may evaluate: itself, or a text that cannot be read in place of code."""
    if generator in LITERALS:
        return answer if _is_solution(answer, entry) or _is_literal(answer) else NEITHER
    if generator in EXPRESSIONS:
        return answer if _is_expression(answer) else NEITHER
    return answer


def _is_solution(answer: str, entry: Mapping[str, Any]) -> bool:
    solutions = [entry["answer"], *entry["metadata"].get("valid_answers", ())]
    return any(isinstance(each, str) and each.strip() == answer.strip() for each in solutions)


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_expression(text: str) -> bool:
    return EXPRESSION.fullmatch(text) is not None and all(map(_is_harmless, NAME.findall(text)))


def _is_harmless(name: str) -> bool:
    """Return whether a name is a mathematical function or a variable, and nothing of Python or sympy."""
    import sympy

    is_known = hasattr(builtins, name) or (len(name) > 1 and hasattr(sympy, name))
    return name in FUNCTIONS or not (is_known or name.startswith("_"))
