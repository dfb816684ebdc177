"""Units behind numbers. Units are compared by name: `5 cm` is no `5 m`, and `500 cm` is not converted."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from quintet.package_files import read_yaml

CURRENCIES: Final = {"US$": "$", "$": "$", "USD": "$", "€": "€", "EUR": "€", "£": "£", "GBP": "£", "¥": "¥", "₹": "₹"}
"""Signs before or behind a number, and the unit each stands for."""
MULTIPLES: Final = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
"""Words behind a number that multiply it."""
MAX_CHARS: Final = 100
MAX_WORDS: Final = 4
PART: Final = re.compile(
    r"(?P<word>[A-Za-zΩ°€£¥₹$¢]+\.?)(?:\s*\^\s*\{?\s*(?P<power>[-+]?[0-9])\s*\}?|(?P<digit>[23])(?![0-9]))?"
    r"|(?P<divided>/)|[*·\s()]|\\cdot\b"
)
DEGREES: Final = re.compile(r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)\b)|\\degree\b|°")
OF_A: Final = re.compile(r"\bof an? ")
POWERS: Final = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3, "cu": 3}
BEHIND: Final = ("squared", "cubed")


def parse_unit(text: str, *, known_only: bool = False) -> str | None:
    """Return a unit in one form for all its spellings, None if the text is no unit.

    >>> parse_unit("square centimeters"), parse_unit("cm^2"), parse_unit("km per hour"), parse_unit("x+1")
    ('cm^2', 'cm^2', 'h^-1 km', None)

    Args:
        text: what stands behind a number
        known_only: whether words that are no units by themselves, such as `apples`, are refused
    """
    text = OF_A.sub("of ", DEGREES.sub(" ° ", text)).strip(" ,;")
    parts = _parts(text) if len(text) <= MAX_CHARS else None
    if parts is None:
        return None
    powers: dict[str, int] = {}
    sign, power, name = 1, 1, ""
    for word, exponent in parts:
        if word == "per":
            sign = -1
        elif word in BEHIND and name:
            powers[name] *= POWERS[word]
        elif word in POWERS:
            power = POWERS[word]
        elif word not in _words()["ignored"]:
            name = _name_of(word, known_only)
            powers[name] = powers.get(name, 0) + sign * power * exponent
            power = 1
    if "" in powers or len(powers) > MAX_WORDS:
        return None
    return " ".join(f"{name}^{power}" if power != 1 else name for name, power in sorted(powers.items()))


def _parts(text: str) -> list[tuple[str, int]] | None:
    """Return the words of a unit with their exponents, `per` for a slash; None if there is anything else."""
    parts, position = [], 0
    while position < len(text):
        match = PART.match(text, position)
        if match is None:
            return None
        position = match.end()
        if match["divided"]:
            parts.append(("per", 1))
        elif match["word"]:
            parts.append((match["word"].rstrip("."), int(match["power"] or match["digit"] or 1)))
    return parts


def _name_of(word: str, known_only: bool) -> str:
    """Return the unit that a word names, the word in the singular if it is unknown, an empty text if it is no unit."""
    if word in CURRENCIES:
        return CURRENCIES[word]
    words, low = _words(), word.lower()
    for name in (word, low, low.removesuffix("s"), low.removesuffix("es")):
        if name in words["names"] or name in words["abbreviations"]:
            return str(words["names"].get(name, name))
    return "" if known_only or len(word) == 1 or low in words["other"] else low.removesuffix("s")


@cache
def _words() -> dict[str, Any]:
    return {kind: names if kind == "names" else frozenset(names) for kind, names in read_yaml(__file__).items()}
