"""Where in a text its answer stands. Everything here takes time in proportion to the text, whatever it holds."""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["answered", "boxed", "number", "numbers", "opened_and_closed", "plain", "stated", "tagged"]

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
EXACT = re.compile(r"([-+]?)(\d{1,300})?(?:\.(\d{0,300}))?(?:[eE]([-+]?\d{1,3}))?")
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
STATED = re.compile(r"answer\s*(?:is|=|:)\s*:?", re.IGNORECASE)
FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([^{}]{1,300})\}\{([^{}]{1,300})\}")
WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"))
SPACING = re.compile(r"\\[,;:! ]|~|\\(?:left|right|displaystyle)\b")


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}` that is closed; None where there is none.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    for found in reversed(list(BOX.finditer(text))):
        end = _closing(text, found.end())
        if end is not None:
            return text[found.end() : end].strip()
        # an open box never closes for those before it either, unless they end first; the last few decide
        text = text[: found.start()]
    return None


def _closing(text: str, start: int) -> int | None:
    """Where the brace that was opened before `start` is closed."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return None


def tagged(text: str, tag: str = "answer") -> str | None:
    """What stands between the last `<answer>` and the `</answer>` after it; None where there is no such pair."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(tag) + 2 : end].strip()


def opened_and_closed(text: str, tag: str) -> bool:
    """Each of the two tags stands there once."""
    return text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1


def stated(text: str) -> str | None:
    """What follows the last "answer is", "answer:" on its line; None where nobody says so."""
    ends = [found.end() for found in STATED.finditer(text)]
    if not ends:
        return None
    line = text[ends[-1] :].split("\n", 1)[0]
    return line.strip().removesuffix(".").strip(" *") or None


def answered(text: str) -> str:
    r"""The answer of a text, wherever it says so: boxed, tagged, after `####`, after "answer is", else the whole."""
    for found in (boxed(text), tagged(text), _after_hashes(text), stated(text)):
        if found:
            return found
    return text.strip()


def _after_hashes(text: str) -> str | None:
    _, hashes, rest = text.rpartition("####")
    return rest.split("\n", 1)[0].strip() if hashes else None


def plain(text: str) -> str:
    """An answer without what only dresses it: dollars, braces around all of it, spacing, a full stop.

    >>> plain(r"$\\left( 1,\\, 2 \\right).$")
    '(1,2)'
    """
    text = SPACING.sub("", text.strip()).strip().rstrip(".").strip()
    for opening, closing in WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)]
        if f"{opening}{inner}{closing}" == text and opening not in inner and closing not in inner:
            text = inner.strip().rstrip(".")
    return "".join(text.replace(r"\$", "").replace(r"\%", "%").split())


def number(text: str) -> Fraction | None:
    r"""A number written plainly (`-1,234.50`, `1e3`, `3/4`, `\frac{3}{4}`, `50%`), exactly; None where the text is
    anything else.

    >>> number("1,250.50"), number("-3/4"), number("1e400")
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
    found = EXACT.fullmatch(text)
    if found is None or not (found[2] or found[3]) or abs(int(found[4] or 0)) > 300:
        return None
    return Fraction(f"{found[1]}{found[2] or 0}.{found[3] or 0}e{found[4] or 0}")


def numbers(text: str) -> list[str]:
    """Every number of a text as it is written, without thousands' commas."""
    return [found.rstrip(",").replace(",", "") for found in NUMBER.findall(text)]
