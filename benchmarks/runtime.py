"""Measure what Ray costs a run: the same run of one process without and with Ray.

    python benchmarks/runtime.py [--rounds 3] [--out benchmarks/results/runtime.json]

Writes one JSON file: medians of the seconds of a training step, of the whole command, and of the start of Ray until
rank 0 runs (the difference of the commands).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 8
WORDS = (
    f"training.steps={STEPS}",
    "training.groups_per_step=8",
    "training.samples_per_group=8",
    "training.threads=1",
    "warm_start=null",
    "validation.every_steps=-1",
    "validation.before_training=false",
    "checkpoint.every_steps=0",
)


def run(directory: Path, name: str, *options: str) -> tuple[list[float], float]:
    """Return the seconds of the steps after the first one, and of the whole command."""
    command = [sys.executable, "-m", "quintet", "train", *WORDS, f"name={name}", *options]
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    lines = (directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["timing_s/step"] for line in lines][1:], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    steps: dict[str, list[float]] = {"without": [], "with": []}
    commands: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.rounds):
            for kind, words in (("without", ()), ("with", ("--ray", "local"))):
                seconds, command = run(Path(directory), f"{kind}_{number}", *words)
                steps[kind] += seconds
                commands[kind].append(command)
    median_steps = {kind: statistics.median(seconds) for kind, seconds in steps.items()}
    median_commands = {kind: statistics.median(seconds) for kind, seconds in commands.items()}
    result: dict[str, Any] = {
        "machine": {"cores": os.cpu_count()},
        "step_seconds": {kind: round(seconds, 3) for kind, seconds in median_steps.items()},
        "step_ratio": round(median_steps["with"] / median_steps["without"], 3),
        "command_seconds": {kind: round(seconds, 1) for kind, seconds in median_commands.items()},
        "start_seconds": round(median_commands["with"] - median_commands["without"], 1),
    }
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
