"""Equality of answers: scalars, units, lists, tuples, intervals, sets, matrices, equations and inequalities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Final

from quintet.rewards.math_answers.evaluation import Evaluator
from quintet.rewards.math_answers.intervals import FLIPPED, same_real_sets
from quintet.rewards.math_answers.nodes import (
    ELLIPSIS,
    INFINITY,
    Call,
    Group,
    Measure,
    Node,
    NotParsed,
    Num,
    Relation,
    Sym,
    TooDeep,
    Word,
    symbols,
)
from quintet.rewards.math_answers.parser import parse
from quintet.rewards.math_answers.scalars import BASE_DIGITS, equal_scalars, proportional, value_of

MAX_ITEMS: Final = 60
BRACKETS: Final = frozenset({"()", "[]", "(]", "[)"})
REAL_SETS: Final = frozenset({"union", "intersection", "difference", *BRACKETS})
FUNCTION_LETTERS: Final = frozenset("fghpqEFGHP")
MAX_ROUNDING: Final = 0.05
"""Share by which the value behind `≈` may differ."""
LABELLED: Final = re.compile(
    r"(?:\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{\s*\((?P<text>[A-Z])\)\s*\}"
    r"|\((?P<plain>[A-Z])\)(?=\\[ ,;:]|~|\s))"
    r"(?:\\[ ,;:]|\\q?quad\b|~|\s)*(?P<value>.+)",
    re.DOTALL,
)
"""A choice with its letter, such as `\\textbf{(A)}\\ 5`."""
LETTER: Final = re.compile(r"(?:\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*)?\{?\s*\(?([A-Z])\)?\.?\s*\}?")
HUNDRED: Final = Num(Fraction(100))


def compare(answer: str, ground_truth: str) -> bool | None:
    """Return whether two answers are equal, None if one is outside of the grammar of answers."""
    (letter, value), (true_letter, true_value) = _labelled(answer), _labelled(ground_truth)
    if letter and true_letter:
        return letter == true_letter and (not (value and true_value) or compare(value, true_value))
    if (letter and value) or (true_letter and true_value):
        return compare(value or answer, true_value or ground_truth)
    try:
        return equal(parse(answer), _parse_truth(ground_truth))
    except TooDeep:
        return False
    except NotParsed:
        return None


def _labelled(answer: str) -> tuple[str, str]:
    """Return the letter of a choice and its value, either empty if it is not there."""
    answer = answer.strip().strip("$")
    if letter := LETTER.fullmatch(answer):
        return letter[1], ""
    labelled = LABELLED.fullmatch(answer)
    return ("", "") if labelled is None else (labelled["text"] or labelled["plain"], labelled["value"])


def is_parsed(answer: str) -> bool:
    """Return whether an answer is in the grammar."""
    try:
        parse(answer)
    except NotParsed:
        return False
    return True


def parsed_value(answer: str) -> Fraction | None:
    """Return the value of a rational scalar, without its name and unit; None for other answers."""
    try:
        node = _without_name(parse(answer), INFINITY)
    except NotParsed:
        return None
    value = value_of(node.node if isinstance(node, Measure) else node)
    return value if isinstance(value, Fraction) else None


@lru_cache(maxsize=1024)
def _parse_truth(ground_truth: str) -> Node:
    """Parse the ground truth, once for all responses of a group."""
    return parse(ground_truth)


def equal(a: Node, b: Node) -> bool:
    """Return whether two answers are equal."""
    if a == b:
        return True
    a, b = _without_approximation(a, b), _without_approximation(b, a)
    a, b = _without_name(_both_signs(a), b), _without_name(_both_signs(b), a)
    if isinstance(a, Relation) or isinstance(b, Relation):
        return _equal_relations(a, b)
    if isinstance(a, Group) or isinstance(b, Group):
        return _equal_groups(a, b)
    if isinstance(a, Word) or isinstance(b, Word):
        return _text(a) == _text(b) != ""
    return _equal_measures(a, b)


def _text(node: Node) -> str:
    """Return text, or the letter of a symbol, in lower case."""
    return node.text if isinstance(node, Word) else node.name.lower() if isinstance(node, Sym) else ""


def _without_name(node: Node, other: Node) -> Node:
    """Return 5 for `x = 5`, `f(x) = 5`, `2 + 3 = 5` and a set for `x` in it, if the other answer is no relation."""
    if not isinstance(node, Relation) or isinstance(other, Relation) or _has_relations(other):
        return node
    first, last = node.terms[0], node.terms[-1]
    if node.signs == ("in",) and isinstance(first, Sym):
        return last
    if set(node.signs) != {"="}:
        return node
    is_computation = not any(symbols(first)) and equal(first, last)
    return last if is_computation or _is_asked(first) else node


def _without_approximation(node: Node, other: Node) -> Node:
    """Return `x = \\sqrt2` for `x = \\sqrt2 ≈ 1.41`, or the rounded value if the other answer is it."""
    if not isinstance(node, Relation) or "≈" not in node.signs or not set(node.signs) <= {"=", "≈"}:
        return node
    first = node.signs.index("≈")
    if not first and _is_asked(node.terms[0]):
        return Relation(node.terms, ("=",) * len(node.signs))
    exact, rounded = node.terms[first], node.terms[-1]
    if not _is_rounded(exact, rounded):
        return node
    if equal(rounded, other):
        return rounded
    return Relation(node.terms[: first + 1], node.signs[:first]) if first else exact


def _is_rounded(exact: Node, rounded: Node) -> bool:
    x, y = (value_of(node.node if isinstance(node, Measure) else node) for node in (exact, rounded))
    if x is None or y is None:
        return False
    exact_value, rounded_value = (Evaluator(BASE_DIGITS, {}).number(value) for value in (x, y))
    return bool(abs(exact_value - rounded_value) <= MAX_ROUNDING * abs(exact_value))


def _has_relations(node: Node) -> bool:
    return isinstance(node, Group) and any(isinstance(item, Relation) for item in node.items)


def _is_name(node: Node) -> bool:
    """Return whether a term names a value: `x`, `f(x)`, `(x, y)`."""
    match node:
        case Sym(name):
            return name in symbols(node)
        case Call("mul", parts) | Group("()" | "list", parts):
            return all(map(_is_name, parts))
    return False


def _is_asked(node: Node) -> bool:
    """Return whether a term is what a task may ask for: a name, `f(3)`, `|AB|`, `\\sin x`, `m + n`, `m/n`."""
    match node:
        case Word():
            return True
        case Call("mul", (function, _)) if _is_function(function):
            return True
        case Call("add" | "div", parts):
            names = list(symbols(node))
            return all(map(_is_asked, parts)) and len(set(names)) == len(names)
        case Call("abs" | "neg" | "sin" | "cos" | "tan" | "cot" | "sec" | "csc", (part,)):
            return _is_name(part)
    return _is_name(node)


def _is_function(node: Node) -> bool:
    """Return whether a symbol is usually a function, or its inverse."""
    match node:
        case Sym(name) | Call("pow", (Sym(name), Call("neg", (Num(Fraction(numerator=1, denominator=1)),)))):
            return name.rstrip("'")[:1] in FUNCTION_LETTERS
    return False


def _both_signs(node: Node) -> Node:
    """Return a list of two answers for one with a plus-minus sign."""
    if isinstance(node, Group) and node.kind in ("list", "set"):
        items: list[Node] = []
        for item in node.items:
            both = _both_signs(item)
            items += both.items if isinstance(both, Group) and not isinstance(item, Group) else [both]
        return Group(node.kind, tuple(items))
    plus, minus = _with_sign(node, "±"), _with_sign(node, "∓")
    return node if plus == minus else Group("list", (plus, minus))


def _with_sign(node: Node, plus: str) -> Node:
    """Return an answer with `plus` read as plus, and the opposite sign as minus."""
    match node:
        case Call(("±" | "∓") as name, (operand,)):
            operand = _with_sign(operand, plus)
            return operand if name == plus else Call("neg", (operand,))
        case Call(name, parts):
            return Call(name, tuple(_with_sign(part, plus) for part in parts))
        case Group(kind, parts):
            return Group(kind, tuple(_with_sign(part, plus) for part in parts))
        case Relation(parts, signs):
            return Relation(tuple(_with_sign(part, plus) for part in parts), signs)
        case Measure(part, unit):
            return Measure(_with_sign(part, plus), unit)
    return node


def _equal_measures(a: Node, b: Node) -> bool:
    """Compare scalars with units: one without a unit has each; `50%` is 50 and 0.5; degrees are also radians."""
    (x, unit_x), (y, unit_y) = _parts(a, b), _parts(b, a)
    if "%" in (unit_x, unit_y) and unit_x != unit_y:
        share, percents = (x, y) if unit_y == "%" else (y, x)
        units = {unit_x, unit_y} - {"%", ""}
        return not units and (equal_scalars(x, y) or equal_scalars(share, Call("div", (percents, HUNDRED))))
    if "°" in (unit_x, unit_y) and unit_x != unit_y:
        angle, degrees = (x, y) if unit_y == "°" else (y, x)
        is_radians = {unit_x, unit_y} <= {"°", "rad", ""} and equal_scalars(angle, Call("degree", (degrees,)))
        return is_radians or (unit_x + unit_y == "°" and equal_scalars(x, y))
    return (unit_x == unit_y or not (unit_x and unit_y)) and equal_scalars(x, y)


def _parts(node: Node, other: Node) -> tuple[Node, str]:
    """Return a scalar and its unit; `5 m` is 5 metres beside another answer in metres."""
    if isinstance(node, Measure):
        return node.node, node.unit
    match node, other:
        case Call("mul", (scalar, Sym(name))), Measure(_, unit) if name == unit:
            return scalar, unit
    return node, ""


def _equal_groups(a: Node, b: Node) -> bool:
    kinds = {_kind(a), _kind(b)}
    items_a, items_b = _items(a), _items(b)
    if max(len(items_a), len(items_b)) > MAX_ITEMS:
        return False
    if "compound" in kinds:
        return all(isinstance(item, Measure) for item in (*items_a, *items_b)) and _equal_in_order(items_a, items_b)
    if len(kinds) == 1 and kinds <= BRACKETS | {"matrix", "row"}:
        return _equal_in_order(items_a, items_b)
    if kinds & REAL_SETS and kinds <= REAL_SETS | {"set"} and not kinds <= BRACKETS:
        return _equal_real_sets(a, b, kinds)
    if kinds == {"list", "()"} or ELLIPSIS in (*items_a, *items_b):
        return kinds in ({"list"}, {"list", "()"}, {"list", "set"}) and _equal_in_order(items_a, items_b)
    if kinds == {"list"}:
        return _is_permutation(items_a, items_b) or _same_relations(a, b)
    if kinds <= {"list", "set", "scalar"}:
        return _is_permutation(_distinct(items_a), _distinct(items_b))
    return (
        kinds <= {"list", *REAL_SETS} and _has_relations(a if _has_relations(a) else b) and same_real_sets(a, b) is True
    )


def _kind(node: Node) -> str:
    return node.kind if isinstance(node, Group) else "scalar"


def _items(node: Node) -> tuple[Node, ...]:
    return node.items if isinstance(node, Group) else (node,)


def _equal_real_sets(a: Node, b: Node, kinds: set[str]) -> bool:
    """Compare sets of real numbers, by their form if they depend on variables."""
    same = same_real_sets(a, b)
    if same is not None or kinds != {"union"}:
        return same is True
    return _is_permutation(_union(a), _union(b))


def _union(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Group) and node.kind == "union":
        return tuple(part for item in node.items for part in _union(item))
    return (node,)


def _equal_in_order(a: Sequence[Node], b: Sequence[Node]) -> bool:
    return len(a) == len(b) and all(map(_equal_items, a, b))


def _equal_items(a: Node, b: Node) -> bool:
    """Compare items of lists and sets, where the set `{1}` is not its element."""
    return (_kind(a) == "set") == (_kind(b) == "set") and equal(a, b)


def _is_permutation(a: Sequence[Node], b: Sequence[Node]) -> bool:
    """Return whether the items agree in some order; items with different names must be named in both."""
    if len(a) != len(b):
        return False
    names = {str(item.terms[0]) for item in (*a, *b) if isinstance(item, Relation)}
    if len(names) > 1 and not all(isinstance(item, Relation) for item in (*a, *b)):
        return _equal_in_order(a, b)
    left = list(b)
    for item in a:
        index = next((index for index, other in enumerate(left) if _equal_items(item, other)), None)
        if index is None:
            return False
        del left[index]
    return True


def _distinct(items: Sequence[Node]) -> list[Node]:
    distinct: list[Node] = []
    for item in items:
        if not any(_equal_items(item, other) for other in distinct):
            distinct.append(item)
    return distinct


def _same_relations(a: Node, b: Node) -> bool:
    return _has_relations(a) and _has_relations(b) and same_real_sets(a, b) is True


def _equal_relations(a: Node, b: Node) -> bool:
    """Compare an equation or inequality with another, or with a set of real numbers."""
    if not (isinstance(a, Relation) and isinstance(b, Relation)):
        other = b if isinstance(a, Relation) else a
        is_set = isinstance(other, Group) and (other.kind in REAL_SETS or _has_relations(other))
        return is_set and same_real_sets(a, b) is True
    if _is_assignment(a) and _is_assignment(b) and a.terms[0] == b.terms[0]:
        return equal(a.terms[-1], b.terms[-1])
    if _is_solved(a) or _is_solved(b):
        return False
    same = same_real_sets(a, b)
    if same is not None:
        return same
    flipped = Relation(b.terms[::-1], tuple(FLIPPED.get(sign, sign) for sign in b.signs[::-1]))
    return _same_chain(a, b) or _same_chain(a, flipped)


def _is_assignment(node: Relation) -> bool:
    return set(node.signs) == {"="} and _is_name(node.terms[0])


def _is_solved(node: Relation) -> bool:
    """Return whether a relation says that a variable is a constant."""
    return _is_assignment(node) and not any(symbols(node.terms[-1]))


def _same_chain(a: Relation, b: Relation) -> bool:
    if len(a.signs) != len(b.signs):
        return False
    links = zip(a.terms, a.terms[1:], a.signs, b.terms, b.terms[1:], b.signs, strict=False)
    return all(_same_link(*link) for link in links)


def _same_link(left: Node, right: Node, sign: str, other_left: Node, other_right: Node, other_sign: str) -> bool:
    """Return whether two relations differ by a factor of both sides."""
    if equal(left, other_left) and equal(right, other_right):
        return sign == other_sign
    factor = proportional(_difference(left, right), _difference(other_left, other_right))
    if factor == 0:
        return False
    return other_sign == (sign if factor > 0 else FLIPPED.get(sign)) or (sign == other_sign and sign in ("=", "!="))


def _difference(a: Node, b: Node) -> Node:
    return Call("add", (a, Call("neg", (b,))))
