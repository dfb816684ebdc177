"""What goes wrong in a way the user can mend: one message, exit status 2, no traceback.

Everything else that raises is a defect of Quintet and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ConfigError", "InterruptedRun", "MachineError", "UserError", "nearest"]


def nearest(word: str, legal: Iterable[str]) -> str | None:
    """The legal word closest in spelling to `word`, or None when nothing is close."""
    found = difflib.get_close_matches(word, list(legal), n=1, cutoff=0.6)
    return found[0] if found else None


class UserError(Exception):
    """A fault outside the program: what happened in `message`, what to do in `hint`."""

    exit_status = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class ConfigError(UserError):
    """A key that is unknown, a value that is illegal, or keys that contradict each other.

    `key` is the dotted path, `value` what was given, `source` where it was given
    (`file.yaml:12` or `command line`).
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        value: object = None,
        source: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.key = key
        self.value = value
        self.source = source


class MachineError(UserError):
    """The machine says no: a directory that can't be written, a full disk, a missing file."""


class InterruptedRun(UserError):
    """The run was asked to stop (Ctrl-C, SIGTERM) and left its last good checkpoint standing."""

    exit_status = 130
