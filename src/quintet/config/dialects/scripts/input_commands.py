"""Builtin commands that take words of an input or of the arguments: `read` and `getopts`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest

from quintet.config.dialects.scripts.assignments import NAME
from quintet.config.dialects.scripts.conditions import Status
from quintet.config.dialects.scripts.variables import ALL_NAMES, INTEGER_LITERAL, MARKER, PROMPTED
from quintet.config.dialects.scripts.word_reader import WordReader

READ_OPTIONS = re.compile(r"-[ers]*(?P<option>[adinNptu])?(?P<value>.*)")


class InputCommands:
    """Applies `read` and `getopts` to the variables of a reader."""

    def __init__(self, reader: WordReader) -> None:
        self.reader, self.variables = reader, reader.variables

    def run(self, name: str, fields: list[str]) -> Status:
        """Apply `read`, `mapfile`, `readarray` or `getopts`."""
        match name:
            case "read":
                return self._read(fields)
            case "getopts":
                return self._getopts(fields)
        names = [field for field in fields if NAME.fullmatch(field)]
        self.variables.forget(names[-1:] or ["MAPFILE"], "has the lines of a file", self.reader.line)
        return None

    def _read(self, fields: list[str]) -> Status:
        """Read a line of the known input into variables, or make them unknown."""
        names: list[str] = []
        option_letters = ""
        while fields:
            field = fields.pop(0)
            option = READ_OPTIONS.fullmatch(field)
            if names or option is None:
                names.append(field)
                continue
            option_letters += field[1:] if not option["option"] else field[1 : field.index(option["option"]) + 1]
            if option["option"] not in (None, "a") and not option["value"]:
                del fields[:1]
        if any(not NAME.fullmatch(name) for name in names):
            names = [ALL_NAMES]
        is_array, names = "a" in option_letters, names or ["REPLY"]
        text, ifs = self.reader.stdin, self.variables.scalar("IFS")
        is_supported = (
            text is not None and not set("dnNu") & set(option_letters) and ("r" in option_letters or "\\" not in text)
        )
        parts = None
        if is_supported and text is not None and not MARKER.search(ifs or ""):
            parts = _split(text, " \t\n" if ifs is None else ifs, None if is_array else len(names))
        if parts is None:
            reason = PROMPTED if self.reader.is_prompted else "is read from a file or a program"
            self.variables.forget(names, reason, self.reader.line)
            return None
        values = _known_parts(parts)
        if is_array:
            unknown = next(filter(MARKER.search, values), None)
            items = tuple(values) if unknown is None else (self.variables.unknown_array(unknown),)
            self.variables.assign(names[0], items, self.reader.line)
        else:
            for name, value in zip_longest(
                names, values[: len(names)], fillvalue=values[-1] if any(map(MARKER.search, values)) else ""
            ):
                self.variables.assign(name, (value,), self.reader.line)
        return bool(text) if not text or "\n" in text else None

    def _getopts(self, fields: Sequence[str]) -> Status:
        """Take the next option of the arguments, each of one letter."""
        variables, line = self.variables, self.reader.line
        names = [*fields[1:2], "OPTARG", "OPTIND"]
        arguments = tuple(fields[2:]) or variables.arguments or ()
        index = variables.values.get("OPTIND", ("1",))[0]
        is_known = len(fields) > 1 and NAME.fullmatch(fields[1]) and INTEGER_LITERAL.fullmatch(index)
        if not is_known or any(map(MARKER.search, arguments)):
            variables.forget(
                [name for name in names if NAME.fullmatch(name)] + [ALL_NAMES] * (not is_known),
                "is set by `getopts`",
                line,
            )
            return None
        position = int(index) - 1
        option = arguments[position] if position < len(arguments) else ""
        if not re.match(r"-[^-]", option):
            variables.assign(fields[1], ("?",), line)
            variables.assign("OPTIND", (str(position + 1 + (option == "--")),), line)
            return False
        takes_value = fields[0].partition(option[1])[2].startswith(":")
        value = option[2:] or "".join(arguments[position + 1 : position + 2])
        if (
            option[1] not in fields[0].replace(":", "")
            or (option[2:] and not takes_value)
            or (takes_value and not value)
        ):
            variables.forget(names, f"is set by `getopts` to {option}, which is not supported", line)
            return None
        variables.assign(fields[1], (option[1],), line)
        variables.assign("OPTIND", (str(position + 2 + (takes_value and not option[2:])),), line)
        variables.assign("OPTARG", (value,) if takes_value else (), line)
        return True


def _known_parts(parts: Sequence[str]) -> list[str]:
    """Return the fields of a line with those from the first unknown one on unknown, since it may be several."""
    values: list[str] = []
    for part in parts:
        unknown = MARKER.search("".join([*values[-1:], part]))
        values.append(part if unknown is None else unknown[0])
    return values


def _split(text: str, separators: str, count: int | None) -> list[str] | None:
    """Return the fields of a line for `count` variables, of which the last one gets what is left; all if it is None.

    None for separators that are not supported.
    """
    line = text.split("\n")[0]
    if not separators:
        return [line]
    if not separators.strip(" \t\n"):
        line = line.strip(separators)
        parts = re.split(f"[{separators}]+", line, maxsplit=0 if count is None else count - 1) if count != 1 else [line]
        return parts if parts != [""] else []
    if len(separators) > 1:
        return None
    parts = line.split(separators)
    parts = parts[:-1] if parts[-1] == "" else parts
    return parts if count is None or len(parts) <= count else line.split(separators, count - 1)
