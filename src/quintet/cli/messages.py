"""Messages of all commands."""

from __future__ import annotations

import sys


def warn(message: str) -> None:
    """Print a warning to stderr."""
    print(f"warning: {message}", file=sys.stderr)
