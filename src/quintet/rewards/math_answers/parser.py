"""Parser of answers: recursive descent over tokens, in linear time and bounded depth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from quintet.rewards.math_answers.cursor import END, Cursor
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
from quintet.rewards.units import CURRENCIES

RELATIONS: Final = frozenset({"=", "≈", "!=", "<", "<=", ">", ">=", "in"})
UNNAMED: Final = RELATIONS - {"=", "≈", "in"}
UNNAMED_VARIABLE: Final = Sym("unnamed")
"""Left side of an inequality without one, such as `> 5`."""
SET_SIGNS: Final = {"∪": "union", "∩": "intersection", "∖": "difference"}
ENCLOSED: Final = {"|": ("|", "abs"), "⌊": ("⌋", "floor"), "⌈": ("⌉", "ceil")}
"""Closing sign and function of each opening one."""
FACTORS: Final = frozenset({"number", "sym", "fun", "frac", "binom", "(", "{", "⌊", "⌈"})
"""Tokens that multiply what is before them."""
INVERSE: Final = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
ALIASES: Final = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
DATE: Final = re.compile(r"[0-9]{4}([-/])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-/])[0-9]{1,2}\2[0-9]{4}")
CAPITALS: Final = re.compile(r"[A-Z]{2,}")
"""Letters of points or choices, whose order counts."""
NO_SOLUTION: Final = re.compile(r"no (?:real )?solutions?|(?:the )?empty set")
REAL_NUMBERS: Final = ("all real numbers", "all reals", "real numbers", "the real numbers")
FIXED: Final[Mapping[str, Node]] = {
    "…": ELLIPSIS,
    "∅": Group("set", ()),
    "ℝ": Group("()", (Call("neg", (INFINITY,)), INFINITY)),
    **{sign: Word(sign) for sign in "ℕℤℚℂ"},
}


def parse(text: str) -> Node:
    """Return the syntax tree of an answer.

    Raises:
        NotParsed: the text is outside of the grammar.
    """
    text = clean(text)
    if DATE.fullmatch(text):
        return Word(text)
    if CAPITALS.fullmatch(text):
        return Word(text.lower())
    parser = _Parser(text, tokenize(text))
    node = parser.answer()
    if parser.peek() is not END:
        raise NotParsed(f"unexpected {parser.peek().kind}")
    return node


class _Parser(Cursor):
    """Recursive-descent parser of answers, with a method for each level of precedence."""

    def answer(self) -> Node:
        items = self._items()
        return items[0] if len(items) == 1 else Group("list", items)

    def _items(self) -> tuple[Node, ...]:
        """Parse items between separators; `5, and 6` has one separator."""
        items = [self._item()]
        while self.take(","):
            while self.take(","):
                pass
            items.append(self._item())
        return tuple(items)

    def _item(self) -> Node:
        if self.peek().kind == "text":
            words = self._words()
            return Relation((words, self._item()), ("=",)) if self.take("=") else words
        if self.take("=", "≈"):
            return self.measured(self._sets())
        is_unnamed = self.peek().kind in UNNAMED
        terms, signs = [UNNAMED_VARIABLE if is_unnamed else self._compound()], []
        while (sign := self.take(*RELATIONS)) is not None:
            signs.append(sign.kind)
            terms.append(self.measured(self._sets()))
        return Relation(tuple(terms), tuple(signs)) if signs else terms[0]

    def _words(self) -> Node:
        words = []
        while (token := self.take("text", "sym")) is not None:
            words.append(token.text)
        text = " ".join(" ".join(words).lower().split()).strip(" .()")
        if NO_SOLUTION.fullmatch(text):
            return FIXED["∅"]
        return FIXED["ℝ"] if text in REAL_NUMBERS else Word(text)

    def _compound(self) -> Node:
        """Parse a scalar, or several with units, such as `5 ft 3 in`."""
        node = self.measured(self._sets())
        measures = [node]
        while isinstance(measures[-1], Measure) and self.peek().kind == "number":
            measures.append(self.measured(self._sets()))
        if len(measures) == 1:
            return node
        if not isinstance(measures[-1], Measure):
            raise NotParsed("a number behind a unit")
        return Group("compound", tuple(measures))

    def _sets(self) -> Node:
        node = self.sum()
        while (sign := self.take(*SET_SIGNS)) is not None:
            node = Group(SET_SIGNS[sign.kind], (node, self.sum()))
        return node

    def sum(self) -> Node:
        self.enter()
        node = self._product()
        while (sign := self.take("+", "-", "±", "∓")) is not None:
            self.count()
            other = self._product()
            match sign.kind:
                case "+":
                    node = Call("add", (node, other))
                case "-":
                    node = Call("add", (node, Call("neg", (other,))))
                case _:
                    node = Call("add", (node, Call(sign.kind, (other,))))
        self.depth -= 1
        return node

    def _product(self) -> Node:
        node = self._signed()
        while True:
            self.count()
            token = self.peek()
            if self.take("*"):
                node = Call("mul", (node, self._signed()))
            elif self.take("/"):
                node = Call("div", (node, self._signed()))
            elif token.kind in FACTORS:
                node = self._implied_product(node, token)
            else:
                return node

    def _implied_product(self, node: Node, token: Token) -> Node:
        """Multiply by the next factor; `1 1/2` and `1\\frac{1}{2}` are mixed numbers."""
        whole = node.args[0] if isinstance(node, Call) and node.name == "neg" else node
        is_whole = isinstance(whole, Num) and whole.value.denominator == 1 and not whole.digits
        if token.kind == "number" and self.tokens[self.position - 1].kind != "!":
            if not (is_whole and token.is_spaced and self.peek(1).kind == "/" and self.peek(2).kind == "number"):
                raise NotParsed("two numbers")
            top = self._power()
            _ = self.expect("/")
            below = self._power()
            return _mixed(node, Call("div", (top, below)), is_required=True)
        factor = self._power()
        if is_whole and token.kind == "frac":
            return _mixed(node, factor, is_required=False)
        return Call("mul", (node, factor))

    def _signed(self) -> Node:
        sign = self.take("-", "+", "±", "∓", "currency")
        if sign is None:
            return self._power()
        self.enter()
        operand = self._product() if sign.kind == "currency" else self._signed()
        self.depth -= 1
        if sign.kind == "currency":
            return Measure(operand, CURRENCIES[sign.text])
        if sign.kind == "+":
            return operand
        if isinstance(operand, Measure):
            return Measure(Call("neg" if sign.kind == "-" else sign.kind, (operand.node,)), operand.unit)
        if isinstance(operand, Call) and operand.name == "degree":
            return Call("degree", (Call("neg" if sign.kind == "-" else sign.kind, operand.args),))
        return Call("neg" if sign.kind == "-" else sign.kind, (operand,))

    def _power(self) -> Node:
        base = self._postfix(self._atom())
        if self.take("^") is None:
            return base
        if self.take("°") or self._braced_degree():
            return Call("degree", (base,))
        return self._postfix(Call("pow", (base, self._exponent())))

    def _braced_degree(self) -> bool:
        if [self.peek(ahead).kind for ahead in range(3)] != ["{", "°", "}"]:
            return False
        self.position += 3
        return True

    def _exponent(self) -> Node:
        self.enter()
        sign = self.take("-", "+")
        node = self._power()
        self.depth -= 1
        return Call("neg", (node,)) if sign is not None and sign.kind == "-" else node

    def _postfix(self, node: Node) -> Node:
        while (sign := self.take("!", "°")) is not None:
            self.count()
            node = Call("factorial" if sign.kind == "!" else "degree", (node,))
        return node

    def _atom(self) -> Node:
        token = self.peek()
        self.position += 1
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
        self.expect("}")
        return node

    def _symbol(self, name: str) -> Sym:
        if self.take("_") is not None:
            index = self._argument()
            if not isinstance(index, Num | Sym):
                raise NotParsed("an index that is no number or letter")
            name = f"{name}_{index.value if isinstance(index, Num) else index.name}"
        while self.take("'"):
            name += "'"
        return Sym(name)

    def _argument(self) -> Node:
        """Parse the argument of a command: in braces, or one digit or letter."""
        self.enter()
        token = self.peek()
        if token.kind == "number" and token.number is not None and len(token.text) > 1 and token.text.isdecimal():
            digit, rest = token.text[0], token.text[1:]
            self.tokens[self.position] = Token("number", token.start + 1, token.end, rest, Num(Fraction(rest)))
            node: Node = Num(Fraction(digit))
        elif self.take("-") is not None:
            node = Call("neg", (self._atom(),))
        else:
            node = self._atom()
        self.depth -= 1
        return node

    def _function(self, name: str) -> Node:
        name = ALIASES.get(name, name)
        extra: tuple[Node, ...] = ()
        if name == "sqrt" and self.take("["):
            extra = (self.sum(),)
            self.expect("]")
        elif name == "log" and self.take("_"):
            extra = (self._argument(),)
        power = self._exponent() if self.take("^") else None
        if power == Call("neg", (Num(Fraction(1)),)) and name in INVERSE:
            name, power = INVERSE[name], None
        arguments = self._arguments(name)
        node = Call(name, (*arguments, *extra))
        return node if power is None else Call("pow", (node, power))

    def _arguments(self, name: str) -> tuple[Node, ...]:
        """Parse `(x)`, or the product that follows: `2x` of `sin 2x`."""
        self.enter()
        if self.take("("):
            items = self._items()
            self.expect(")")
        elif name in ("sqrt", "cbrt"):
            items = (self._argument(),)
        else:
            node = self._power()
            while self.peek().kind in FACTORS - {"fun", "("}:
                self.count()
                node = self._implied_product(node, self.peek())
            items = (node,)
        self.depth -= 1
        return items

    def _bracket(self, opening: str) -> Node:
        """Parse a parenthesis, tuple, interval or set."""
        self.enter()
        if opening == "\\{" and self.take("\\}"):
            items: tuple[Node, ...] = ()
            closing = "\\}"
        else:
            self._set_builder(opening)
            items = self._items()
            token = self.take("\\}") if opening == "\\{" else self.take(")", "]", "[")
            if token is None:
                raise NotParsed(f"unclosed {opening}")
            closing = token.kind
        self.depth -= 1
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
        """Skip `x |`, `x :` and `x \\in \\mathbb{R} |` of the set of all x with a condition."""
        length = 4 if (self.peek(1).kind, self.peek(2).kind) == ("in", "ℝ") else 2
        if opening == "\\{" and self.peek().kind == "sym" and self.peek(length - 1).kind in ("|", ":"):
            self.position += length

    def _enclosed(self, closing: str, function: str) -> Node:
        node = self.sum()
        self.expect(closing)
        return Call(function, (node,))

    def _matrix(self, environment: str) -> Node:
        if environment in ("cases", "aligned"):
            return self._system()
        if environment not in ("pmatrix", "bmatrix", "matrix", "array", "Bmatrix", "smallmatrix"):
            raise NotParsed(f"the environment {environment}")
        self.enter()
        rows: list[tuple[Node, ...]] = []
        row = [self.sum()]
        while (token := self.take("&", "\\\\")) is not None:
            if token.kind == "\\\\":
                rows.append(tuple(row))
                row = []
                if self.peek().kind == "end":
                    break
            row.append(self.sum())
        if row:
            rows.append(tuple(row))
        self.expect("end")
        self.depth -= 1
        if len({len(row) for row in rows}) != 1:
            raise NotParsed("rows of different lengths")
        return Group("matrix", tuple(Group("row", row) for row in rows))

    def _system(self) -> Node:
        """Parse equations below one another as a list."""
        items = [*self._items()]
        while self.take("\\\\") and self.peek().kind != "end":
            items += self._items()
        self.expect("end")
        return Group("list", tuple(items))


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
