"""Quoting, and the patterns of bash in `case`, `[[ … ]]`, `${NAME#pattern}` and names of files."""

from __future__ import annotations

import os
import re
from pathlib import Path

QUOTED_BASE = 0xE100
PROTECTED = {code: QUOTED_BASE + code for code in range(128) if not chr(code).isalnum() and chr(code) != "_"}
"""Quoted characters as other code points: words are not split at them, and they are no patterns."""
ITEM_SEPARATOR, EMPTY_ITEM = "\ue003", "\ue007"
"""What separates the words of an array also in quotes, and what an empty quoted text leaves."""
UNPROTECTED: dict[int, str] = {code: chr(plain) for plain, code in PROTECTED.items()}
UNPROTECTED |= {0xE180 + code: chr(code) for code in range(128)}
UNPROTECTED |= {ord(ITEM_SEPARATOR): " ", ord(EMPTY_ITEM): ""}
REPLACEMENT = "\ue008"
"""What separates pattern and replacement in `${NAME/pattern/replacement}`."""
SLASH, ANY_SLASH = re.compile("/"), re.compile(f"[/{chr(PROTECTED[ord('/')])}]")
EXTENDED = re.compile(r"[?*+@!]\(")
CLASSES = {"digit": "0-9", "alpha": "a-zA-Z", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z", "space": r"\s"}
BRACKET = re.compile(r"\[(?P<negated>[!^]?)(?P<content>\]?(?:\[:\w+:\]|[^\]])*)\]")
RANGE = re.compile(r"[0-9]-[0-9]|[a-z]-[a-z]|[A-Z]-[A-Z]")
MAX_MATCHED = 1 << 12
"""Characters of a text that is matched with a pattern, at most."""
MAX_STEPS = 1 << 22
"""Steps in which Python must match a pattern, at most."""
REPETITION, REPEATED_GROUP = re.compile(r"(?<!\\)[*+]"), re.compile(r"\)[*+?{]")


def protected(text: str) -> str:
    """Return a text as one that is quoted."""
    return text.translate(PROTECTED)


def unprotected(text: str) -> str:
    """Return an expanded text after the removal of quotes."""
    return text.translate(UNPROTECTED)


def expression_of(pattern: str) -> str | None:
    """Return the regular expression of a pattern with protected characters; None if it is not supported."""
    if EXTENDED.search(pattern):
        return None
    parts, position = [], 0
    while position < len(pattern):
        character = pattern[position]
        position += 1
        if character in "*?":
            parts.append({"*": ".*", "?": "."}[character])
        elif character == "\\" and position < len(pattern):
            parts.append(re.escape(unprotected(pattern[position])))
            position += 1
        elif character == "[" and (bracket := BRACKET.match(pattern, position - 1)):
            if (content := _characters(bracket["content"])) is None:
                return None
            parts.append(f"[{'^' * bool(bracket['negated'])}{content}]")
            position = bracket.end()
        else:
            parts.append(re.escape(unprotected(character)))
    return re.sub(r"(?:\.\*)+", ".*", "".join(parts))


def _characters(content: str) -> str | None:
    """Return the characters between brackets for a regular expression; None if they depend on the locale."""
    parts = []
    for part in re.findall(r"\[:\w+:\]|.-.|.", content, re.DOTALL):
        if part.startswith("[:"):
            if (characters := CLASSES.get(part[2:-2])) is None:
                return None
            parts.append(characters)
        elif len(part) == 3:
            if not RANGE.fullmatch(part):
                return None
            parts.append(part)
        else:
            parts.append(re.escape(unprotected(part)))
    return "".join(parts) or None


def is_quick(expression: str, text: str, *, searched: bool = False) -> bool:
    """Return whether Python matches a regular expression with a text, or searches it there, in bounded time: it tries
    each length of each repetition, and exponentially many of a repeated group."""
    if len(text) > MAX_MATCHED or REPEATED_GROUP.search(expression):
        return False
    exponent = len(REPETITION.findall(expression)) + searched
    return bool((len(text) + 1) ** exponent <= MAX_STEPS)


def matches(text: str, pattern: str) -> bool | None:
    """Return whether a text matches a pattern; None if only bash can tell."""
    expression = expression_of(pattern)
    if expression is None or not is_quick(expression, text):
        return None
    return re.fullmatch(expression, text, re.DOTALL) is not None


def is_file_pattern(text: str, separator: re.Pattern[str] = SLASH) -> bool:
    """Return whether bash replaces an expanded word by the names of files that match it.

    A bracket expression is within one part of a path: `[path/to/train.parquet]` is a text.
    """
    return any(re.search(r"[*?]", part) or BRACKET.search(part) for part in separator.split(text))


def may_match_files(pattern: str) -> bool:
    """Return whether there can be a file that a pattern names; no file has a slash, also if the slash is quoted, as in
    `["$DATA/train.parquet"]`."""
    return is_file_pattern(pattern, ANY_SLASH)


def matching_files(pattern: str, directory: Path) -> list[str] | None:
    """Return the files that a pattern names, in the order of their bytes; None if it is not supported."""
    if not is_file_pattern(pattern):
        return []
    names = [""]
    for number, part in enumerate(pattern.split("/")):
        is_pattern, separator = is_file_pattern(part), "/" if number else ""
        expression = expression_of(part)
        if expression is None or "/" in unprotected(part):
            return None
        following = []
        for name in names:
            if not is_pattern:
                path = f"{name}{separator}{unprotected(part)}"
                following += [path] if not path or os.path.lexists(directory / path) else []
            elif os.path.isdir(directory / f"{name}{separator}"):
                entries = os.listdir(directory / f"{name}{separator}")
                found = [entry for entry in entries if re.fullmatch(expression, entry, re.DOTALL)]
                following += [f"{name}{separator}{entry}" for entry in found if entry[0] != "." or part[0] == "."]
        names = following
    return sorted(names)
