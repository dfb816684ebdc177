"""The variables of a shell script, and what is known of their values.

A value that only a shell can know is represented by a marker in the text, which refers to an `UnknownValue`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quintet.errors import ConfigError

MARKER = re.compile("\ue000(\\d+)\ue001")
MAX_LENGTH = 1 << 16
"""Characters of a word, and words of an array."""
PROMPTED = "is read while the script runs"
"""Of these, `${NAME:-default}` is the default, as after an empty reply."""
CALL_ARGUMENT = "is given where the script or the function is called"
NOT_SET = "is set neither in the script nor in the environment"


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """A construct whose value the script alone does not determine."""

    construct: str
    """Its text in the script: `$NOW`."""
    reason: str
    place: str
    """Its `line 3`, or `FILE:3` in another file than the main script."""
    is_array: bool = False
    """Whether it may be an array with any number of words."""

    def __str__(self) -> str:
        return f"{self.construct} {self.reason}"


def cleaned(text: str, *, keep_markers: bool = False) -> str:
    """Return a text without the characters that represent unknown values and blanks, and with `\\n` as line breaks."""
    return text.translate(dict.fromkeys([0, *range(0xE002 if keep_markers else 0xE000, 0xE008)])).replace("\r\n", "\n")


def script_error(source: str, message: str, hint: str, value: str | None = None) -> ConfigError:
    """Return an error in a script; `source` is its `FILE:LINE`."""
    return ConfigError(f"{source}: {message}", value=value, source=source, hint=hint)


@dataclass(slots=True)
class ItemChoices:
    """The items that one reading of a loop takes from arrays, where their positions are not known.

    Such a loop is read once for each combination of items.
    """

    positions: dict[str, int] = field(default_factory=dict)
    """Positions by the markers of their unknown values."""
    selected: list[tuple[int, int]] = field(default_factory=list)
    """Position and number of items, in the order in which they are needed."""
    used: int = 0

    def position(self, marker: str, count: int) -> int:
        """Return the position to assume for an unknown one in an array of `count` items."""
        if marker not in self.positions:
            if self.used == len(self.selected):
                self.selected.append((0, count))
            self.positions[marker] = self.selected[self.used][0]
            self.used += 1
        return self.positions[marker]

    def advance(self, positions: Mapping[str, int]) -> bool:
        """Go on to the next combination with the positions that are given outside; False after the last one."""
        self.positions, self.used = dict(positions), 0
        while self.selected and self.selected[-1][0] + 1 >= self.selected[-1][1]:
            self.selected.pop()
        if self.selected:
            position, count = self.selected.pop()
            self.selected.append((position + 1, count))
        return bool(self.selected)


class Variables:
    """The variables of a script at one point."""

    def __init__(
        self, path: Path, environment: Mapping[str, str], unknown_values: list[UnknownValue] | None = None
    ) -> None:
        self.path = self.script = path
        """The file that is read, and the main script."""
        self.inherited = frozenset(environment)
        self.values: dict[str, tuple[str, ...]] = {name: (value,) for name, value in environment.items()}
        """The words of arrays; other values are arrays of one word, and unset variables of none."""
        self.values |= {"0": (str(path),), "BASH_SOURCE": (str(path),), "#": ("0",)}
        self.exported: set[str] = set()
        self.exports_all = False
        """Whether what is assigned is exported, as after `set -a`."""
        self.integers: set[str] = set()
        """Variables that `declare -i` names."""
        self.unread: dict[str, str] = {}
        """Why commands of other files, or of `eval`, are not known, by their place."""
        self.not_followed: dict[str, str] = {}
        """Why scripts in processes of their own are not followed, by the place where they start."""
        self.arguments: tuple[str, ...] | None = None
        """Arguments of the function that is followed; None outside functions."""
        self.local_values: list[dict[str, tuple[str, ...] | None]] = []
        """Of each function that is followed, the values of its local variables outside."""
        self.choices: ItemChoices | None = None
        self.unknown_values: list[UnknownValue] = []

    def scalar(self, name: str) -> str | None:
        """Return the value of a variable, or the first word of an array; None if it is not set."""
        return next(iter(self.values.get(name, ())), None)

    def assign(self, name: str, values: tuple[str, ...], line: int) -> None:
        """Set a variable."""
        too_long = len(values) > MAX_LENGTH or any(len(value) > MAX_LENGTH for value in values)
        self.values[name] = (self.unknown(f"${name}", "is too long", line),) if too_long else values
        self.exported |= {name} if self.exports_all else set()

    def set_arguments(self, arguments: tuple[str, ...]) -> None:
        """Set `$1`, `$2`, … and `$#` in a function."""
        if self.arguments is None:
            return
        values = {name: value for name, value in self.values.items() if not name.isdecimal() or name == "0"}
        values |= {str(number): (argument,) for number, argument in enumerate(arguments, 1)}
        self.values = values | {"#": (str(len(arguments)),)}
        self.arguments = arguments

    def restore(self, values: Mapping[str, tuple[str, ...] | None]) -> None:
        """Set variables to earlier values; None unsets them."""
        for name, value in values.items():
            self.values.pop(name, None)
            self.values |= {} if value is None else {name: value}

    def changes(self, before: Mapping[str, tuple[str, ...]]) -> set[str]:
        """Return the variables whose values differ from those before."""
        return {name for name in {*self.values, *before} if self.values.get(name) != before.get(name)}

    def forget(self, names: Iterable[str], reason: str, line: int) -> None:
        """Make the values of variables unknown for a reason."""
        for name in names:
            self.values[name] = (self.unknown(f"${name}", reason, line, is_array=True),)

    def unknown(self, construct: str, reason: str, line: int, *, is_array: bool = False) -> str:
        """Return a marker for an unknown value."""
        return self._marker(UnknownValue(construct, reason, self.place(line), is_array))

    def _marker(self, value: UnknownValue) -> str:
        self.unknown_values.append(value)
        return f"\ue000{len(self.unknown_values) - 1}\ue001"

    def place(self, line: int) -> str:
        """Return how a line is named: `line 3`, or `FILE:3` in another file than the main script."""
        return f"line {line}" if self.path == self.script else f"{self.path}:{line}"

    def add_unread(self, name: str, reason: str, line: int) -> None:
        """Note commands that are not known, which may set any variable."""
        self.unread[self.place(line)] = f"{name} {reason}"

    def not_set(self) -> str:
        """Return why a variable that is not set has no value."""
        unread = [f"{place}, where {reason}" for place, reason in self.unread.items()]
        return NOT_SET + (f"; it may be set at {'; '.join(unread)}" if unread else "")

    def find_unknown(self, text: str) -> UnknownValue | None:
        """Return the first unknown value in a text."""
        matched = MARKER.search(text)
        return self.unknown_values[int(matched[1])] if matched else None

    def shown(self, text: str) -> str:
        """Return a text with what is unknown as the script has it."""
        return MARKER.sub(lambda matched: self.unknown_values[int(matched[1])].construct, text)

    def is_unknown_array(self, name: str) -> bool:
        """Return whether the number of a variable's words is unknown."""
        return self.is_unknown_count(self.values.get(name, ()))

    def is_unknown_count(self, values: Sequence[str]) -> bool:
        """Return whether the words of an array stand for an unknown number of them."""
        unknown = self.find_unknown(values[0]) if len(values) == 1 and MARKER.fullmatch(values[0]) else None
        return unknown is not None and unknown.is_array

    def unknown_array(self, text: str) -> str:
        """Return a marker for an array of unknown words, for the reason of the first unknown value in a text."""
        unknown = self.unknown_values[int(MARKER.findall(text)[0])]
        return self._marker(replace(unknown, is_array=True))

    def known_exports(self) -> dict[str, str]:
        """Return the exported variables whose values are known."""
        values = {name: self.scalar(name) for name in self.exported}
        return {name: value for name, value in values.items() if value is not None and not MARKER.search(value)}


def unknown_words_hint(reason: str) -> str:
    """Return what to do about words of a command that are not known for a `reason`."""
    if CALL_ARGUMENT in reason:
        return "write its words out in the script, or give quintet the configuration file and key=value words instead"
    return "write its words out in the script, or set what it depends on: NAME=… quintet …"
