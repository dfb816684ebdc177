"""Brace expansion: `{a,b}` and `{1..4}` in a word before any other expansion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

SKIPPED = re.compile(
    r"""\\.|'[^']*'|\$'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\$\{[^{}]*\}|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`""", re.DOTALL
)
"""Quoted texts and expansions, whose braces and commas do not count."""
SEQUENCE = re.compile(r"(?P<first>-?\d{1,9})\.\.(?P<last>-?\d{1,9})(?:\.\.(?P<step>-?\d{1,9}))?")
LETTERS = re.compile(r"(?P<first>[a-zA-Z])\.\.(?P<last>[a-zA-Z])(?:\.\.(?P<step>-?\d{1,9}))?")
MAX_WORDS = 4096


class TooManyWords(ValueError):
    """A word that stands for more words than are supported."""


def brace_expansion(word: str) -> list[str]:
    """Return the words that a word with braces stands for, each as it would stand in the script.

    Raises:
        TooManyWords: there are too many.
    """
    for opening, commas, closing in _braces(word):
        before, inside, after = word[:opening], word[opening + 1 : closing], word[closing + 1 :]
        if commas:
            ends = [opening, *commas, closing]
            parts = [word[start + 1 : end] for start, end in pairwise(ends)]
            middle = [text for part in parts for text in brace_expansion(part)]
        elif (sequence := _sequence(inside)) is not None:
            middle = sequence
        else:
            continue
        tails = brace_expansion(after)
        if len(middle) * len(tails) > MAX_WORDS:
            raise TooManyWords(word)
        return [f"{before}{text}{tail}" for text in middle for tail in tails]
    return [word]


def _braces(word: str) -> Iterator[tuple[int, list[int], int]]:
    """Yield the position of each opening brace with its commas and the closing brace."""
    position = 0
    while position < len(word):
        if skipped := SKIPPED.match(word, position):
            position = skipped.end()
            continue
        if word[position] == "{" and (found := _closing(word, position)) is not None:
            yield (position, *found)
        position += 1


def _closing(word: str, opening: int) -> tuple[list[int], int] | None:
    """Return the commas of a brace and the position at which it is closed; None if it is not."""
    depth, commas, position = 0, list[int](), opening + 1
    while position < len(word):
        if skipped := SKIPPED.match(word, position):
            position = skipped.end()
            continue
        character = word[position]
        if character == "}" and depth == 0:
            return commas, position
        depth += {"{": 1, "}": -1}.get(character, 0)
        commas += [position] if character == "," and depth == 0 else []
        position += 1
    return None


def _sequence(text: str) -> list[str] | None:
    """Return the items of `1..4`, `01..10..2` or `a..e`; None if it is no sequence."""
    letters = LETTERS.fullmatch(text)
    bounds = letters or SEQUENCE.fullmatch(text)
    if bounds is None:
        return None
    first, last = (ord(bounds[name]) if letters else int(bounds[name]) for name in ("first", "last"))
    step = abs(int(bounds["step"] or 1)) or 1
    if abs(last - first) // step >= MAX_WORDS:
        raise TooManyWords(text)
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    if letters:
        items = [chr(number) for number in numbers]
        return items if all(item.isalpha() for item in items) else None
    padded = any(re.match(r"-?0\d", bounds[name]) for name in ("first", "last"))
    width = max(len(bounds["first"]), len(bounds["last"])) if padded else 0
    return [f"{number:0{width}d}" for number in numbers]
