"""What the files of results say about where they were measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return date, commit, processor, versions, and the load (processes that want to run) before the measurement."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "load_before": round(os.getloadavg()[0], 1),
    }


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
