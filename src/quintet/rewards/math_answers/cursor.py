"""Position in the tokens of an answer, and units behind its numbers."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from quintet.rewards.math_answers.nodes import Call, Group, Measure, Node, NotParsed, Num, TooDeep, Word
from quintet.rewards.math_answers.tokens import Token
from quintet.rewards.numbers import normalize
from quintet.rewards.units import MULTIPLES, parse_unit

MAX_DEPTH: Final = 60
MAX_OPERATIONS: Final = 200
"""The tree of a sum or product is as deep as it has terms."""
UNIT_TOKENS: Final = ("text", "sym", "/", "^", "number", "{", "}", "-", "*", "currency")
END: Final = Token("end of text", 0, 0)


class Cursor:
    """Position in a list of tokens, and limits of depth and operations."""

    def __init__(self, text: str, tokens: list[Token]) -> None:
        self._text = text
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self._operations = 0

    def peek(self, ahead: int = 0) -> Token:
        position = self.position + ahead
        return self.tokens[position] if position < len(self.tokens) else END

    def take(self, *kinds: str) -> Token | None:
        token = self.peek()
        if token.kind not in kinds:
            return None
        self.position += 1
        return token

    def expect(self, kind: str) -> Token:
        token = self.take(kind)
        if token is None:
            raise NotParsed(f"expected {kind}, not {self.peek().kind}")
        return token

    def enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooDeep("too deeply nested")

    def count(self) -> None:
        self._operations += 1
        if self._operations > MAX_OPERATIONS:
            raise NotParsed("too many operations")

    def measured(self, node: Node) -> Node:
        """Parse the unit behind a scalar."""
        if (multiple := self._multiple()) is not None:
            node = Call("mul", (node, Num(Fraction(multiple))))
        if self.take("%"):
            return Measure(node, "%")
        if isinstance(node, Call) and node.name == "degree":
            return Measure(node.args[0], "°")
        start = self.position
        while self.peek().kind in UNIT_TOKENS and self._is_unit():
            self.position += 1
        if self.position == start:
            return node
        raw = self._text[self.tokens[start].start : self.tokens[self.position - 1].end]
        raw = normalize(raw)
        unit = "%" if raw.strip().lower() in ("percent", "per cent") else parse_unit(raw)
        if unit is None or isinstance(node, Group | Word):
            raise NotParsed(f"no unit: {raw}")
        return Measure(node, unit) if unit else node

    def _is_unit(self) -> bool:
        """Return whether the tokens to the next separator may be a unit: they begin with text."""
        token = self.peek()
        before = self.tokens[self.position - 1].kind if self.position else ""
        if token.kind == "number":
            return before in ("^", "{", "-")
        if token.kind == "sym" and before == "sym":
            return token.start == self.tokens[self.position - 1].end
        return token.kind in ("text", "currency") or before in ("text", "/", "^", "{", "-", "*", "number", "}")

    def _multiple(self) -> int | None:
        token = self.peek()
        multiple = MULTIPLES.get(token.text.lower()) if token.kind == "text" else None
        if multiple is not None:
            self.position += 1
        return multiple
