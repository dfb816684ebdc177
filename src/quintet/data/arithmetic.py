"""Arithmetic of chosen difficulty: sums digit by digit, and expressions over several operators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator

from quintet.data.tasks import Problem, TaskOptions, answered, options_of

__all__ = ["Addition", "AdditionOptions", "Arithmetic", "ArithmeticOptions", "Tree", "steps", "value_of", "written"]

Tree = int | tuple[str, "Tree", "Tree"]
"""A number, or an operator over two others."""
Digits = Annotated[int, Field(ge=1, le=12)]
Terms = Annotated[int, Field(ge=2, le=10)]
SIGNS: Final = "+-*/"
DRAWS: Final = 1000
"""Expressions tried for one problem: few divisions come out even."""


class AdditionOptions(TaskOptions):
    """Options of `addition`."""

    digits: Digits = 2
    """Of each number, none beginning with 0."""
    terms: Terms = 2
    """Numbers in a sum."""


class ArithmeticOptions(TaskOptions):
    """Options of `arithmetic`."""

    digits: Digits = 2
    """Of each number at most."""
    terms: Terms = 3
    """Numbers in an expression."""
    operators: Annotated[str, Field(min_length=1)] = "+-"
    """Which of + - * / occur; quotients are whole."""
    parentheses: bool = False
    """Terms are grouped at random, not by precedence alone."""
    negative: bool = True
    """Results may be below 0, on the way too."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if unknown := set(self.operators) - set(SIGNS):
            raise ValueError(f"operators={self.operators}: there are {SIGNS}, not {''.join(sorted(unknown))}")
        return self


class Addition:
    """`27 + 34 = ?`; worked out, the sums of the digits from the right, with what is carried."""

    source = "addition"
    ability = "math"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options_of(AdditionOptions, options, "addition")

    def problem(self, seed: int, number: int) -> Problem:
        """See `Task.problem`."""
        options, rng = self._options, _rng(seed, number)
        least = 10 ** (options.digits - 1) if options.digits > 1 else 0
        terms = [rng.randrange(least, 10**options.digits) for _ in range(options.terms)]
        working = " , ".join(_columns(terms)) if options.style == "worked" else None
        return Problem(
            question=options.asked(f"{' + '.join(map(str, terms))} = ?"),
            truth=str(sum(terms)),
            key=" ".join(map(str, sorted(terms))),
            response=answered(str(sum(terms)), working),
            about={"digits": options.digits, "terms": options.terms},
        )


def _columns(terms: Sequence[int]) -> Iterator[str]:
    """`7 + 4 = 11`, `2 + 3 + 1 = 6`: each column from the right, the carry last."""
    carry = 0
    for column in zip_longest(*(reversed(str(term)) for term in terms), fillvalue="0"):
        digits = [*column, str(carry)] if carry else list(column)
        total = sum(map(int, digits))
        yield f"{' + '.join(digits)} = {total}"
        carry = total // 10


class Arithmetic:
    """`12 - 3 * 4 = ?`; worked out, one operation after another."""

    source = "arithmetic"
    ability = "math"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options_of(ArithmeticOptions, options, "arithmetic")

    def problem(self, seed: int, number: int) -> Problem | None:
        """See `Task.problem`."""
        options, rng = self._options, _rng(seed, number)
        for _ in range(DRAWS):
            tree = self._tree(rng)
            done = steps(tree)
            if done is not None and (options.negative or all(result >= 0 for *_, result in done)):
                break
        else:
            return None
        result, text = str(done[-1][-1]), written(tree)
        working = " , ".join(f"{left} {sign} {right} = {out}" for left, sign, right, out in done)
        return Problem(
            question=options.asked(f"{text} = ?"),
            truth=result,
            key=text,
            response=answered(result, working if options.style == "worked" else None),
            about={"digits": options.digits, "terms": options.terms, "operators": options.operators},
        )

    def _tree(self, rng: random.Random) -> Tree:
        options = self._options
        nodes: list[Tree] = [rng.randrange(10**options.digits) for _ in range(options.terms)]
        signs = [rng.choice(options.operators) for _ in range(options.terms - 1)]
        while signs:
            place = rng.randrange(len(signs)) if options.parentheses else _first(signs)
            nodes[place : place + 2] = [(signs.pop(place), nodes[place], nodes[place + 1])]
        return nodes[0]


def _first(signs: Sequence[str]) -> int:
    """Which operator binds first: products and quotients before sums, each from the left."""
    return next((place for place, sign in enumerate(signs) if sign in "*/"), 0)


def steps(tree: Tree) -> list[tuple[int, str, int, int]] | None:
    """The operations of a tree, the inner before the outer, as `(left, sign, right, result)`; None where a quotient
    isn't whole or divides by 0."""
    done: list[tuple[int, str, int, int]] = []

    def work(node: Tree) -> int | None:
        if isinstance(node, int):
            return node
        sign, left, right = node[0], work(node[1]), work(node[2])
        if left is None or right is None or (result := value_of(sign, left, right)) is None:
            return None
        done.append((left, sign, right, result))
        return result

    return None if work(tree) is None else done


def value_of(sign: str, left: int, right: int) -> int | None:
    """The result of one operation; None where a quotient isn't whole or divides by 0."""
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    return left // right if right and left % right == 0 else None


def written(tree: Tree, above: str = "", *, right: bool = False) -> str:
    """A tree as text, with the parentheses that precedence asks for."""
    if isinstance(tree, int):
        return str(tree)
    sign = tree[0]
    text = f"{written(tree[1], sign)} {sign} {written(tree[2], sign, right=True)}"
    weaker = bool(above) and _binds(sign) < _binds(above)
    # a - (b - c) and a / (b * c) are others than without
    regrouped = right and _binds(sign) == _binds(above) and above in "-/"
    mixed = right and above == "*" and sign == "/"
    return f"({text})" if weaker or regrouped or mixed else text


def _binds(sign: str) -> int:
    return 2 if sign in "*/" else 1


def _rng(seed: int, number: int) -> random.Random:
    return random.Random(f"{seed}/{number}")  # noqa: S311 - a draw, no secret
