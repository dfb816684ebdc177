"""Integer arithmetic of a shell, on numbers from 0 to 2^63."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

ASSIGNMENT = re.compile(
    r"\s*(?P<name>[A-Za-z_]\w*)\s*(?:(?P<step>\+\+|--)|(?P<operator>[-+*/%]?)=(?!=)(?P<value>.*))\s*"
)
"""`i++`, `i=0` or `i+=2`."""
LOGIC = {"&&": " and ", "||": " or ", "!": " not "}
ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate(expression: str) -> int | None:
    """Return the value of an expression without variables; None if it is not supported.

    Numbers below 0 are not, since a shell rounds their quotients differently.
    """
    expression = re.sub(r"&&|\|\||!(?!=)", lambda sign: LOGIC[sign[0]], expression.strip())
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            pass
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in ARITHMETIC:
            value = ARITHMETIC[type(operation)](_value(left), _value(right))
        case ast.Compare(left=left, ops=[operation], comparators=[right]) if type(operation) in COMPARISONS:
            value = int(COMPARISONS[type(operation)](_value(left), _value(right)))
        case ast.BoolOp(op=operation, values=values):
            combine = all if isinstance(operation, ast.And) else any
            value = int(combine([_value(each) != 0 for each in values]))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = int(_value(operand) == 0)
        case _:
            raise ValueError(ast.dump(node))
    if not 0 <= value < 1 << 63:
        raise ValueError(value)
    return value
