"""Syntax tree of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction


class NotParsed(ValueError):
    """The text is outside of the grammar of answers."""


class TooDeep(NotParsed):
    """The text is nested more deeply than any answer; math-verify would take seconds."""


@dataclass(frozen=True, slots=True)
class Num:
    """A number; `digits` counts its digits from the first that is not 0 if it has a decimal point, else it is 0."""

    value: Fraction
    digits: int = 0
    last_place: Fraction = Fraction(0)
    """Value of a 1 in the last decimal place."""


@dataclass(frozen=True, slots=True)
class Sym:
    """A variable or constant."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """An operation or function of scalars, such as `add`, `pow` or `sin`."""

    name: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """A scalar with a unit in the form of `parse_unit`, or `%`."""

    node: Node
    unit: str


@dataclass(frozen=True, slots=True)
class Group:
    """Several answers: `list` without brackets, `set`, `union`, `intersection`, `difference`, `matrix` of `row`, or two
    brackets such as `[)`."""

    kind: str
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """Terms with `=`, `!=`, `<`, `<=`, `>`, `>=` or `in` between them."""

    terms: tuple[Node, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Word:
    """Text, in lower case; `…` for dots."""

    text: str


Node = Num | Sym | Call | Measure | Group | Relation | Word
ELLIPSIS = Word("…")
INFINITY = Sym("∞")
CONSTANTS = frozenset({"e", "i", "π", "∞"})


def symbols(node: Node) -> Iterator[str]:
    """Yield the names of the variables of a tree, those that occur several times several times."""
    match node:
        case Sym(name) if name not in CONSTANTS:
            yield name
        case Call(args=parts) | Group(items=parts) | Relation(terms=parts):
            for part in parts:
                yield from symbols(part)
        case Measure(part, _):
            yield from symbols(part)
        case _:
            return
