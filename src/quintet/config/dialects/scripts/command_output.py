"""Output of the commands in `$(…)` that only compute paths, texts, numbers of GPUs and the time; nothing is run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from quintet import hardware

FIELD_RANGE = re.compile(r"(?P<first>\d{1,4})?(?P<dash>-)?(?P<last>\d{1,4})?")
"""Argument of `cut -f`: `2`, `1-3`, `2-` or `-3`."""

DATE = re.compile(r"\+(?:%[YymdHMSj]|[\w.:-])+")
"""Argument of `date`: `+%Y%m%d_%H%M%S`."""


def command_output(commands: Sequence[Sequence[str]], operators: Sequence[str], directory: Path) -> str | None:
    """Return the output of commands in a directory; None if it depends on more than their arguments.

    `operators` are those between the commands, without `;`.
    """
    piped = [*operators] == ["|"] * (len(commands) - 1)
    match [[field for field in command if field != "--"] for command in commands]:
        case [["pwd"]]:
            return str(directory)
        case [["cd", path], ["pwd"]] if not piped:
            return os.path.normpath(directory / path)
        case [["dirname" | "basename" as name, path, *suffix]]:
            return _part_of_path(name, path, "".join(suffix))
        case [[program, "-c", statement], ["echo", yes], ["echo", no]] if [*operators] == ["&&", "||"]:
            return _if_importable(program, statement, yes, no)
        case [["[", left, "=" | "==", right, "]"], ["echo", *texts]] if [*operators] == ["&&"]:
            return " ".join(texts) if left == right else ""
        case [["nvidia-smi", "-L"], ["wc", "-l"], *filters] if piped:
            return _filtered(str(hardware.num_gpus()), filters)
        case [["date", form]] if DATE.fullmatch(form):
            return time.strftime(form[1:])
        case [["seq", *bounds]]:
            return _sequence(bounds)
        case [["echo", *texts], *filters] if (piped or not filters) and not "".join(texts[:1]).startswith("-"):
            return _filtered(" ".join(texts), filters)
    return None


def _part_of_path(name: str, path: str, suffix: str) -> str:
    return os.path.basename(path).removesuffix(suffix) if name == "basename" else os.path.dirname(path) or "."


def _sequence(bounds: Sequence[str]) -> str | None:
    """Return the output of `seq LAST` or `seq FIRST LAST`."""
    if not 1 <= len(bounds) <= 2 or not all(re.fullmatch(r"\d{1,4}", bound) for bound in bounds):
        return None
    return "\n".join(map(str, range(int(bounds[0]) if len(bounds) == 2 else 1, int(bounds[-1]) + 1)))


def _if_importable(program: str, statement: str, yes: str, no: str) -> str | None:
    """Return the output of `python3 -c 'import NAME' && echo YES || echo NO`."""
    imported = re.fullmatch(r"import (\w+)", statement)
    if not re.fullmatch(r"python[\d.]*", program) or imported is None:
        return None
    return yes if hardware.is_installed(imported[1]) else no


def _filtered(text: str, filters: Sequence[Sequence[str]]) -> str | None:
    """Return a line after `rev`, `cut` and `tr` in any order; None for other filters and options."""
    result: str | None = text
    for name, *arguments in filters:
        if result is None or "\n" in result:
            return None
        match name, arguments:
            case "rev", []:
                result = result[::-1]
            case "cut", _:
                result = _cut(result, arguments)
            case "tr", ["-d", characters] if _is_literal(characters):
                result = result.translate(dict.fromkeys(map(ord, characters)))
            case "tr", [characters, replacements] if _is_literal(characters + replacements):
                padded = replacements.ljust(len(characters), replacements[-1:])
                result = result.translate(str.maketrans(characters, padded[: len(characters)]))
            case _:
                return None
    return result


def _is_literal(characters: str) -> bool:
    """Return whether `tr` takes each of the characters as itself."""
    return bool(characters) and (len(characters) <= 2 or "-" not in characters) and not set(characters) & set("[\\")


def _cut(line: str, arguments: Sequence[str]) -> str | None:
    """Return the fields of a line that `cut -d CHARACTER -f RANGE` selects."""
    matched = re.fullmatch(r"(?:-d ?(.) ?-f ?(\S+)|-f ?(\S+) ?-d ?(.))", " ".join(arguments))
    if matched is None:
        return None
    delimiter, fields = (matched[1], matched[2]) if matched[1] else (matched[4], matched[3])
    selected = FIELD_RANGE.fullmatch(fields)
    if selected is None or not (selected["first"] or selected["last"]):
        return None
    first = int(selected["first"] or 1)
    last = int(selected["last"]) if selected["last"] else None if selected["dash"] else first
    parts = line.split(delimiter)
    return line if len(parts) == 1 else delimiter.join(parts[first - 1 : last]) if first else None
