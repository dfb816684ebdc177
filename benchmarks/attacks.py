"""Attack everything that reads data of others, with seeded random inputs.

    python benchmarks/attacks.py [--parts NAME …] [--scale 0.01] [--seed 0] [--out benchmarks/results/attacks.json]

Writes one JSON file with what each part has counted; parts that are not run keep their last result. The exit status is
1 if an attack had an effect or ended a process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from machine import machine

RESULT = Path(__file__).parent / "results" / "attacks.json"
PARTS: Mapping[str, int] = {
    "configurations": 10_000,
    "requests": 10_000,
    "programs": 1_000,
    "runs": 500,
    "workers": 2_000,
}
"""Parts, each a module `attack_NAME`, and the attacks of each; of requests, so many to each of two services."""
FAULTS = ("effects", "deaths", "accepted")
"""Counts that must be 0, wherever a part reports them."""


def faults(result: object) -> Iterator[tuple[str, int]]:
    """Yield the counts of a result that should be 0 and are not."""
    if not isinstance(result, Mapping):
        return
    for name, value in result.items():
        if name in FAULTS:
            count = value if isinstance(value, int) else len(value)
            if count:
                yield name, count
        else:
            yield from faults(value)


def measure(name: str, scale: float, seed: int) -> dict[str, Any]:
    """Run a part, and return its counts with the machine and the time."""
    description, started, count = machine(), time.perf_counter(), max(1, round(PARTS[name] * scale))
    counts = importlib.import_module(f"attack_{name}").run(count, seed)
    return {
        "machine": description,
        "attacks": count,
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 1),
        "counts": counts,
    }


def main() -> int:
    """Run the parts, write the file, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the attacks of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    failed = False
    for name in options.parts:
        results[name] = measure(name, options.scale, options.seed)
        print(name, json.dumps(results[name]), flush=True)
        for fault, count in faults(results[name]["counts"]):
            failed = True
            print(f"attacks: {name}: {count} {fault}", file=sys.stderr)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
