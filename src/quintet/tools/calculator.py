"""Calculator for expressions of numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from quintet.expressions import evaluate
from quintet.tools.tool import StatelessTool

DECIMAL = re.compile(r"(\d*)\.(\d+)")
LEADING_MINUS = re.compile(r"(^|\()\s*-")


class Calculator(StatelessTool):
    """Evaluates expressions of + - * / and parentheses exactly, without running code."""

    description: ClassVar[str] = "Evaluates an arithmetic expression."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "numbers with + - * / and parentheses"}},
        "required": ["expression"],
    }

    def execute(self, arguments: Mapping[str, Any]) -> str:
        """Return the value: an integer, or a decimal number with up to 12 digits.

        >>> Calculator().execute({"expression": "(1.5 + 2) * 2"})
        '7'

        Raises:
            ExpressionError: the text is not an expression, or divides by 0.
        """
        text = LEADING_MINUS.sub(r"\g<1>0-", str(arguments.get("expression", "")))
        value, _ = evaluate(DECIMAL.sub(_fraction, text))
        return str(value) if value.denominator == 1 else f"{float(value):.12g}"


def _fraction(match: re.Match[str]) -> str:
    """Return a decimal number as a fraction of integers."""
    return f"({match[1]}{match[2]}/1{'0' * len(match[2])})"
