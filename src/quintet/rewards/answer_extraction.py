"""Extraction of the final answer from a response. All functions take time linear in the length of the text."""

from __future__ import annotations

import re
from fractions import Fraction

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
EXACT = re.compile(r"([-+]?)(\d{1,300})?(?:\.(\d{0,300}))?(?:[eE]([-+]?\d{1,3}))?")
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
STATED = re.compile(r"answer\s*(?:is|=|:)\s*:?", re.IGNORECASE)
FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([^{}]{1,300})\}\{([^{}]{1,300})\}")
WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"))
SPACING = re.compile(r"\\[,;:! ]|~|\\(?:left|right|displaystyle)\b")


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{…}`, or None.

    >>> extract_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    for box in reversed(list(BOX.finditer(text))):
        end = _closing_brace(text, box.end())
        if end is not None:
            return text[box.end() : end].strip()
        # a box before an open box can only close before it
        text = text[: box.start()]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes the one opened before `start`."""
    depth, position = 1, start
    while position < len(text):
        if text[position] == "\\":
            position += 1
        elif text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def extract_tagged(text: str, tag: str = "answer") -> str | None:
    """Return the text between the last `<answer>` and the `</answer>` after it, or None."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(tag) + 2 : end].strip()


def has_single_tag(text: str, tag: str) -> bool:
    """Return whether the opening and the closing tag each occur once."""
    return text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1


def extract_stated(text: str) -> str | None:
    """Return the rest of the line after the last "answer is" or "answer:", or None."""
    ends = [match.end() for match in STATED.finditer(text)]
    if not ends:
        return None
    line = text[ends[-1] :].split("\n", 1)[0]
    return line.strip().removesuffix(".").strip(" *") or None


def extract_answer(text: str) -> str:
    r"""Return the answer of a text: boxed, tagged, after `####`, after "answer is", or else the whole text."""
    for answer in (extract_boxed(text), extract_tagged(text), _after_hashes(text), extract_stated(text)):
        if answer:
            return answer
    return text.strip()


def _after_hashes(text: str) -> str | None:
    _, hashes, rest = text.rpartition("####")
    return rest.split("\n", 1)[0].strip() if hashes else None


def strip_formatting(text: str) -> str:
    """Return an answer without formatting: dollar signs, enclosing braces, spacing, final period.

    >>> strip_formatting(r"$\\left( 1,\\, 2 \\right).$")
    '(1,2)'
    """
    text = SPACING.sub("", text.strip()).strip().rstrip(".").strip()
    for opening, closing in WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)]
        if f"{opening}{inner}{closing}" == text and opening not in inner and closing not in inner:
            text = inner.strip().rstrip(".")
    return "".join(text.replace(r"\$", "").replace(r"\%", "%").split())


def parse_number(text: str) -> Fraction | None:
    r"""Parse a number (`-1,234.50`, `1e3`, `3/4`, `\frac{3}{4}`, `50%`) exactly; None if the text is anything else.

    >>> parse_number("1,250.50"), parse_number("-3/4"), parse_number("1e400")
    (Fraction(2501, 2), Fraction(-3, 4), None)
    """
    text = text.strip().replace("−", "-").removeprefix("$").strip()
    if text.endswith("%"):
        share = _decimal(text[:-1])
        return None if share is None else share / 100
    if (fraction := FRACTION.fullmatch(text)) is not None:
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    above, slash, below = text.partition("/")
    if not slash:
        return _decimal(text)
    top, bottom = _decimal(above), _decimal(below)
    return None if top is None or not bottom else top / bottom


def _decimal(text: str) -> Fraction | None:
    text = text.strip()
    if THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    match = EXACT.fullmatch(text)
    if match is None or not (match[2] or match[3]) or abs(int(match[4] or 0)) > 300:
        return None
    return Fraction(f"{match[1]}{match[2] or 0}.{match[3] or 0}e{match[4] or 0}")


def find_numbers(text: str) -> list[str]:
    """Return all numbers of a text as written, without thousands separators."""
    return [match.rstrip(",").replace(",", "") for match in NUMBER.findall(text)]
