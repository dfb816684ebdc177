"""What the files of results say about where they were measured."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path


def processor_name() -> str:
    """Return the processor's name from the kernel, or the machine's architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str:
    """Return the commit of this checkout, with a plus sign if files differ from it; empty without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=10", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
