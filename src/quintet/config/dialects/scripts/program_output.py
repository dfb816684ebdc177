"""Output of programs that only compute paths, texts, numbers of GPUs and the time; nothing is run."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence

from quintet import hardware
from quintet.config.dialects.scripts.conditions import Status
from quintet.config.dialects.scripts.variables import MARKER

FIELD_RANGE = re.compile(r"(?P<first>\d{1,4})?(?P<dash>-)?(?P<last>\d{1,4})?")
"""Argument of `cut -f`: `2`, `1-3`, `2-` or `-3`."""
DATE = re.compile(r"\+(?:%[YymdHMSjTF]|[\w.: -])+")
"""Argument of `date`: `+%Y%m%d_%H%M%S`."""
INTEGER = re.compile(r"-?\d{1,15}")
SILENT_PROGRAMS = frozenset(("mkdir", "rm", "rmdir", "touch", "sleep", "exec", "cp", "mv"))
IMPORTED = re.compile(r"import (\w+)")

Output = tuple[str | None, Status]
"""What a program prints, and whether it succeeds; None for what is not known."""


def program_output(words: Sequence[str], stdin: str | None, directory: str, path: str | None) -> Output:
    """Return the output of a program with an input in a directory, and its status."""
    if any(MARKER.search(word) for word in words):
        return None, None
    name, arguments = words[0], [word for word in words[1:] if word != "--"]
    match name, arguments:
        case ("dirname" | "basename" | "realpath", [file, *suffix]) if not file.startswith("-") and len(suffix) < 2:
            return _part_of_path(name, file, suffix, directory)
        case "nvidia-smi", ["-L"] if shutil.which(name, path=path):
            return "GPU\n" * hardware.num_gpus(), None
        case "date", [form] if DATE.fullmatch(form):
            return f"{time.strftime(form[1:])}\n", True
        case "seq", _:
            return _sequence(arguments), True
        case "nproc", []:
            return f"{len(os.sched_getaffinity(0))}\n", True
        case "expr", _:
            return _calculated(arguments)
        case "which", [file] if re.fullmatch(r"[\w.-]+", file) and not MARKER.search(path or ""):
            found = shutil.which(file, path=path)
            return (f"{found}\n" if found else "", found is not None)
    if re.fullmatch(r"python[\d.]*", name) and len(arguments) == 2 and arguments[0] == "-c":
        imported = IMPORTED.fullmatch(arguments[1])
        return ("", hardware.is_installed(imported[1])) if imported else (None, None)
    return _filtered(name, arguments, stdin)


def _filtered(name: str, arguments: Sequence[str], stdin: str | None) -> Output:
    """Return what a program makes of its input."""
    if stdin is None or MARKER.search(stdin):
        return None, None
    if (name, arguments) == ("wc", ["-l"]):
        return f"{stdin.count(chr(10))}\n", True
    if name not in FILTERS:
        return None, None
    lines = stdin.removesuffix("\n").split("\n") if stdin else []
    text = FILTERS[name](lines, arguments)
    return text, None if text is None else True


def _part_of_path(name: str, file: str, suffix: Sequence[str], directory: str) -> Output:
    """Return the output of `dirname`, `basename` and `realpath`."""
    if name == "basename":
        base = file.rstrip("/").rpartition("/")[2] or file[:1]
        removed = base.removesuffix(suffix[0]) if suffix else base
        return f"{removed or base}\n", True
    if suffix:
        return None, None
    if name == "realpath":
        return _real_path(directory, file)
    parent = os.path.dirname(file.rstrip("/")).rstrip("/") or ("/" if file.startswith("/") else ".")
    return f"{parent}\n", True


def _real_path(directory: str, file: str) -> Output:
    joined = os.path.join(directory, file)
    if MARKER.search(joined) or not os.path.isdir(os.path.dirname(os.path.abspath(joined))):
        return None, None
    return f"{os.path.realpath(joined)}\n", True


def _sequence(bounds: Sequence[str]) -> str | None:
    """Return the output of `seq LAST` or `seq FIRST LAST`."""
    if not 1 <= len(bounds) <= 2 or not all(re.fullmatch(r"[1-9]\d{0,3}|0", bound) for bound in bounds):
        return None
    numbers = range(int(bounds[0]) if len(bounds) == 2 else 1, int(bounds[-1]) + 1)
    return "".join(f"{number}\n" for number in numbers)


def _calculated(words: Sequence[str]) -> Output:
    """Return the output of `expr LEFT OPERATOR RIGHT`."""
    match words:
        case [left, "+" | "-" | "*" | "/" | "%" as sign, right] if INTEGER.fullmatch(left) and INTEGER.fullmatch(right):
            first, second = int(left), int(right)
            if sign in "/%" and second == 0:
                return "", False
            quotient = abs(first) // abs(second) * (1 if (first < 0) == (second < 0) else -1) if sign in "/%" else 0
            values = {"+": first + second, "-": first - second, "*": first * second, "/": quotient}
            value = values.get(sign, first - second * quotient)
            return f"{value}\n", value != 0
    return None, None


def _translated(lines: Sequence[str], arguments: Sequence[str]) -> str | None:
    """Return the output of `tr CHARACTERS REPLACEMENTS` and `tr -d CHARACTERS`."""
    text = "".join(f"{line}\n" for line in lines)
    classes = {"a-z": "abcdefghijklmnopqrstuvwxyz", "0-9": "0123456789"}
    classes |= {"A-Z": classes["a-z"].upper(), "[:lower:]": classes["a-z"], "[:upper:]": classes["a-z"].upper()}
    classes |= {"\\n": "\n"}
    match [classes.get(each, each) for each in arguments]:
        case ["-d", characters] if _is_literal(characters):
            return text.translate(dict.fromkeys(map(ord, characters)))
        case [characters, replacements] if (
            _is_literal(characters + replacements) and arguments[0][:1] != "-"
        ) or arguments[0] == "-":
            padded = replacements.ljust(len(characters), replacements[-1:])
            return text.translate(str.maketrans(characters, padded[: len(characters)]))
    return None


def _is_literal(characters: str) -> bool:
    """Return whether `tr` takes each of the characters as itself."""
    return bool(characters) and (len(characters) <= 2 or "-" not in characters) and not set(characters) & set("[\\")


def _cut(lines: Sequence[str], arguments: Sequence[str]) -> str | None:
    """Return the fields of lines that `cut -d CHARACTER -f RANGE` selects."""
    matched = re.fullmatch(r"(?:-d ?(.) ?-f ?(\S+)|-f ?(\S+) ?-d ?(.))", " ".join(arguments))
    if matched is None:
        return None
    delimiter, fields = (matched[1], matched[2]) if matched[1] else (matched[4], matched[3])
    selected = FIELD_RANGE.fullmatch(fields)
    if selected is None or not (selected["first"] or selected["last"]) or selected["first"] == "0":
        return None
    first = int(selected["first"] or 1)
    last = int(selected["last"]) if selected["last"] else None if selected["dash"] else first
    rows = [line.split(delimiter) for line in lines]
    texts = [delimiter.join(row[first - 1 : last]) if len(row) > 1 else row[0] for row in rows]
    return "".join(f"{text}\n" for text in texts)


def _field_counts(lines: Sequence[str], arguments: Sequence[str]) -> str | None:
    """Return the output of `awk -F, '{print NF}'`, which counts the devices of `CUDA_VISIBLE_DEVICES`."""
    matched = re.fullmatch(r"-F ?([^\s\\^$.|?*+()\[{]) \{ ?print NF ?\}", " ".join(arguments))
    return matched and "".join(f"{line.count(matched[1]) + 1 if line else 0}\n" for line in lines)


FILTERS: Mapping[str, Callable[[Sequence[str], Sequence[str]], str | None]] = {
    "awk": _field_counts,
    "cut": _cut,
    "tr": _translated,
    "rev": lambda lines, arguments: None if arguments else "".join(f"{line[::-1]}\n" for line in lines),
    "cat": lambda lines, arguments: None if arguments else "".join(f"{line}\n" for line in lines),
}
"""Programs that change the lines of their input."""
