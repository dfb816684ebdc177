"""Settings of a server that a run starts for itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Model and address of a server."""

    config: dict[str, Any]
    """Configuration of engine and model, `policy.path`, as JSON."""
    host: str
    token: str
    context: int | None
    """Maximum tokens of prompt and reply."""
    default_context: int
    """The same if `context` is None, and the model supports as many."""
    template: str | None = None
    """Chat template, as in `data.template`."""

    def to_line(self) -> bytes:
        """Return the line for standard input."""
        return json.dumps(asdict(self)).encode() + b"\n"
