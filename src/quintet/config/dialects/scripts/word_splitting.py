"""Word splitting at IFS, and pathname expansion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from quintet.config.dialects.scripts.patterns import EMPTY_ITEM, matching_files, may_match_files, unprotected
from quintet.config.dialects.scripts.variables import DIRECTORY, MARKER, Variables

MARKED_OR_OTHER = re.compile("(\ue000\\d+\ue001)|[^\ue000]+")
SPLIT_BASE = 0xE180
SPLIT_POINTS = re.compile("[\ue003\ue180-\ue1ff]+")
"""Where an expansion is split: between the words of an array, and at characters of IFS."""
MATTERS_WITHOUT_FILES = {"nullglob", "?nullglob", "glob", "?glob"}
"""Options with which a pattern that names no file is no text."""


def with_split_points(text: str, variables: Variables, line: int) -> str:
    """Mark where a shell splits the result of an expansion."""
    values = variables.get("IFS")
    ifs = " \t\n" if not values else values[0]
    if MARKER.search(ifs):
        return variables.unknown("a word", "is split at the characters of IFS, which are not known", line)
    others = re.escape("".join(character for character in ifs if not character.isspace() and character.isascii()))
    if others:
        blanks = re.escape("".join(character for character in ifs if character.isspace()))
        between = f"[{blanks}]*" if blanks else ""
        text = re.sub(rf"(\A|[{others}])({between})(?=[{others}])", rf"\1{EMPTY_ITEM}\2", text)
    points = {ord(character): SPLIT_BASE + ord(character) for character in ifs if character.isascii()}
    return MARKED_OR_OTHER.sub(lambda part: part[0] if part[1] else part[0].translate(points), text)


def pathname_expansion(pattern: str, variables: Variables, line: int) -> list[str]:
    """Return the files that an unquoted pattern names, or the pattern if there are none."""
    options, literal = variables.options, unprotected(pattern)
    if "f" in options or not (may_match_files(pattern) or MATTERS_WITHOUT_FILES & options):
        return [literal]
    directory = variables.scalar(DIRECTORY) or "."
    is_known = not MARKER.search(directory) or pattern.startswith("/")
    if not is_known and "=" in pattern.partition("[")[0]:
        return [literal]
    files = matching_files(pattern, Path(directory)) if is_known else None
    if files is None or {"?f", "glob", "?nullglob"} & options or not _has_known_order(files, variables):
        return [variables.unknown(literal, "is a pattern of names of files", line)]
    return files or ([] if "nullglob" in options else [literal])


def _has_known_order(files: Sequence[str], variables: Variables) -> bool:
    """Return whether the locale sorts names as their bytes."""
    locale = next(filter(None, map(variables.scalar, ("LC_ALL", "LC_COLLATE", "LANG"))), "C")
    by_letters = sorted(files, key=lambda name: re.sub(r"[\W_]", "", name).casefold())
    return locale in ("C", "POSIX", "C.UTF-8") or len(files) < 2 or list(files) == by_letters
