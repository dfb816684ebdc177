"""The variables of a shell script, and what is known of their values.

A value that only a shell can know is represented by a marker in the text, which refers to an `UnknownValue`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quintet.errors import ConfigError

MARKER = re.compile("\ue000(\\d+)\ue001")
MAX_LENGTH = 1 << 16
"""Characters of a word, and words of an array."""
PROMPTED = "is read while the script runs"
"""Of these, `${NAME:-default}` is the default, as after an empty reply."""
CALL_ARGUMENT = "is given where the script or the function is called"
NOT_SET = "is set neither in the script nor in the environment"
INTEGER_LITERAL = re.compile(r"0|-?[1-9]\d{0,17}")
DIRECTORY = "."
"""Name of the value that is the working directory, which an assignment to `PWD` does not change."""
ALL_NAMES = "*"
"""Name of the value of every variable, where commands that are not known may have set any."""
SET_BY_BASH = frozenset(
    (
        *("BASH", "BASHOPTS", "BASHPID", "BASH_VERSION", "BASH_VERSINFO", "BASH_COMMAND", "BASH_LINENO", "BASH_ARGV"),
        *("BASH_ARGC", "BASH_SUBSHELL", "BASH_ALIASES", "BASH_CMDS", "BASH_ARGV0", "BASH_REMATCH", "COMP_WORDBREAKS"),
        *("COLUMNS", "LINES", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "HISTCMD"),
        *("HOSTNAME", "HOSTTYPE", "LINENO", "MACHTYPE", "OLDPWD", "OPTARG", "OPTERR", "OPTIND", "OSTYPE", "PIPESTATUS"),
        *(
            "PPID",
            "PS1",
            "PS2",
            "PS4",
            "RANDOM",
            "REPLY",
            "SECONDS",
            "SHELL",
            "SHELLOPTS",
            "SHLVL",
            "SRANDOM",
            "TERM",
            "UID",
        ),
        *("HOME", "MAILCHECK", "_", "MAPFILE", "COPROC"),
    )
)
"""Variables that bash may set although neither the environment nor the script does."""


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
    variable: str = ""
    """Variable of the environment that decides it."""

    def __str__(self) -> str:
        return f"{self.construct} {self.reason}"


def cleaned(text: str, *, keep_markers: bool = False) -> str:
    """Return a text without the characters that represent unknown values and blanks, and with `\\n` as line breaks."""
    removed = [0, *range(0xE002 if keep_markers else 0xE000, 0xE200)]
    return text.translate(dict.fromkeys(removed)).replace("\r\n", "\n")


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


class SparseArray(tuple[str, ...]):
    """The words of an array whose subscripts are not 0, 1, …, or of an associative array, in the order of bash."""

    subscripts: tuple[str, ...]
    is_associative: bool

    def __new__(cls, items: Mapping[str, str], *, is_associative: bool) -> SparseArray:
        """Return an array of words by their subscripts."""
        subscripts = sorted(items, key=_bucket if is_associative else int)
        array = super().__new__(cls, (items[subscript] for subscript in subscripts))
        array.subscripts, array.is_associative = tuple(subscripts), is_associative
        return array

    def __eq__(self, other: object) -> bool:
        """Compare words and subscripts."""
        return isinstance(other, SparseArray) and tuple(self) == tuple(other) and self.subscripts == other.subscripts

    def __ne__(self, other: object) -> bool:
        """Compare words and subscripts."""
        return not self == other

    __hash__ = tuple.__hash__


def _bucket(key: str) -> int:
    """Return the place of a key in an associative array of bash 5, which is walked from the first bucket."""
    value = 2166136261
    for byte in key.encode():
        value = (value * 16777619 & 0xFFFFFFFF) ^ byte
    return value & 1023


def subscripts_of(values: Sequence[str]) -> tuple[str, ...]:
    """Return the subscripts of an array."""
    return values.subscripts if isinstance(values, SparseArray) else tuple(map(str, range(len(values))))


def array_of(items: Mapping[str, str], *, is_associative: bool) -> tuple[str, ...]:
    """Return an array of words by their subscripts."""
    if not is_associative and sorted(map(int, items)) == list(range(len(items))):
        return tuple(items[str(number)] for number in range(len(items)))
    return SparseArray(items, is_associative=is_associative)


@dataclass(frozen=True, slots=True)
class ShellState:
    """Variables, attributes and options of a shell at one point of a script, which its commands may change."""

    values: dict[str, tuple[str, ...]]
    attributes: dict[str, str]
    exported: frozenset[str]
    options: frozenset[str]
    functions: dict[str, Any]
    arguments: tuple[str, ...] | None


class Variables:
    """The variables, options and functions of a script at one point."""

    def __init__(
        self,
        path: Path,
        environment: Mapping[str, str],
        unknown_values: list[UnknownValue] | None = None,
        arguments: tuple[str, ...] | None = None,
    ) -> None:
        self.path = self.script = path
        """The file that is read, and the main script."""
        self.inherited = frozenset(environment)
        self.values: dict[str, tuple[str, ...]] = {name: (value,) for name, value in environment.items()}
        """The words of arrays; other values are arrays of one word, and variables that the script unsets of none."""
        self.values |= {"0": (str(path),), "BASH_SOURCE": (str(path),), "#": ("0",)}
        self.values[DIRECTORY] = (environment.get("PWD", "."),)
        self.attributes: dict[str, str] = {}
        """Letters of `declare` by variables: `i`, `l`, `u`, `r`, `A`, and `n` for one that is unknown from here on."""
        self.exported: set[str] = set()
        self.options: set[str] = set()
        """Options of `set` and `shopt` that change what commands do."""
        self.functions: dict[str, Any] = {}
        """Text and position of the body of each function."""
        self.unread: dict[str, str] = {}
        """Why commands of other files, or of `eval`, are not known, by their place."""
        self.not_followed: dict[str, str] = {}
        """Why scripts in processes of their own are not followed, by the place where they start."""
        self.arguments: tuple[str, ...] | None = None
        """Positional parameters; None for those of a script that is read without any."""
        self.local_values: list[dict[str, tuple[tuple[str, ...] | None, str]]] = []
        """Of each function that is followed, the values and attributes of its local variables outside."""
        self.choices: ItemChoices | None = None
        self.unknown_values: list[UnknownValue] = [] if unknown_values is None else unknown_values
        if arguments is not None:
            self.set_arguments(arguments)

    def get(self, name: str) -> tuple[str, ...] | None:
        """Return the words of a variable; None if neither the script nor the environment sets it."""
        if name in self.values:
            return self.values[name]
        if ALL_NAMES in self.values and name not in ("PATH", "IFS"):
            return self.values[ALL_NAMES]
        if name in SET_BY_BASH:
            return (self.unknown(f"${name}", "is set by bash itself", 0),)
        return None

    def scalar(self, name: str) -> str | None:
        """Return the value of a variable, or the word of an array at 0; None if it is not set."""
        values = self.get(name) or ()
        if isinstance(values, SparseArray):
            return dict(zip(values.subscripts, values, strict=True)).get("0")
        return next(iter(values), None)

    def has(self, name: str, attribute: str) -> bool:
        """Return whether `declare` gave a variable an attribute."""
        return attribute in self.attributes.get(name, "")

    def assign(self, name: str, values: tuple[str, ...], line: int) -> None:
        """Set a variable.

        Raises:
            ConfigError: it is readonly.
        """
        if self.has(name, "r"):
            source = f"{self.path}:{line}"
            raise script_error(source, f"{name} is readonly, and set again: bash ends the command here", "remove one")
        if self.has(name, "n"):
            return
        if any(len(value) > MAX_LENGTH for value in values) or len(values) > MAX_LENGTH:
            values = (self.unknown(f"${name}", "is too long", line),)
        elif (self.attributes.get(name, "") + " ")[0] in "ilu" and not isinstance(values, SparseArray):
            values = tuple(self._converted(name, value, line) for value in values)
        self.values[name] = values
        self.exported |= {name} if "a" in self.options else set()

    def _converted(self, name: str, value: str, line: int) -> str:
        """Return a value as the attributes of its variable change it."""
        attributes = self.attributes[name]
        if MARKER.search(value) or ("i" in attributes and INTEGER_LITERAL.fullmatch(value)):
            return value
        if "i" in attributes or not value.isascii():
            return self.unknown(f"${name}", "is converted by `declare`, which is not supported here", line)
        return value.lower() if "l" in attributes else value.upper()

    def set_arguments(self, arguments: tuple[str, ...]) -> None:
        """Set `$1`, `$2`, … and `$#`."""
        values = {name: value for name, value in self.values.items() if not name.isdecimal() or name == "0"}
        values |= {str(number): (argument,) for number, argument in enumerate(arguments, 1)}
        self.values = values | {"#": (str(len(arguments)),)}
        self.arguments = arguments

    def restore(self, values: Mapping[str, tuple[str, ...] | None]) -> None:
        """Set variables to earlier values; None unsets them."""
        for name, value in values.items():
            self.values.pop(name, None)
            self.values |= {} if value is None else {name: value}

    def state(self) -> ShellState:
        """Return what commands may change, as it is now."""
        return ShellState(
            dict(self.values),
            dict(self.attributes),
            frozenset(self.exported),
            frozenset(self.options),
            dict(self.functions),
            self.arguments,
        )

    def reset(self, state: ShellState) -> None:
        """Undo the changes since a state."""
        self.values, self.attributes, self.functions = dict(state.values), dict(state.attributes), dict(state.functions)
        self.exported, self.options, self.arguments = set(state.exported), set(state.options), state.arguments

    def changes(self, before: Mapping[str, tuple[str, ...]]) -> set[str]:
        """Return the variables whose values differ from those before."""
        return {name for name in {*self.values, *before} if self.values.get(name) != before.get(name)}

    def reset_unless_certain(self, state: ShellState) -> set[str]:
        """Undo the changes since a state that may or may not have happened; return what they may set.

        Options, attributes and functions keep what makes a later use of them unknown.
        """
        changed = self.changes(state.values)
        attributes = self.attributes
        touched = {
            name
            for name in {*attributes, *state.attributes}
            if attributes.get(name, "") != state.attributes.get(name, "")
        }
        functions = {name for name in self.functions if self.functions[name] is not state.functions.get(name)}
        functions |= state.functions.keys() - self.functions.keys()
        options, arguments = self.options, self.arguments
        self.reset(state)
        if arguments != state.arguments:
            changed |= {"@"}
        self.attributes |= dict.fromkeys(touched, "n")
        self.functions |= dict.fromkeys(functions)
        self.options |= {f"?{option}" for option in options ^ state.options if option[0] != "?"}
        return changed | touched

    def forget(self, names: Iterable[str], reason: str, line: int) -> None:
        """Make the values of variables unknown for a reason; `ALL_NAMES` stands for all, and `@` for the arguments."""
        names = set(names)
        if ALL_NAMES in names:
            names |= self.values.keys() - {"0", "BASH_SOURCE", "PATH", "IFS"}
        if "@" in names:
            names |= {name for name in self.values if name.isdecimal() and name != "0"} | {"#"}
            self.arguments = (self.unknown("$@", reason, line, is_array=True),)
        for name in names:
            self.values[name] = (self.unknown(f"${name}", reason, line, is_array=True),)

    def unknown(self, construct: str, reason: str, line: int, *, is_array: bool = False, variable: str = "") -> str:
        """Return a marker for an unknown value."""
        return self._marker(UnknownValue(construct, reason, self.place(line), is_array, variable))

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
        return self.is_unknown_count(self.get(name) or ())

    def is_unknown_count(self, values: Sequence[str]) -> bool:
        """Return whether the words of an array stand for an unknown number of them."""
        unknown = self.find_unknown(values[0]) if len(values) == 1 and MARKER.fullmatch(values[0]) else None
        return unknown is not None and unknown.is_array

    def unknown_array(self, text: str) -> str:
        """Return a marker for an array of unknown words, for the reason of the first unknown value in a text."""
        unknown = self.unknown_values[int(MARKER.findall(text)[0])]
        return self._marker(replace(unknown, is_array=True))

    def unknown_scalar(self, text: str) -> str:
        """Return the marker of an unknown value as that of one word."""
        number = int(MARKER.findall(text)[0])
        unknown = self.unknown_values[number]
        return self._marker(replace(unknown, is_array=False)) if unknown.is_array else text

    def depending(self, construct: str, marker: str, line: int) -> str:
        """Return a marker for a value that depends on an unknown one."""
        unknown = self.unknown_values[int(MARKER.findall(marker)[0])]
        return self.unknown(construct, f"depends on {unknown}", line, variable=unknown.variable)

    def known_exports(self) -> dict[str, str]:
        """Return the exported variables whose values are known."""
        values = {name: self.scalar(name) for name in self.exported}
        return {name: value for name, value in values.items() if value is not None and not MARKER.search(value)}


def unknown_value_hint(unknown: UnknownValue, path: Path) -> str:
    """Return what to do about words of a command in a script that are not known."""
    if CALL_ARGUMENT in unknown.reason:
        return f"pass the arguments of the script after `--`: quintet plan {path} -- ARGUMENT …; or write them out"
    return f"write it out in the script, or set what it depends on: {unknown.variable or 'NAME'}=… quintet plan {path}"
