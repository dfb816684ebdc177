"""Errors that the user can fix: one message, exit status 2, no traceback.

All other exceptions are bugs of Quintet and keep their traceback.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable

SIGNALLED = 128
"""Added to the number of a signal, the exit status of a process that ended by it, as in a shell."""


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid word closest in spelling to `word`, or None if none is close."""
    matches = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(word: str, valid: Iterable[str], form: str = "{!r}") -> str:
    """Return a question about the valid word closest in spelling to `word`, in this form; empty if none is close.

    >>> did_you_mean("sokobn", ["sokoban", "bandit"]), did_you_mean("maze", ["sokoban", "bandit"])
    ("did you mean 'sokoban'?", '')
    """
    close = nearest(word, valid)
    return f"did you mean {form.format(close)}?" if close else ""


class UserError(Exception):
    """Error outside the program: `message` says what happened, `hint` what to do."""

    exit_status = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class ConfigError(UserError):
    """Unknown key, invalid value, or keys that contradict each other.

    `key` is the dotted path and `source` the origin of `value` (`file.yaml:12` or `command line`).
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


class UnsupportedRunError(ConfigError):
    """A kind of run that this version lacks; `quintet plan` names it, every other command refuses it."""


class MachineError(UserError):
    """Error of the machine: a directory without write permission, a full disk, a missing file."""


class InterruptedRun(UserError):
    """The run was stopped by a signal (Ctrl-C is SIGINT); its last complete checkpoint is kept.

    The exit status is that of a shell for a process that ends by the signal: 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, message: str, hint: str | None = None, number: int = signal.SIGINT) -> None:
        super().__init__(message, hint)
        self.exit_status = SIGNALLED + number
