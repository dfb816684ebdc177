"""Parser of answers: recursive descent over tokens, in linear time and bounded depth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

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
    Word,
)
from quintet.rewards.math_answers.tokens import Token, clean, tokenize
from quintet.rewards.numbers import TEXT
from quintet.rewards.units import CURRENCIES, MULTIPLES, parse_unit

MAX_DEPTH: Final = 60
MAX_OPERATIONS: Final = 200
"""The tree of a sum or product is as deep as it has terms."""
RELATIONS: Final = frozenset({"=", "!=", "<", "<=", ">", ">=", "in"})
SET_SIGNS: Final = {"∪": "union", "∩": "intersection", "∖": "difference"}
ENCLOSED: Final = {"|": ("|", "abs"), "⌊": ("⌋", "floor"), "⌈": ("⌉", "ceil")}
"""Closing sign and function of each opening one."""
UNIT_TOKENS: Final = ("text", "sym", "/", "^", "number", "{", "}", "-", "*", "currency")
STARTS: Final = frozenset(
    {"number", "sym", "fun", "frac", "binom", "(", "[", "\\{", "{", "|", "⌊", "⌈", "begin", "∅", "ℝ"}
)
FACTORS: Final = STARTS - {"|", "begin", "∅", "ℝ", "[", "\\{"}
"""Tokens that multiply what is before them."""
END: Final = Token("end of text", 0, 0)
INVERSE: Final = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
ALIASES: Final = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
DATE: Final = re.compile(r"[0-9]{4}([-/])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-/])[0-9]{1,2}\2[0-9]{4}")
REAL_NUMBERS: Final = ("all real numbers", "all reals", "real numbers", "the real numbers")
FIXED: Final[Mapping[str, Node]] = {
    "…": ELLIPSIS,
    "∅": Group("set", ()),
    "ℝ": Group("()", (Call("neg", (INFINITY,)), INFINITY)),
}


def parse(text: str) -> Node:
    """Return the syntax tree of an answer.

    Raises:
        NotParsed: the text is outside of the grammar.
    """
    text = clean(text)
    if DATE.fullmatch(text):
        return Word(text)
    parser = _Parser(text, tokenize(text))
    node = parser.answer()
    if parser.peek() is not END:
        raise NotParsed(f"unexpected {parser.peek().kind}")
    return node


class _Cursor:
    """Position in a list of tokens, and limits of depth and operations."""

    def __init__(self, text: str, tokens: list[Token]) -> None:
        self._text = text
        self._tokens = tokens
        self._position = 0
        self._depth = 0
        self._operations = 0

    def peek(self, ahead: int = 0) -> Token:
        position = self._position + ahead
        return self._tokens[position] if position < len(self._tokens) else END

    def _take(self, *kinds: str) -> Token | None:
        token = self.peek()
        if token.kind not in kinds:
            return None
        self._position += 1
        return token

    def _expect(self, kind: str) -> Token:
        token = self._take(kind)
        if token is None:
            raise NotParsed(f"expected {kind}, not {self.peek().kind}")
        return token

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotParsed("too deeply nested")

    def _count(self) -> None:
        self._operations += 1
        if self._operations > MAX_OPERATIONS:
            raise NotParsed("too many operations")


class _Parser(_Cursor):
    """One method per level of precedence."""

    def answer(self) -> Node:
        items = self._items()
        return items[0] if len(items) == 1 else Group("list", items)

    def _items(self) -> tuple[Node, ...]:
        """Parse items between separators; `5, and 6` has one separator."""
        items = [self._item()]
        while self._take(","):
            while self._take(","):
                pass
            items.append(self._item())
        return tuple(items)

    def _item(self) -> Node:
        if self.peek().kind == "text":
            return self._words()
        if self._take("="):
            return self._measured(self._sets())
        terms, signs = [self._measured(self._sets())], []
        while (sign := self._take(*RELATIONS)) is not None:
            signs.append(sign.kind)
            terms.append(self._measured(self._sets()))
        return Relation(tuple(terms), tuple(signs)) if signs else terms[0]

    def _words(self) -> Node:
        words = []
        while (token := self._take("text", "sym")) is not None:
            words.append(token.text)
        text = " ".join(" ".join(words).lower().split()).strip(" .()")
        return FIXED["ℝ"] if text in REAL_NUMBERS else Word(text)

    def _measured(self, node: Node) -> Node:
        """Parse the unit behind a scalar."""
        if (multiple := self._multiple()) is not None:
            node = Call("mul", (node, Num(Fraction(multiple))))
        if self._take("%"):
            return Measure(node, "%")
        if isinstance(node, Call) and node.name == "degree":
            return Measure(node.args[0], "°")
        start = self._position
        while (
            self.peek().kind in ("text", "sym", "/", "^", "number", "{", "}", "-", "*", "currency") and self._is_unit()
        ):
            self._position += 1
        if self._position == start:
            return node
        raw = self._text[self._tokens[start].start : self._tokens[self._position - 1].end]
        raw = TEXT.sub(r" \1 ", raw)
        unit = "%" if raw.strip().lower() in ("percent", "per cent") else parse_unit(raw)
        if unit is None or isinstance(node, Group | Word):
            raise NotParsed(f"no unit: {raw}")
        return Measure(node, unit) if unit else node

    def _is_unit(self) -> bool:
        """Return whether the tokens to the next separator may be a unit: they begin with text."""
        token = self.peek()
        before = self._tokens[self._position - 1].kind if self._position else ""
        return token.kind in ("text", "currency") or before in ("text", "/", "^", "{", "-", "*", "number", "}")

    def _multiple(self) -> int | None:
        token = self.peek()
        multiple = MULTIPLES.get(token.text.lower()) if token.kind == "text" else None
        if multiple is not None:
            self._position += 1
        return multiple

    def _sets(self) -> Node:
        node = self.sum()
        while (sign := self._take(*SET_SIGNS)) is not None:
            node = Group(SET_SIGNS[sign.kind], (node, self.sum()))
        return node

    def sum(self) -> Node:
        self._enter()
        node = self._product()
        while (sign := self._take("+", "-", "±", "∓")) is not None:
            self._count()
            other = self._product()
            match sign.kind:
                case "+":
                    node = Call("add", (node, other))
                case "-":
                    node = Call("add", (node, Call("neg", (other,))))
                case _:
                    node = Call("add", (node, Call(sign.kind, (other,))))
        self._depth -= 1
        return node

    def _product(self) -> Node:
        node = self._signed()
        while True:
            self._count()
            token = self.peek()
            if self._take("*"):
                node = Call("mul", (node, self._signed()))
            elif self._take("/"):
                node = Call("div", (node, self._signed()))
            elif token.kind in FACTORS:
                node = self._implied_product(node, token)
            else:
                return node

    def _implied_product(self, node: Node, token: Token) -> Node:
        """Multiply by the next factor; `1 1/2` and `1\\frac{1}{2}` are mixed numbers."""
        whole = node.args[0] if isinstance(node, Call) and node.name == "neg" else node
        is_whole = isinstance(whole, Num) and whole.value.denominator == 1 and not whole.digits
        if token.kind == "number" and self._tokens[self._position - 1].kind != "!":
            if not (is_whole and token.is_spaced and self.peek(1).kind == "/" and self.peek(2).kind == "number"):
                raise NotParsed("two numbers")
            top, _, below = self._power(), self._expect("/"), self._power()
            return _mixed(node, Call("div", (top, below)), is_required=True)
        factor = self._power()
        if is_whole and token.kind == "frac":
            return _mixed(node, factor, is_required=False)
        return Call("mul", (node, factor))

    def _signed(self) -> Node:
        sign = self._take("-", "+", "±", "∓", "currency")
        if sign is None:
            return self._power()
        self._enter()
        operand = self._signed()
        self._depth -= 1
        if sign.kind == "currency":
            return Measure(operand, CURRENCIES[sign.text])
        if sign.kind == "+":
            return operand
        if isinstance(operand, Measure):
            return Measure(Call("neg" if sign.kind == "-" else sign.kind, (operand.node,)), operand.unit)
        return Call("neg" if sign.kind == "-" else sign.kind, (operand,))

    def _power(self) -> Node:
        base = self._postfix(self._atom())
        if self._take("^") is None:
            return base
        if self._take("°") or self._braced_degree():
            return Call("degree", (base,))
        return self._postfix(Call("pow", (base, self._exponent())))

    def _braced_degree(self) -> bool:
        if [self.peek(ahead).kind for ahead in range(3)] != ["{", "°", "}"]:
            return False
        self._position += 3
        return True

    def _exponent(self) -> Node:
        self._enter()
        sign = self._take("-", "+")
        node = self._power()
        self._depth -= 1
        return Call("neg", (node,)) if sign is not None and sign.kind == "-" else node

    def _postfix(self, node: Node) -> Node:
        while (sign := self._take("!", "°")) is not None:
            self._count()
            node = Call("factorial" if sign.kind == "!" else "degree", (node,))
        return node

    def _atom(self) -> Node:
        token = self.peek()
        self._position += 1
        if token.number is not None:
            return token.number
        if token.kind in FIXED:
            return FIXED[token.kind]
        if token.kind in ENCLOSED:
            return self._enclosed(*ENCLOSED[token.kind])
        match token.kind:
            case "sym":
                return self._symbol(token.text)
            case "fun":
                return self._function(token.text)
            case "frac" | "binom":
                return Call("div" if token.kind == "frac" else "binom", (self._argument(), self._argument()))
            case "{":
                return self._braced()
            case "(" | "[" | "\\{" | "]":
                return self._bracket(token.kind)
            case "begin":
                return self._matrix(token.text)
        raise NotParsed(f"unexpected {token.kind}")

    def _braced(self) -> Node:
        node = self.sum()
        self._expect("}")
        return node

    def _symbol(self, name: str) -> Sym:
        if self._take("_") is None:
            return Sym(name)
        index = self._argument()
        if not isinstance(index, Num | Sym):
            raise NotParsed("an index that is no number or letter")
        return Sym(f"{name}_{index.value if isinstance(index, Num) else index.name}")

    def _argument(self) -> Node:
        """Parse the argument of a command: in braces, or one digit or letter."""
        self._enter()
        token = self.peek()
        if token.kind == "number" and token.number is not None and len(token.text) > 1 and token.text.isdecimal():
            digit, rest = token.text[0], token.text[1:]
            self._tokens[self._position] = Token("number", token.start + 1, token.end, rest, Num(Fraction(rest)))
            node: Node = Num(Fraction(digit))
        elif self._take("-") is not None:
            node = Call("neg", (self._atom(),))
        else:
            node = self._atom()
        self._depth -= 1
        return node

    def _function(self, name: str) -> Node:
        name = ALIASES.get(name, name)
        extra: tuple[Node, ...] = ()
        if name == "sqrt" and self._take("["):
            extra = (self.sum(),)
            self._expect("]")
        elif name == "log" and self._take("_"):
            extra = (self._argument(),)
        power = self._exponent() if self._take("^") else None
        if power == Call("neg", (Num(Fraction(1)),)) and name in INVERSE:
            name, power = INVERSE[name], None
        arguments = self._arguments(name)
        node = Call(name, (*arguments, *extra))
        return node if power is None else Call("pow", (node, power))

    def _arguments(self, name: str) -> tuple[Node, ...]:
        """Parse `(x)`, or the product that follows: `2x` of `sin 2x`."""
        self._enter()
        if self._take("("):
            items = self._items()
            self._expect(")")
        elif name in ("sqrt", "cbrt"):
            items = (self._argument(),)
        else:
            node = self._power()
            while self.peek().kind in FACTORS - {"fun", "("}:
                self._count()
                node = self._implied_product(node, self.peek())
            items = (node,)
        self._depth -= 1
        return items

    def _bracket(self, opening: str) -> Node:
        """Parse a parenthesis, tuple, interval or set."""
        self._enter()
        if opening == "\\{" and self._take("\\}"):
            items: tuple[Node, ...] = ()
            closing = "\\}"
        else:
            self._set_builder(opening)
            items = self._items()
            token = self._take("\\}") if opening == "\\{" else self._take(")", "]", "[")
            if token is None:
                raise NotParsed(f"unclosed {opening}")
            closing = token.kind
        self._depth -= 1
        if opening == "\\{":
            is_condition = len(items) == 1 and isinstance(items[0], Relation)
            return items[0] if is_condition else Group("set", items)
        kind = {"]": "(", "[": "["}.get(opening, opening) + {"[": ")"}.get(closing, closing)
        if len(items) == 1:
            if kind not in ("()", "[]") or opening == "]":
                raise NotParsed("an interval of one end")
            return items[0]
        return Group(kind, items)

    def _set_builder(self, opening: str) -> None:
        """Skip `x |` and `x :` of the set of all x with a condition."""
        if opening == "\\{" and self.peek().kind == "sym" and self.peek(1).kind in ("|", ":"):
            self._position += 2

    def _enclosed(self, closing: str, function: str) -> Node:
        node = self.sum()
        self._expect(closing)
        return Call(function, (node,))

    def _matrix(self, environment: str) -> Node:
        if environment not in ("pmatrix", "bmatrix", "matrix", "array", "Bmatrix", "smallmatrix"):
            raise NotParsed(f"the environment {environment}")
        self._enter()
        rows: list[tuple[Node, ...]] = []
        row = [self.sum()]
        while (token := self._take("&", "\\\\")) is not None:
            if token.kind == "\\\\":
                rows.append(tuple(row))
                row = []
                if self.peek().kind == "end":
                    break
            row.append(self.sum())
        if row:
            rows.append(tuple(row))
        self._expect("end")
        self._depth -= 1
        if len({len(row) for row in rows}) != 1:
            raise NotParsed("rows of different lengths")
        return Group("matrix", tuple(Group("row", row) for row in rows))


def _mixed(whole: Node, fraction: Node, *, is_required: bool) -> Node:
    """Return the sum of an integer and a proper fraction, or else their product unless a sum is required."""
    match fraction:
        case Call("div", (Num(top, 0), Num(below, 0))) if 0 < top < below and top.denominator == below.denominator == 1:
            if isinstance(whole, Call):
                return Call("neg", (Call("add", (whole.args[0], fraction)),))
            return Call("add", (whole, fraction))
    if is_required:
        raise NotParsed("two numbers")
    return Call("mul", (whole, fraction))
