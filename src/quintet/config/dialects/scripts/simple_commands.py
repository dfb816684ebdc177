"""Texts with commands, and commands as programs receive them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ScriptText:
    """Text with commands, and where it stands."""

    text: str
    first_line: int
    path: Path
    line_breaks: list[int]
    skipped_to: dict[tuple[int, tuple[str, ...]] | None, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Argument:
    """A word after expansion, as a program receives it."""

    text: str
    line: int
    path: Path
    """The file in which it stands."""


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """A program that a script runs, or may run."""

    words: tuple[Argument, ...]
    """Its name and arguments."""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script has exported before."""
    start_line: int | None = None
    """Line of the main script from which it is reached, if it stands in another file."""
    in_process: bool = False
    """Whether it is one of a script that the main script runs in a process of its own."""
    conditions: tuple[str, ...] = ()
    """What is assumed where it is not known whether it runs."""

    @property
    def source(self) -> str:
        """Its `FILE:LINE`."""
        return f"{self.words[0].path}:{self.words[0].line}"


@dataclass(frozen=True, slots=True)
class ScriptCommands:
    """The commands of a script in the order in which they run."""

    commands: tuple[ScriptCommand, ...]
    of_uncalled_functions: tuple[ScriptCommand, ...] = ()
    """Commands of functions that the script itself does not call."""
    exit_line: int | None = None
    """Line at which the script ends before its last line."""
    exit_reason: str = ""
    """Why it ends there."""
    after_exit: tuple[ScriptCommand, ...] = ()
    """Commands after that line, which do not run."""
