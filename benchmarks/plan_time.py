"""Time `quintet plan` on every example.

    python benchmarks/plan_time.py [--times 3] [--out FILE]

Writes one JSON file: the median wall time of the whole command per example, and the largest median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import machine

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/unit/config"))

from corpus import EXAMPLES, NAMES, corpus  # noqa: E402


def seconds(path: Path, times: int) -> float:
    """Return the median wall time of the whole command."""
    measured = []
    environment = os.environ | {"EMBODIED_PATH": str(EXAMPLES / "rlinf"), "REPO_PATH": str(EXAMPLES / "rlinf")}
    for _ in range(times):
        started = time.perf_counter()
        command = [sys.executable, "-m", "quintet", "plan", str(path)]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        measured.append(time.perf_counter() - started)
    return round(statistics.median(measured), 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    medians = {NAMES[path]: seconds(path, arguments.times) for path in corpus()}
    result = {
        "machine": machine(),
        "times": arguments.times,
        "largest_median_seconds": max(medians.values()),
        "median_seconds": medians,
    }
    text = json.dumps(result, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
