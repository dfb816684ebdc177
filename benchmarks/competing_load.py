"""Measure `quintet eval` alone and two at once, by how long OpenMP threads spin at a barrier (`GOMP_SPINCOUNT`).

Usage: python benchmarks/competing_load.py RUN [--rounds 3] [--out benchmarks/results/competing_load.json]

RUN is a run directory, for example of `quintet train training.steps=6`. 300000 is libgomp's default; `quintet`
follows the load with 1000 if none is set (`runtime/openmp_waiting.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

SPIN_COUNTS = (300_000, 1_000)
RATE = re.compile(r"([\d,.]+) (?:episodes/s|s/episode)")


def episodes_per_second(run: Path, spin_count: int) -> float:
    """Evaluate the run's model and return the rate that the last progress line shows."""
    with TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "quintet", "eval", str(run.resolve())]
        env = {**os.environ, "GOMP_SPINCOUNT": str(spin_count)}
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=True, timeout=600)
    rates = RATE.findall(done.stdout + done.stderr)
    if not rates:
        raise RuntimeError(f"no rate in the output of {command}:\n{done.stdout}{done.stderr}")
    return float(rates[-1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "competing_load.json")
    options = parser.parse_args()
    rates: dict[str, dict[int, list[float]]] = {"alone": {}, "two at once": {}}
    for _ in range(options.rounds):
        for name, processes in (("alone", 1), ("two at once", 2)):
            for spin_count in SPIN_COUNTS:
                with ThreadPoolExecutor(processes) as pool:
                    measured = list(pool.map(episodes_per_second, [options.run] * processes, [spin_count] * processes))
                rates[name].setdefault(spin_count, []).extend(measured)
                print(name, spin_count, measured, flush=True)
    medians = {name: {count: statistics.median(each) for count, each in by.items()} for name, by in rates.items()}
    result = {"cores": os.cpu_count(), "rounds": options.rounds, "episodes_per_second": medians}
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
