"""Measure what Ray costs a run, and compare the metrics of a run in one process and in several.

    python benchmarks/runtime.py [--rounds 3] [--out benchmarks/results/runtime.json]

Writes one JSON file: medians of the seconds of a training step, of the whole command, and of the start of Ray until
rank 0 runs (the difference of the commands), for the same run of one process without and with Ray; and whether the
default training job has the same metrics, bit for bit, in one process and under Ray with actor, reference and two
engines in a process each.
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

from machine import machine
from quintet.tracking.metrics import without_timing

GROUPS = (
    "training.groups_per_step=8",
    "training.samples_per_group=8",
    "training.threads=1",
    "checkpoint.every_steps=0",
)
TIMED = (
    *("training.steps=8", *GROUPS, "warm_start=null"),
    *("validation.every_steps=-1", "validation.before_training=false"),
)
COMPARED = (
    *("training.steps=4", *GROUPS, "warm_start.until_success=null", "warm_start.updates=25"),
    "algorithm.kl={apply_to: loss}",
)
"""The default job with a shorter warm start, and with a reference."""
SEPARATE = (
    *("placement.devices_per_node=4", "placement.actor.devices=[0]"),
    *("placement.reference.devices=[1]", "placement.rollout.devices=[2,3]", "--ray", "local"),
)


def run(directory: Path, name: str, *options: str) -> tuple[list[dict[str, Any]], float]:
    """Return the metrics of the steps, and the seconds of the whole command."""
    command = [sys.executable, "-m", "quintet", "train", f"name={name}", *options]
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    lines = (directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], seconds


def compare_metrics(directory: Path) -> dict[str, Any]:
    """Run the default job in one process and in four, and compare the metrics of all steps."""
    alone, _ = run(directory, "alone", *COMPARED)
    separate, _ = run(directory, "separate", *COMPARED, *SEPARATE)
    pairs = [(without_timing(a), without_timing(b)) for a, b in zip(alone, separate, strict=True)]
    different = {name for a, b in pairs for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    gaps = (abs(a[name] - b[name]) for a, b in pairs for name in different & a.keys() & b.keys())
    return {
        "lines": len(pairs),
        "metrics": len({name for a, _ in pairs for name in a}),
        "bit_equal": not different,
        "different": sorted(different),
        "max_difference": max(gaps, default=0.0),
    }


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
                metrics, command = run(Path(directory), f"{kind}_{number}", *TIMED, *words)
                steps[kind] += [line["timing_s/step"] for line in metrics[1:]]
                commands[kind].append(command)
        separate = compare_metrics(Path(directory))
    median_steps = {kind: statistics.median(seconds) for kind, seconds in steps.items()}
    median_commands = {kind: statistics.median(seconds) for kind, seconds in commands.items()}
    result: dict[str, Any] = {
        "machine": machine(),
        "step_seconds": {kind: round(seconds, 3) for kind, seconds in median_steps.items()},
        "step_ratio": round(median_steps["with"] / median_steps["without"], 3),
        "command_seconds": {kind: round(seconds, 1) for kind, seconds in median_commands.items()},
        "start_seconds": round(median_commands["with"] - median_commands["without"], 1),
        "actor_reference_and_two_engines": separate,
    }
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
