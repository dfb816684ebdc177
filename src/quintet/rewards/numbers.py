r"""The grammar of numbers in answers, read exactly as fractions, in time linear in the length of the text.

A number is an optional sign and one of

- decimals: `12`, `1.5`, `.5`, `5.`, with groups of three digits separated by commas, `{,}`, `\,`, underscores or spaces
  (`1,234,567`; `8,12` and the Indian `12,34,567` are no numbers), with repeating digits (`0.1\overline{6}`, `0.(3)`);
- scientific notation: `1.6e-19`, `1.6\times10^{-19}`, `1.6·10⁻¹⁹`, `10^{-3}`;
- fractions and mixed numbers: `3/4`, `\frac34`, `1 1/2`, `1\frac12`, `1½`.

A quantity is a number with a currency, a percent sign or a unit. `0.333…` is no number: its digits are not all given.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from quintet.package_files import read_yaml
from quintet.rewards import answer_extraction
from quintet.rewards.units import CURRENCIES, MULTIPLES, parse_unit

MAX_CHARS: Final = 2000
"""Longer texts are no numbers."""
MAX_EXPONENT: Final = 1000
MAX_PRINTED_BITS: Final = 10_000
"""Python prints no integers of more than 4,300 digits."""

LITERAL: Final = re.compile(
    r"(?:(?P<grouped>[1-9][0-9]{0,2}(?:(?P<separator>[,_])[0-9]{3}(?:(?P=separator)[0-9]{3})*(?![0-9])"
    r"|(?:[ ][0-9]{3})+(?![0-9]|\s*/)))"
    r"|(?P<digits>[0-9]+)|(?=\.[0-9]))"
    r"(?:\.(?P<decimals>[0-9]*)(?:\\overline\{?(?P<over>[0-9]+)\}?|\\dot\{?(?P<dot>[0-9])\}?|\((?P<bracket>[0-9]+)\))?)?"
)
"""An unsigned decimal number."""
ELLIPSES: Final = ("..", "…", r"\ldots", r"\dots")
SCIENTIFIC: Final = re.compile(
    r"(?:[eE](?P<e>[-+]?[0-9]+)|\s*(?:\\times|\\cdot|[×·⋅*x])\s*10\s*(?:\^|\*\*)\s*(?:\{\s*(?P<braced>[-+]?[0-9]+)\s*\}"
    r"|\(\s*(?P<bracketed>[-+]?[0-9]+)\s*\)|(?P<bare>[-+]?[0-9]+)))(?!\.?[0-9])"
)
POWER_OF_TEN: Final = re.compile(
    r"10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?[0-9]+)\s*\}|\(\s*([-+]?[0-9]+)\s*\)|([-+]?[0-9]+))(?!\.?[0-9]|[!^])"
)
FRACTION: Final = re.compile(
    r"\\[dtc]?frac\s*(?:\{\s*(?P<top>[-+]?[0-9][0-9,.]*)\s*\}|(?P<top1>[0-9]))\s*"
    r"(?:\{\s*(?P<below>[-+]?[0-9][0-9,.]*)\s*\}|(?P<below1>[0-9]))"
)
SLASH: Final = re.compile(r"\s*/\s*(?P<sign>[-+]?)(?=[0-9.])")
PLAIN_FRACTION: Final = re.compile(r"\s+([0-9]{1,300})\s*/\s*([0-9]{1,300})(?!\.?[0-9])")
SUPERSCRIPTS: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
SUPERSCRIPT: Final = re.compile("[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
SIGNS: Final = str.maketrans("−–‒﹣－＋０１２３４５６７８９．，％\u00a0\u2009\u202f\u2007", "-----+0123456789.,%    ")
COMMANDS: Final[Mapping[str, str]] = read_yaml(__file__)
TEXT: Final = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|rm|bf)\s*\{([^{}]*)\}")
WRAPPERS: Final = (*answer_extraction.WRAPPERS, ("**", "**"), ("*", "*"), ("`", "`"))
APPROXIMATELY: Final = re.compile(
    r"(?:(?:approximately|approx\.?|about|around|roughly|exactly|nearly|only|just|equals|=|≈|\\approx|\\simeq|≃|~)\s*)+",
    re.IGNORECASE,
)
QUANTITY_PREFIX: Final = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<currency>US\$|USD|EUR|GBP|[$€£¥₹])?\s*(?P<sign_behind>[-+]?)\s*"
)
PERCENT: Final = re.compile(r"\s*(?:%|percent\b|per\s+cent\b|percentage\b)(?:\s+points?)?", re.IGNORECASE)
MULTIPLE: Final = re.compile(rf"\s*\b({'|'.join(MULTIPLES)})s?\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Quantity:
    """Number as written, before a percent sign if there is one, and its unit in the form of `parse_unit`."""

    number: Fraction
    is_percent: bool = False
    unit: str = ""

    @property
    def value(self) -> Fraction:
        """The number; of `50%` a half."""
        return self.number / 100 if self.is_percent else self.number

    def values(self, other: Quantity) -> Iterator[tuple[Fraction, Fraction]]:
        """Yield the pairs of numbers to compare: `50%` is 50 and 0.5 if only one of the two is a percentage."""
        yield self.number, other.number
        if self.is_percent != other.is_percent:
            yield self.value, other.value

    def has_unit_of(self, other: Quantity) -> bool:
        """Return whether the units agree; no unit agrees with each."""
        return self.unit == other.unit or not (self.unit and other.unit)


def same_number(a: Quantity, b: Quantity) -> bool:
    """Return whether two quantities are equal."""
    return a.has_unit_of(b) and any(x == y for x, y in a.values(b))


def parse_number(text: str) -> Fraction | None:
    r"""Parse a number without a unit, which may have a currency or percent sign; None if the text is anything else.

    >>> parse_number("1,250.50"), parse_number("-1 1/2"), parse_number(r"50\%"), parse_number("10-20")
    (Fraction(2501, 2), Fraction(-3, 2), Fraction(1, 2), None)
    """
    quantity = parse_quantity(text)
    return None if quantity is None or quantity.unit not in {"", *CURRENCIES.values()} else quantity.value


def parse_quantity(text: str) -> Quantity | None:
    r"""Parse a number with its unit; None if the text is anything else.

    >>> parse_quantity(r"-\$5"), parse_quantity("18 dollars").unit, parse_quantity(r"5\text{ cm}").unit
    (Quantity(number=Fraction(-5, 1), is_percent=False, unit='$'), '$', 'cm')
    """
    if len(text) > MAX_CHARS:
        return None
    if text.isdecimal() and text.isascii():
        return Quantity(Fraction(int(text)))
    text = unwrap(normalize(text))
    text = text[approximately.end() :] if (approximately := APPROXIMATELY.match(text)) else text
    read = read_quantity(text, 0)
    if read is None:
        return None
    quantity, rest = read[0], text[read[1] :].strip(" ,;")
    unit = parse_unit(rest) if rest else ""
    return None if unit is None else Quantity(quantity.number, quantity.is_percent, quantity.unit or unit)


def number_text(value: Fraction, text: str) -> str:
    """Return a number in lowest terms, or the text it was read from if it is too long to print."""
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    return str(value) if bits <= MAX_PRINTED_BITS else text


def normalize(text: str) -> str:
    """Return a text with plain signs, superscripts as powers, and the contents of text commands."""
    if not text.isascii():
        text = "".join(map(_ascii_fraction, text)).translate(SIGNS)
        text = SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    if "\\" in text or "~" in text or "{,}" in text:
        text = TEXT.sub(r" \1 ", text)
        for command, plain in COMMANDS.items():
            text = text.replace(command, plain)
    return text.strip()


def _ascii_fraction(sign: str) -> str:
    """Return ` 1/2` for `½`, and other characters as they are."""
    if sign.isascii() or not unicodedata.decomposition(sign).startswith("<fraction>"):
        return sign
    return " " + unicodedata.normalize("NFKC", sign).replace("\u2044", "/")


def unwrap(text: str) -> str:
    """Return a text without the signs that enclose it as a whole and without a final period."""
    for opening, closing in WRAPPERS:
        text = _without_period(text)
        inner = text[len(opening) : len(text) - len(closing)]
        if f"{opening}{inner}{closing}" == text and opening not in inner and closing not in inner:
            text = inner
    return _without_period(text)


def _without_period(text: str) -> str:
    text = text.strip()
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


def read_number(text: str, start: int) -> tuple[Fraction, int] | None:
    """Return the unsigned number that begins at `start` of a normalized text, and the position behind it."""
    if (fraction := FRACTION.match(text, start)) is not None:
        value = _ratio(fraction)
        return None if value is None else (value, fraction.end())
    if (power := POWER_OF_TEN.match(text, start)) is not None:
        exponent = int((power[1] or power[2] or power[3])[:9])
        return None if abs(exponent) > MAX_EXPONENT else (Fraction(10) ** exponent, power.end())
    literal = read_decimal(text, start)
    if literal is None:
        return None
    return _mixed(text, *literal) or _divided(text, *literal)


def read_decimal(text: str, start: int, *, power_of_ten: bool = True) -> tuple[Fraction, int] | None:
    """Return the unsigned decimal number that begins at `start`, with its exponent, and the position behind it."""
    match = LITERAL.match(text, start)
    if match is None or match.end() - start > MAX_CHARS:
        return None
    if match["decimals"] and text.startswith(ELLIPSES, match.end()):
        return None
    value, end = _decimal_value(match), match.end()
    scientific = SCIENTIFIC.match(text, end)
    if scientific is None or not (power_of_ten or scientific["e"]):
        return value, end
    digits = next(group for group in scientific.groups() if group is not None)
    if len(digits) > len(str(MAX_EXPONENT)) + 1 or abs(int(digits)) > MAX_EXPONENT:
        return None
    return value * Fraction(10) ** int(digits), scientific.end()


def _decimal_value(match: re.Match[str]) -> Fraction:
    whole = (match["grouped"] or match["digits"] or "0").replace(match["separator"] or " ", "")
    decimals = match["decimals"] or ""
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    repeating = match["over"] or match["dot"] or match["bracket"]
    if repeating:
        value += Fraction(int(repeating), 10 ** len(decimals) * (10 ** len(repeating) - 1))
    return value


def _ratio(match: re.Match[str]) -> Fraction | None:
    top, below = (_signed(match[name] or match[f"{name}1"]) for name in ("top", "below"))
    return None if top is None or not below else top / below


def _signed(text: str) -> Fraction | None:
    digits = text.lstrip("-+")
    literal = read_decimal(digits, 0)
    if literal is None or literal[1] < len(digits):
        return None
    return -literal[0] if text.startswith("-") else literal[0]


def _mixed(text: str, whole: Fraction, end: int) -> tuple[Fraction, int] | None:
    r"""Return the mixed number `1 1/2` or `1\frac{1}{2}`, None if there is no proper fraction behind the integer."""
    if whole.denominator != 1:
        return None
    if (plain := PLAIN_FRACTION.match(text, end)) is not None:
        top, below = int(plain[1]), int(plain[2])
        return (whole + Fraction(top, below), plain.end()) if 0 < top < below else None
    after = end + len(text[end : end + 4]) - len(text[end : end + 4].lstrip())
    fraction = FRACTION.match(text, after)
    part = None if fraction is None else _ratio(fraction)
    return None if fraction is None or part is None or not 0 < part < 1 else (whole + part, fraction.end())


def _divided(text: str, value: Fraction, end: int) -> tuple[Fraction, int] | None:
    slash = SLASH.match(text, end)
    if slash is None:
        return value, end
    below = read_decimal(text, slash.end())
    if below is None or below[0] == 0:
        return None
    return value / (-below[0] if slash["sign"] == "-" else below[0]), below[1]


def read_quantity(text: str, start: int) -> tuple[Quantity, int] | None:
    """Return the quantity that begins at `start` of a normalized text, without a unit behind it, and its end."""
    prefix = QUANTITY_PREFIX.match(text, start)
    number = None if prefix is None else read_number(text, prefix.end())
    if prefix is None or number is None or (prefix["sign"] and prefix["sign_behind"]):
        return None
    value, end = number
    if (multiple := MULTIPLE.match(text, end)) is not None:
        value, end = value * MULTIPLES[multiple[1].lower()], multiple.end()
    percent = PERCENT.match(text, end)
    value = -value if "-" in (prefix["sign"], prefix["sign_behind"]) else value
    quantity = Quantity(value, percent is not None, CURRENCIES.get(prefix["currency"] or "", ""))
    return quantity, end if percent is None else percent.end()
