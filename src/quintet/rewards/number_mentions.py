"""Numbers in prose, and the one that is the answer. All functions take time linear in the length of the text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from quintet.rewards.numbers import APPROXIMATELY, Quantity, normalize, parse_quantity, read_quantity
from quintet.rewards.units import DEGREES, parse_unit

MAX_SEARCHED_CHARS: Final = 2000
"""Characters at the end of a text in which the last number is searched."""
REMARK: Final = re.compile(r"(?<!\\)\((?=[^()]*(?:[A-Za-z]{2}|[A-Za-z]\.[A-Za-z]\.))[^()\\]*\)")
BOXED: Final = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}")
PRECISION: Final = re.compile(
    r"\b(?:(?:rounded|correct|accurate|given|expressed|up)\s+)*to\s+"
    r"(?:the\s+nearest\s+[\w.-]+(?:\s+of\s+an?\s+\w+)?"
    r"|(?:[0-9]|one|two|three|four|five|six)\s*(?:decimals?|d\.?p\b|significant|sig|digits?|places?)"
    r"(?:[\w. ]*(?:places?|digits?|figures?|figs?))?)",
    re.IGNORECASE,
)
"""How precise a number is given to be; the digits in it are not the answer."""
START: Final = re.compile(r"[0-9]|\.[0-9]|\\[dtc]?frac")
GLUED: Final = re.compile(r"(?:[A-Za-z_^\\]|[A-Za-z]-|\^\{?[-+]?|_\{)$")
"""What makes digits behind it a part of a name, an exponent or an index."""
OPERATOR_BEFORE: Final = re.compile(
    r"(?:[*/×÷^±≤≥]|\s[<>]=?|(?<![A-Za-z/])[A-Za-z0-9][<>]|\b(?:minus|negative)|[A-Za-z0-9]\(|\}\s*\{|\\[a-zA-Z]+\s*\{?|(?:^|[^A-Za-z])[A-Za-z]\s*[-+]|[0-9)}\]]\s*[-+])\s*$"
)
"""What makes a number behind it a part of an expression; `- 5` is an item of a list of lines."""
PREFIX_BEFORE: Final = re.compile(
    r"(?:[=≈]\s*[-+]\s*|(?<![A-Za-z0-9_)}\]])[-+])?(?:US\$|USD ?|EUR ?|GBP ?|[$€£¥₹])?(?:(?<=[$€£¥₹])[-+])?$"
)
JOIN: Final = re.compile(
    r"(?:\s*(?:[-+*/×÷^:<>≤≥±]|\\(?:pm|[lg]eq?)\b|\\times|\\cdot|\\div|,(?=\S)|;)|\s+(?:to|or|and|through|times|plus|minus|x|vs\.?)\b)"
    r"\s*[-+]?\s*[$€£¥₹]?[-+]?(?=[0-9]|\.[0-9]|\\[dtc]?frac)"
)
COMMA_JOIN: Final = re.compile(r"\s*,\s*[-+]?[$€£¥₹]?(?=[0-9]|\.[0-9]|\\[dtc]?frac)")
LETTERS: Final = re.compile(r"[A-Za-z]+")
WORD_BEHIND: Final = re.compile(r"\s+(?!in\b)([A-Za-z]+(?:\^\{?[23]\}?|[23]\b)?)")
SUM_BETWEEN: Final = re.compile(r"(?:\b(?:and|or|plus|minus|times|to)\b|[-+*/<>])\s*$")
ORDINALS: Final = frozenset({"st", "nd", "rd", "th"})
NO_NUMBER_BEHIND: Final = re.compile(r"\\[a-zA-Z]|[\^_(]|[0-9.]*[0-9]|\s*(?:[≤≥]|[<>]=?\s*[A-Za-z0-9]\b)")
LEADING: Final = re.compile(r"[\s*$`(\[{]*")
TRAILING_REMARK: Final = re.compile(r"\s\((?=[^()]*[a-z]{4})[^()\\]*\)\.?$")
"""A remark behind an answer that may have other parentheses."""
APPROXIMATION: Final = re.compile(r"≈|\\approx\b|\\simeq\b|≃")
NO_SINGLE_NUMBER: Final = re.compile(
    r"[\s$]*(?:[<>≤≥≠]|\\(?:[lg]t|[lg]eq?(?:slant)?|neq?)(?![a-z]))"
    r"|[^=]*\b[A-Za-z]\s*=[^=]*(?:[,;]|\band\b|\bor\b)\s*[A-Za-z]\s*="
)
"""An inequality such as `< 5`, or the values of several variables."""
FACTORIAL: Final = re.compile(r"[^\sA-Za-z]*!")
EMPHASIS: Final = re.compile(r"(?<![\w)*])(\*{1,3}|_{1,2}|`)(?=\S)([^*_`\n]+?)(?<=\S)\1(?![\w(*])")


@dataclass(frozen=True, slots=True)
class Mention:
    """A number in prose from `start` to `end`; `quantity` is None for a range, list or expression such as `10-20`."""

    start: int
    end: int
    quantity: Quantity | None


def find_quantities(text: str, *, is_list: bool = False) -> list[Mention]:
    """Return the numbers of a text in their order, without ordinals and digits of names, exponents and remarks.

    A range, list or expression (`10-20`, `8,12`, `2+3`, `5 or 6`) is one mention without a quantity.

    Args:
        text: any text
        is_list: whether numbers separated by a comma and a space are a list too
    """
    text = _without_remarks(text)
    mentions, position = [], 0
    while (digit := START.search(text, position)) is not None:
        mention = _mention(text, digit.start(), position, is_list)
        position = max(mention.end, digit.end())
        if mention.start >= 0:
            mentions.append(mention)
    return mentions


def _mention(text: str, digit: int, lowest: int, is_list: bool) -> Mention:
    """Return what the number at `digit` is part of; `start` is -1 if it is part of a word."""
    before = text[max(lowest, digit - 12) : digit]
    prefix = PREFIX_BEFORE.search(before)
    start = digit - (len(prefix[0].lstrip()) if prefix else 0)
    before = before[: len(before) - (digit - start)]
    read = read_quantity(text, start)
    end = read[1] if read is not None else _end_of_digits(text, digit)
    if GLUED.search(before) and not text.startswith("\\", digit):
        return Mention(-1, _end_of_digits(text, digit), None)
    word = LETTERS.match(text, end)
    if word is not None and word[0].lower() in ORDINALS:
        return Mention(-1, word.end(), None)
    quantity = None if read is None or OPERATOR_BEFORE.search(before) else read[0]
    return _joined(text, *_with_unit(text, Mention(start, end, quantity)), is_list)


def _end_of_digits(text: str, start: int) -> int:
    end = start + 1
    while end < len(text) and (text[end].isdigit() or text[end] in ".,"):
        end += 1
    return end


def _with_unit(text: str, mention: Mention) -> tuple[int, int, Quantity | None]:
    """Return a mention with the unit behind its number, without a quantity if another sign or word is attached."""
    quantity, end = mention.quantity, mention.end
    attached = LETTERS.match(text, end)
    word = attached or WORD_BEHIND.match(text, end)
    unit = parse_unit(word[word.lastindex or 0], known_only=True) if word is not None else None
    if (attached is not None and not unit) or NO_NUMBER_BEHIND.match(text, end):
        return mention.start, attached.end() if attached else end, None
    if quantity is None or word is None or not unit:
        return mention.start, end, quantity
    return mention.start, word.end(), Quantity(quantity.number, quantity.is_percent, quantity.unit or unit)


def _joined(text: str, start: int, end: int, quantity: Quantity | None, is_list: bool) -> Mention:
    """Return a mention with the numbers that belong to the same range, list or expression."""
    is_list = is_list or text[max(start - 1, 0) : start] in ("(", "[")
    while (join := JOIN.match(text, end) or (COMMA_JOIN.match(text, end) if is_list else None)) is not None:
        part = read_quantity(text, join.end())
        end = part[1] if part is not None else _end_of_digits(text, join.end())
        quantity = None
    return Mention(start, end, quantity)


def _without_remarks(text: str) -> str:
    """Return a normalized text without emphasis, bracketed remarks, and how precise a number is."""
    return PRECISION.sub("", REMARK.sub("", EMPHASIS.sub(r"\2", BOXED.sub(r" \1 ", _with_signs(normalize(text))))))


def without_trailing_remark(answer: str) -> str:
    """Return an answer without a bracketed remark at its end, and without how precise it is."""
    return PRECISION.sub("", TRAILING_REMARK.sub("", answer)).strip()


def _with_signs(text: str) -> str:
    return DEGREES.sub("° ", text).replace(r"\approx", "≈") if "\\" in text else text


def read_answer(answer: str) -> Quantity | None:
    """Return the number of an extracted answer.

    The answer is a number; or ends with `= number`; or begins with one that words follow (`57, as shown in step 2`); or
    its last number counts (`The total is 57`). A range, list or expression is no number.
    """
    if (whole := parse_quantity(answer)) is not None:
        return whole
    answer = answer[:MAX_SEARCHED_CHARS]
    if NO_SINGLE_NUMBER.match(answer):
        return None
    result = answer.rpartition("=")[2] if "=" in answer else APPROXIMATION.split(answer)[-1]
    if result != answer and (stated := parse_quantity(result)) is not None:
        return stated
    mentions = find_quantities(answer, is_list=True)
    if not mentions or FACTORIAL.fullmatch(answer.strip()):
        return None
    text = _without_remarks(answer)
    before = LEADING.sub("", APPROXIMATELY.sub("", LEADING.sub("", text[: mentions[0].start], count=1)))
    if before:
        return mentions[-1].quantity
    is_sum = len(mentions) > 1 and SUM_BETWEEN.search(text[mentions[0].end : mentions[1].start])
    return None if is_sum else mentions[0].quantity


def read_last(text: str) -> Quantity | None:
    """Return the last number of the end of a text; None if there is none, or it is a range, list or expression."""
    if len(text) > MAX_SEARCHED_CHARS:
        text = text[-MAX_SEARCHED_CHARS:].partition(" ")[2]
    mentions = find_quantities(text)
    return mentions[-1].quantity if mentions else None
