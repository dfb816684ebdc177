"""Arithmetic tasks: sums of multi-digit numbers, and expressions with several operators."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from quintet.data.tasks.task import Problem, Style, TaskOptions, format_response, parse_options

Tree = int | tuple[str, "Tree", "Tree"]
"""A number, or an operator with two subtrees."""
Digits = Annotated[int, Field(ge=1, le=12)]
Terms = Annotated[int, Field(ge=2, le=10)]
OPERATORS: Final = "+-*/"
MAX_ATTEMPTS: Final = 1000
"""Expressions tried per problem, since few divisions are exact."""


class AdditionOptions(TaskOptions):
    """Options of `addition`."""

    demonstrates_calls: ClassVar[bool] = True

    digits: Digits = 2
    """Digits of each number, without leading zeros."""
    terms: Terms = 2
    """Numbers in a sum."""


class ArithmeticOptions(TaskOptions):
    """Options of `arithmetic`."""

    demonstrates_calls: ClassVar[bool] = True

    digits: Digits = 2
    """Maximum digits of each number."""
    terms: Terms = 3
    """Numbers in an expression."""
    operators: Annotated[str, Field(min_length=1)] = "+-"
    """Operators that may occur, out of + - * /; divisions are exact."""
    parentheses: bool = False
    """Group terms at random instead of by precedence."""
    negative: bool = True
    """Allow negative results, including intermediate ones."""

    @model_validator(mode="after")
    def _check_operators(self) -> Self:
        if unknown := set(self.operators) - set(OPERATORS):
            raise ValueError(f"operators={self.operators}: unknown {''.join(sorted(unknown))}; valid: {OPERATORS}")
        return self


class Addition:
    """`Task` such as `27 + 34 = ?`; intermediate steps are column sums from the right, with carry."""

    source = "addition"
    ability = "math"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = parse_options(AdditionOptions, options, "addition")

    def problem(self, seed: int, number: int) -> Problem:
        options, rng = self._options, _rng(seed, number)
        min_term = 10 ** (options.digits - 1) if options.digits > 1 else 0
        terms = [rng.randrange(min_term, 10**options.digits) for _ in range(options.terms)]
        text = " + ".join(map(str, terms))
        working = " , ".join(_column_sums(terms))
        return Problem(
            question=options.add_instruction(f"{text} = ?"),
            ground_truth=str(sum(terms)),
            key=" ".join(map(str, sorted(terms))),
            response=_response(options.style, str(sum(terms)), working, text),
            extra_info={"digits": options.digits, "terms": options.terms},
        )


def _column_sums(terms: Sequence[int]) -> Iterator[str]:
    """Yield column sums from the right with the carry last, for example `7 + 4 = 11`, `2 + 3 + 1 = 6`."""
    carry = 0
    for column in zip_longest(*(reversed(str(term)) for term in terms), fillvalue="0"):
        digits = [*column, str(carry)] if carry else list(column)
        total = sum(map(int, digits))
        yield f"{' + '.join(digits)} = {total}"
        carry = total // 10


def _response(style: Style, result: str, working: str, expression: str) -> str:
    """Return a demonstrated response; the result of its tool call comes before the answer."""
    answer = format_response(result, working if style == "worked" else None)
    if style != "tool":
        return answer
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{call}\n</tool_call>{answer}"


class Arithmetic:
    """`Task` such as `12 - 3 * 4 = ?`; intermediate steps are single operations."""

    source = "arithmetic"
    ability = "math"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = parse_options(ArithmeticOptions, options, "arithmetic")

    def problem(self, seed: int, number: int) -> Problem | None:
        options, rng = self._options, _rng(seed, number)
        for _ in range(MAX_ATTEMPTS):
            tree = self._tree(rng)
            operations = evaluate_steps(tree)
            if operations is not None and (options.negative or all(result >= 0 for *_, result in operations)):
                break
        else:
            return None
        result, text = str(operations[-1][-1]), to_text(tree)
        working = " , ".join(f"{left} {operator} {right} = {out}" for left, operator, right, out in operations)
        return Problem(
            question=options.add_instruction(f"{text} = ?"),
            ground_truth=result,
            key=text,
            response=_response(options.style, result, working, text),
            extra_info={"digits": options.digits, "terms": options.terms, "operators": options.operators},
        )

    def _tree(self, rng: random.Random) -> Tree:
        options = self._options
        nodes: list[Tree] = [rng.randrange(10**options.digits) for _ in range(options.terms)]
        operators = [rng.choice(options.operators) for _ in range(options.terms - 1)]
        while operators:
            index = rng.randrange(len(operators)) if options.parentheses else _next_operator(operators)
            nodes[index : index + 2] = [(operators.pop(index), nodes[index], nodes[index + 1])]
        return nodes[0]


def _next_operator(operators: Sequence[str]) -> int:
    """Return the index of the operator that binds first: * and / before + and -, from the left."""
    return next((index for index, operator in enumerate(operators) if operator in "*/"), 0)


def evaluate_steps(tree: Tree) -> list[tuple[int, str, int, int]] | None:
    """Return the operations of a tree, inner before outer, as `(left, operator, right, result)`.

    None if a division is not exact or by 0.
    """
    operations: list[tuple[int, str, int, int]] = []

    def evaluate(node: Tree) -> int | None:
        if isinstance(node, int):
            return node
        operator = node[0]
        left = evaluate(node[1])
        right = evaluate(node[2])
        if left is None or right is None or (result := apply_operator(operator, left, right)) is None:
            return None
        operations.append((left, operator, right, result))
        return result

    return None if evaluate(tree) is None else operations


def apply_operator(operator: str, left: int, right: int) -> int | None:
    """Return the result of an operation, or None if a division is not exact or by 0."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    return left // right if right and left % right == 0 else None


def to_text(tree: Tree, parent: str = "", *, right: bool = False) -> str:
    """Format a tree with the necessary parentheses."""
    if isinstance(tree, int):
        return str(tree)
    operator = tree[0]
    text = f"{to_text(tree[1], operator)} {operator} {to_text(tree[2], operator, right=True)}"
    is_weaker = bool(parent) and _precedence(operator) < _precedence(parent)
    # a - (b - c) and a / (b * c) differ without parentheses
    changes_grouping = right and _precedence(operator) == _precedence(parent) and parent in "-/"
    mixes_division = right and parent == "*" and operator == "/"
    return f"({text})" if is_weaker or changes_grouping or mixes_division else text


def _precedence(operator: str) -> int:
    return 2 if operator in "*/" else 1


def _rng(seed: int, number: int) -> random.Random:
    return random.Random(f"{seed}/{number}")  # noqa: S311 - not for cryptography
