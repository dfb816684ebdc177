"""Messages of all commands."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

KEY = re.compile(r"""[\s'"+-]*([\w.@/]+)['"]?\s*[:=]""")
MAX_BYTES = 1 << 20
"""Larger files are not searched."""
SHOWN_CHARACTERS = 60


def warn(message: str) -> None:
    """Print a warning to stderr."""
    print(f"warning: {message}", file=sys.stderr)


def describe_long_name(path: str, arguments: Sequence[str]) -> str:
    """Return the message about a text that is taken for a path and too long for one, with the key that has it, as far
    as it stands in the arguments of the command or in a file that they name."""
    # the path may begin with a directory that the value lacks
    parts = (path, max(PurePath(path).parts, key=len, default=path))
    key, source = next((place for part in parts for place in _places(part, arguments)), ("", ""))
    shown = f"{path[:SHOWN_CHARACTERS]}…"
    subject = f"{key} = {shown} ({source})" if key else shown
    return f"{subject}: the name of a file is too long; use a shorter one"


def _places(text: str, arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield key and source of each place of a text."""
    for argument in arguments:
        key, sign, value = argument.partition("=")
        if sign and text in value:
            yield key, "command line"
    for argument in arguments:
        for number, line in enumerate(_lines(argument), start=1):
            match = KEY.match(line)
            if match is not None and text in line:
                yield match[1], f"{argument}:{number}"


def _lines(name: str) -> list[str]:
    """Return the lines of a file, none if it cannot be read."""
    try:
        path = Path(name)
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return []
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return []
