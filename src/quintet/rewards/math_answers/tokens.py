"""Tokens of an answer in LaTeX or plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from quintet.package_files import read_yaml
from quintet.rewards.answer_extraction import closing_brace
from quintet.rewards.math_answers.nodes import NotParsed, Num
from quintet.rewards.numbers import LITERAL, SIGNS, SUPERSCRIPT, SUPERSCRIPTS, read_decimal
from quintet.rewards.units import parse_unit

MAX_CHARS: Final = 1000
VOCABULARY: Final = read_yaml(__file__, "vocabulary.yaml")
FUNCTIONS: Final = frozenset(VOCABULARY["functions"])
NAMES: Final = {
    **{name: f"sym {name}" for name in VOCABULARY["letters"]},
    **{name: f"fun {name}" for name in FUNCTIONS},
    **{name: f"sym {sign}" for name, sign in VOCABULARY["constants"].items()},
}
"""Token of each name of a symbol or function, as a command or a word."""
COMMANDS: Final = NAMES | VOCABULARY["commands"]
IGNORED: Final = frozenset(VOCABULARY["ignored"])
SIGN_TOKENS: Final = {sign: sign for sign in "+-*/^_!%=≈<>(),[]{}&':±∓∪∩∖∅…°|ℝℕℤℚℂ"} | VOCABULARY["signs"]
TOKEN: Final = re.compile(
    r"(?P<space>(?:\s|\\[,;:! ]|~)+)"
    r"|(?P<based>\(?(?P<digits>[0-9][0-9A-F]*)\)?_(?:\{(?P<base>[0-9]{1,2})\}|(?P<base_digit>[0-9]{1,2}))(?![0-9]))"
    r"|(?P<number>(?=[0-9]|\.[0-9]))"
    r"|(?P<dots>\.{3})"
    r"|\\(?:(?:mathbb|Bbb)\s*\{?(?P<numbers>[RNZQC])\}?|mathbf\s*\{R\}(?P<bold_reals>))"
    r"|\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname|rm|mathbf|textup|textnormal)\s*\{(?P<text>[^{}]*)\}"
    r"|\\(?:begin|end)\s*\{(?P<environment>[a-zA-Z]+\*?)\}(?:\{[lcr|]+\})?"
    r"|\\(?P<command>[a-zA-Z]+)"
    r"|(?P<escaped>\\[{}%$|\\])"
    r"|(?P<speed>(?<=[0-9 }])m\s*/\s*s(?:\^\{?2\}?)?(?![A-Za-z]))"
    r"|(?P<two><=|>=|!=|\*\*)"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<sign>.)",
    re.DOTALL,
)
NUMBER_SETS: Final = dict(zip("RNZQC", "ℝℕℤℚℂ", strict=True))
UNWRAPPED: Final = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mbox|mathbf|boldsymbol|bm|underline)\s*"
    r"\{(\s*(?:(?:\\?\$|[-+€£~ ])*[0-9][^{}]*|\\?\$|[€£:,])\s*)\}"
    r"|\\(?:mathbf|boldsymbol|bm)\s*\{\s*([a-z])\s*\}|\\(?:vec|hat)\s*\{\s*\\?([ijk])(?:math)?\s*\}"
)
"""Text commands around a number, a sign or the letter of a vector."""
CONJUNCTION: Final = re.compile(r"\\text\s*\{([^{}]*[^{} ])\s+(and|or)\s*\}")
NAME: Final = re.compile("|".join([*sorted(NAMES, key=len, reverse=True), "[A-Za-z]"]))
NAMED_ARGUMENT: Final = re.compile(f"(?:{'|'.join(sorted(FUNCTIONS, key=len, reverse=True))}|pi)[a-z]?$")
UNGROUPED: Final = re.compile(r"[0-9]*(?:\.[0-9]*)?")
SEPARATED: Final = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|,\\!)(?=[0-9]{3}(?![0-9]))")
SPACE_AROUND: Final = re.compile(r"^(?:\s|\\[,;:! ]|~)+|(?:\s|\\[,;:! ]|~)+$|(?<!\\)\\$")
MAX_SPACE: Final = 12
"""Characters of space between a number and its unit."""
SYSTEM: Final = re.compile(
    r"\\left\s*\\\{\s*\\begin\{(array|aligned|matrix)\}(?:\{[lcr|]+\})?(.*)\\end\{\1\}\s*\\right\s*\.", re.DOTALL
)
"""Equations below one another behind a brace."""
WORD_PRODUCT: Final = 3
"""Unknown words of more letters are text, and no products of variables."""
PLAIN_WORDS: Final = frozenset({"and", "or", *VOCABULARY["words"]})


@dataclass(frozen=True, slots=True)
class Token:
    """Token with its place in the text; `number` and `text` belong to the kinds of these names."""

    kind: str
    start: int
    end: int
    text: str = ""
    number: Num | None = None
    is_spaced: bool = False


def clean(text: str) -> str:
    """Return an answer without mathematics delimiters and with ASCII signs and exponents.

    Raises:
        NotParsed: it is too long.
    """
    if len(text) > MAX_CHARS:
        raise NotParsed("too long")
    if not text.isascii():
        text = text.translate(SIGNS)
        text = SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    for delimiter in (r"\(", r"\)", r"\[", r"\]", "**", "`") if "\\" in text or "*" in text or "`" in text else ():
        if delimiter != "**" or text.strip().startswith("**"):
            text = text.replace(delimiter, "")
    if "\\" in text:
        text = unwrapped(text)
        if system := SYSTEM.fullmatch(text.strip(" $")):
            text = rf"\begin{{cases}}{system[2]}\end{{cases}}"
        text = CONJUNCTION.sub(r"\\text{\1}\\text{\2}", text)
    text = text.replace(r"\$", "¤")
    if text.count("$") % 2 == 0:
        text = text.replace("$", "")
    text = _bare(SEPARATED.sub("", text.replace("$", "¤")))
    return text if text.endswith("..") else _bare(text.removesuffix("."))


def unwrapped(text: str) -> str:
    """Return a text without text commands around numbers, signs and letters of vectors."""
    return UNWRAPPED.sub(lambda match: match[1] or f"{{{match[2] or match[3]}}}", text)


def _bare(text: str) -> str:
    """Return a text without space around it and without braces that enclose it as a whole; `{1, 2}` is a set."""
    text = SPACE_AROUND.sub("", text)
    while text.startswith("{") and closing_brace(text, 1) == len(text) - 1:
        text = SPACE_AROUND.sub("", text[1:-1])
        number = LITERAL.match(text.lstrip("-+ "))
        if _has_outer_comma(text.lstrip("-+ ")[number.end() if number else 0 :]):
            return f"\\{{{text}\\}}"
    return text


def _has_outer_comma(text: str) -> bool:
    """Return whether a text has a comma outside of brackets."""
    depth = 0
    for sign in text:
        depth += (sign in "{([") - (sign in "})]")
        if sign == "," and depth == 0:
            return True
    return False


def tokenize(text: str) -> list[Token]:
    """Return the tokens of a cleaned text.

    Raises:
        NotParsed: it has a command that is unknown.
    """
    return list(_tokens(text))


def _tokens(text: str) -> Iterator[Token]:
    position, depth, is_spaced = 0, 0, False
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise NotParsed(text[position])
        if match["number"] is not None:
            token = _number(text, position, depth)
            position = token.end
            yield _spaced(token, is_spaced)
        elif match["space"] is None:
            for token in _tokens_of(match):
                depth += (token.kind in ("(", "[", "\\{")) - (token.kind in (")", "]", "\\}"))
                yield _spaced(token, is_spaced)
        position = max(position, match.end())
        is_spaced = match["space"] is not None


def _spaced(token: Token, is_spaced: bool) -> Token:
    return Token(token.kind, token.start, token.end, token.text, token.number, is_spaced) if is_spaced else token


def _number(text: str, position: int, depth: int) -> Token:
    """Return a number token; commas between brackets separate."""
    literal = LITERAL.match(text, position)
    limit = text
    if depth and literal is not None and literal["separator"] == ",":
        plain = UNGROUPED.match(text, position)
        limit = text[: plain.end() if plain is not None else position]
    read = read_decimal(limit, position, power_of_ten=False)
    if read is None:
        raise NotParsed("a number out of range")
    value, end = read
    written = text[position:end]
    mantissa, _, exponent = written.lower().partition("e")
    whole, point, decimals = mantissa.partition(".")
    if not point or not decimals.isdecimal():
        return Token("number", position, end, written, Num(value))
    last_place = Fraction(10) ** (int(exponent or 0) - len(decimals))
    return Token("number", position, end, written, Num(value, len((whole + decimals).lstrip("0")), last_place))


def _tokens_of(match: re.Match[str]) -> Iterator[Token]:
    start, end = match.span()
    if match["based"] is not None:
        yield Token("number", start, end, "", Num(_in_base(match)))
    elif match["text"] is not None and _is_unit_behind_number(match, match["text"].strip()):
        yield Token("text", start, end, match["text"].strip())
    elif match["text"] is not None:
        yield from _text(match["text"].strip(), start, end)
    elif match["numbers"] is not None or match["bold_reals"] is not None:
        yield Token(NUMBER_SETS[match["numbers"] or "R"], start, end)
    elif match["environment"] is not None:
        yield Token("begin" if match[0].startswith("\\begin") else "end", start, end, match["environment"])
    elif match["command"] is not None:
        yield from _command(match["command"], start, end)
    elif match["speed"] is not None or (match["word"] is not None and _is_unit_behind_number(match, match["word"])):
        yield Token("text", start, end, match[0])
    elif match["word"] is not None:
        yield from _word(match["word"], start, end)
    else:
        yield _sign(match, start, end)


def _is_unit_behind_number(match: re.Match[str], word: str) -> bool:
    before = SPACE_AROUND.sub("", match.string[max(match.start() - MAX_SPACE, 0) : match.start()])[-1:]
    is_behind = before.isdigit() or (bool(before) and before in "})!")
    return is_behind and len(word) > 1 and bool(parse_unit(word, known_only=True))


def _sign(match: re.Match[str], start: int, end: int) -> Token:
    if match["dots"] is not None:
        return Token("…", start, end)
    if match["two"] is not None:
        return Token("^" if match["two"] == "**" else match["two"], start, end)
    if match["escaped"] is not None:
        return Token({"\\%": "%", "\\|": "|"}.get(match["escaped"], match["escaped"]), start, end)
    if match["sign"] in "¤€£¥₹":
        return Token("currency", start, end, match["sign"].replace("¤", "$"))
    kind = SIGN_TOKENS.get(match["sign"])
    if kind is None:
        raise NotParsed(match["sign"])
    return _named(kind, start, end)


def _named(kind: str, start: int, end: int) -> Token:
    name, _, text = kind.partition(" ")
    return Token(name or " ", start, end, text)


def _in_base(match: re.Match[str]) -> Fraction:
    base = int(match["base"] or match["base_digit"])
    try:
        return Fraction(int(match["digits"], base)) if base >= 2 else Fraction(int(""))
    except ValueError:
        raise NotParsed(f"digits of base {base}") from None


def _text(text: str, start: int, end: int) -> Iterator[Token]:
    """Yield the content of a text command: `and`, `or`, a symbol, or text."""
    if text.lower() in ("and", "or", ","):
        yield Token(",", start, end)
    elif len(text) == 1 and text in "ei":
        yield Token("sym", start, end, text)
    elif text in FUNCTIONS:
        yield Token("fun", start, end, text)
    elif text:
        yield Token("text", start, end, text)


def _command(name: str, start: int, end: int) -> Iterator[Token]:
    if name in IGNORED:
        return
    if name not in COMMANDS:
        raise NotParsed(f"the command {name}")
    yield _named(COMMANDS[name], start, end)


def _word(word: str, start: int, end: int) -> Iterator[Token]:
    """Yield a known name, a separator, the letters of a product such as `xy`, or text."""
    if word in NAMES:
        yield _named(NAMES[word], start, end)
    elif word.lower() in ("and", "or"):
        yield Token(",", start, end)
    elif word.lower() in PLAIN_WORDS or not (len(word) <= WORD_PRODUCT or NAMED_ARGUMENT.match(word)):
        yield Token("text", start, end, word)
    else:
        for part in NAME.finditer(word):
            yield _named(NAMES.get(part[0], f"sym {part[0]}"), start + part.start(), start + part.end())
