"""The variables of a shell script, and what is known of their values.

A value that only a shell can know is represented by a marker in the text, which refers to an `UnknownValue`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    line: int
    is_array: bool = False
    """Whether it may be an array with any number of words."""

    def __str__(self) -> str:
        return f"{self.construct} {self.reason}"


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
        self.path = path
        self.values: dict[str, tuple[str, ...]] = {name: (value,) for name, value in environment.items()}
        """The words of arrays; other values are arrays of one word, and unset variables of none."""
        self.values |= {"0": (str(path),), "BASH_SOURCE": (str(path),), "#": ("0",)}
        self.exported: set[str] = set()
        self.arguments: tuple[str, ...] | None = None
        """Arguments of the function that is followed; None outside functions."""
        self.choices: ItemChoices | None = None
        self.unknown_values: list[UnknownValue] = []

    def scalar(self, name: str) -> str | None:
        """Return the value of a variable, or the first word of an array; None if it is not set."""
        return next(iter(self.values.get(name, ())), None)

    def assign(self, name: str, values: tuple[str, ...], line: int) -> None:
        """Set a variable."""
        too_long = len(values) > MAX_LENGTH or any(len(value) > MAX_LENGTH for value in values)
        self.values[name] = (self.unknown(f"${name}", "is too long", line),) if too_long else values

    def unknown(self, construct: str, reason: str, line: int, *, is_array: bool = False) -> str:
        """Return a marker for an unknown value."""
        self.unknown_values.append(UnknownValue(construct, reason, line, is_array))
        return f"\ue000{len(self.unknown_values) - 1}\ue001"

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
        return self.unknown(unknown.construct, unknown.reason, unknown.line, is_array=True)

    def known_exports(self) -> dict[str, str]:
        """Return the exported variables whose values are known."""
        values = {name: self.scalar(name) for name in self.exported}
        return {name: value for name, value in values.items() if value is not None and not MARKER.search(value)}


def unknown_words_hint(reason: str) -> str:
    """Return what to do about words of a command that are not known for a `reason`."""
    if CALL_ARGUMENT in reason:
        return "write its words out in the script, or give quintet the configuration file and key=value words instead"
    return "write its words out in the script, or set what it depends on: NAME=… quintet …"
