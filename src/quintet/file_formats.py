"""Format of run directories and checkpoints, so that another version says what it cannot read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quintet import __version__
from quintet.errors import MachineError

FORMAT = 1
"""Increased when an earlier version would misread what this one writes. Files without a format have this one, too."""


def format_fields() -> dict[str, Any]:
    """Return what a state file says about its format: the number, and the version that has written it."""
    return {"format": FORMAT, "quintet": __version__}


def check_format(state: Mapping[str, Any], path: Path) -> None:
    """Check that this version reads a state file.

    Raises:
        MachineError: it has a newer format.
    """
    number = state.get("format", FORMAT)
    if not isinstance(number, int) or number > FORMAT:
        raise MachineError(
            f"{path} was written by Quintet {state.get('quintet', 'of an unknown version')} in format {number}; "
            f"this is {__version__}, which reads formats up to {FORMAT}",
            "use that version or a newer one, or start another run under another `name`",
        )
