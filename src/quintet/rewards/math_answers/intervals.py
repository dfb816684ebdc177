"""Sets of real numbers: intervals, unions, intersections, differences, finite sets and inequalities of one variable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cmp_to_key
from typing import Any, Final

from quintet.rewards.math_answers.evaluation import Evaluator
from quintet.rewards.math_answers.nodes import INFINITY, Call, Group, Node, Relation, Sym, symbols
from quintet.rewards.math_answers.scalars import BASE_DIGITS, equal_scalars, value_of

MINUS_INFINITY: Final = Call("neg", (INFINITY,))
FLIPPED: Final = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
BRACKETS: Final = frozenset({"()", "[]", "(]", "[)"})
MAX_ENDS: Final = 60


class NoRealSet(ValueError):
    """The answer is no set of real numbers with known ends."""


def same_real_sets(a: Node, b: Node) -> bool | None:
    """Return whether two answers are the same set of real numbers, None if one is none, or in another variable."""
    try:
        ends = _Ends([*_finite_ends(a), *_finite_ends(b)])
        if len(_variables(a) | _variables(b)) > 1:
            return None
        return ends.members(a) == ends.members(b)
    except NoRealSet:
        return None


def _variables(node: Node) -> set[str]:
    """Return the variables of inequalities."""
    if isinstance(node, Group):
        return {name for item in node.items for name in _variables(item)}
    return set(symbols(node)) if isinstance(node, Relation) else set()


def _finite_ends(node: Node) -> Iterator[Node]:
    """Yield all ends of intervals and single points."""
    match node:
        case Group(_, parts) | Relation(parts, _):
            for part in parts:
                yield from _finite_ends(part)
        case Sym() | Call() if node in (INFINITY, MINUS_INFINITY) or (isinstance(node, Sym) and any(symbols(node))):
            return
        case _:
            yield node


def _order(a: tuple[Any, Node], b: tuple[Any, Node]) -> int:
    return int(a[0] > b[0]) - int(a[0] < b[0])


class _Ends:
    """Sorted ends; they divide the real line into gaps and points, which are numbered 0, 1, 2, …"""

    def __init__(self, nodes: Sequence[Node]) -> None:
        if len(nodes) > MAX_ENDS:
            raise NoRealSet("too many ends")
        evaluator = Evaluator(BASE_DIGITS, {})
        values: list[tuple[Any, Node]] = []
        for node in nodes:
            value = value_of(node)
            if value is None:
                raise NoRealSet("an end that is no real number")
            values.append((evaluator.number(value), node))
        values.sort(key=cmp_to_key(_order))
        self._nodes: list[Node] = []
        for _, node in values:
            if not self._nodes or not equal_scalars(self._nodes[-1], node):
                self._nodes.append(node)
        self._all = frozenset(range(2 * len(self._nodes) + 1))

    def _number(self, node: Node) -> int:
        """Return the number of an end."""
        if node == MINUS_INFINITY:
            return -1
        if node == INFINITY:
            return len(self._all)
        for index, other in enumerate(self._nodes):
            if equal_scalars(other, node):
                return 2 * index + 1
        raise NoRealSet("a member that is no number")

    def members(self, node: Node) -> frozenset[int]:
        """Return the gaps and points that belong to a set.

        Raises:
            NoRealSet: it is no set of real numbers.
        """
        match node:
            case Group(kind, (low, high)) if kind in BRACKETS:
                return self._interval(low, high, kind[0] == "[", kind[1] == "]")
            case Group("set", parts):
                return frozenset(self._number(part) for part in parts)
            case Group("union", (left, right)):
                return self.members(left) | self.members(right)
            case Group("intersection", (left, right)):
                return self.members(left) & self.members(right)
            case Group("difference", (left, right)):
                return self.members(left) - self.members(right)
            case Group("list", parts) if all(isinstance(part, Relation) for part in parts):
                return self._alternatives([self.members(part) for part in parts])
            case Relation(terms, signs):
                return self._solutions(terms, signs)
        raise NoRealSet("another answer")

    def _interval(self, low: Node, high: Node, has_low: bool, has_high: bool) -> frozenset[int]:
        start, end = self._number(low) + (not has_low), self._number(high) - (not has_high)
        return frozenset(range(max(start, 0), min(end, len(self._all) - 1) + 1))

    def _alternatives(self, parts: list[frozenset[int]]) -> frozenset[int]:
        """Return the union of disjoint sets; whether others are joined by `and` or `or` is unknown."""
        union = frozenset[int]().union(*parts)
        if len(union) < sum(map(len, parts)):
            raise NoRealSet("sets that overlap")
        return union

    def _solutions(self, terms: Sequence[Node], signs: Sequence[str]) -> frozenset[int]:
        """Return the values of the variable for which all inequalities of a chain hold."""
        members = self._all
        for left, sign, right in zip(terms, signs, terms[1:], strict=False):
            if isinstance(right, Sym) and any(symbols(right)):
                left, sign, right = right, FLIPPED.get(sign, sign), left
            if not (isinstance(left, Sym) and any(symbols(left))) or any(symbols(right)):
                raise NoRealSet("no inequality of a variable")
            members &= self._half(sign, right)
        return members

    def _half(self, sign: str, end: Node) -> frozenset[int]:
        match sign:
            case "<" | "<=":
                return self._interval(MINUS_INFINITY, end, False, sign == "<=")
            case ">" | ">=":
                return self._interval(end, INFINITY, sign == ">=", False)
            case "!=":
                return self._all - {self._number(end)}
            case "=":
                return frozenset({self._number(end)})
            case "in":
                return self.members(end)
        raise NoRealSet(sign)
