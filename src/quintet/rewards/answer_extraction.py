"""Extraction of the final answer from a response. All functions take time linear in the length of the text."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(?P<brace>\{)|\s+(?=[^\s{$])|(?=[\\0-9]))")
UNBRACED = re.compile(r"(?:\{[^{}]*\}|[^\s${}])+")
"""What `\\boxed` without braces contains."""
STATED = re.compile(r"answer\s*(?:is|=|:)\s*:?", re.IGNORECASE)
WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"))
NEEDLESS_SPACE = re.compile(r"\s+(?![0-9])|(?<![0-9])\s+")
"""Space that is not between digits, where it separates: `1 1/2` is not `11/2`."""
SPACING = re.compile(r"\\[,;:! ]|~|\\(?:left|right|displaystyle)\b")


def extract_boxed(text: str, *, braces_only: bool = False) -> str | None:
    r"""Return the content of the last closed `\boxed{…}`, or None; `\boxed 42` counts too, unless `braces_only`.

    >>> extract_boxed(r"so \boxed{\frac{1}{2}}."), extract_boxed(r"so $\boxed 42$.")
    ('\\frac{1}{2}', '42')
    """
    for box in reversed(list(BOX.finditer(text))):
        if box["brace"] is None:
            content = UNBRACED.match(text, box.end())
            if not braces_only and content is not None:
                return content[0].rstrip(".,;")
            continue
        end = closing_brace(text, box.end())
        if end is not None:
            return text[box.end() : end].strip()
        # a box before an open box can only close before it
        text = text[: box.start()]
    return None


def closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes the one opened before `start`, None if it is not closed."""
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
    text = SPACING.sub(" ", text.strip()).strip().rstrip(".").strip()
    for opening, closing in WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)]
        if f"{opening}{inner}{closing}" == text and opening not in inner and closing not in inner:
            text = inner.strip().rstrip(".")
    return NEEDLESS_SPACE.sub("", text.replace(r"\$", "").replace(r"\%", "%"))
