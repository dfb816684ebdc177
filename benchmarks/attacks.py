"""Attack everything that reads data of others, with seeded random inputs.

    python benchmarks/attacks.py [--parts NAME …] [--scale 0.01] [--seed 0] [--pieces 1] [--out FILE]

Writes one JSON file with what each part has counted; parts that are not run keep their last result. With `--pieces`, a
part runs in pieces with consecutive seeds, and the file has the sums of those that are done. The exit status is 1 if an
attack had an effect or ended a process.
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
PARTS: Mapping[str, tuple[str, int, Mapping[str, str]]] = {
    "configurations": ("attack_configurations", 10_000, {}),
    "serve": ("attack_requests", 10_000, {"server": "serve"}),
    "serve-envs": ("attack_requests", 10_000, {"server": "serve-envs"}),
    "programs": ("attack_programs", 1_000, {}),
    "runs": ("attack_runs", 500, {}),
    "workers": ("attack_workers", 2_000, {}),
}
"""Module, number of attacks and further arguments of `run` by part."""
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


def measure(name: str, scale: float, seed: int, pieces: int = 1) -> Iterator[dict[str, Any]]:
    """Run a part; yield its counts so far after each piece, with the machine and the time."""
    module, full_count, arguments = PARTS[name]
    description, started = machine(), time.perf_counter()
    count = max(1, round(full_count * scale / pieces))
    counts: dict[str, Any] = {}
    for piece in range(pieces):
        counts = added(counts, importlib.import_module(module).run(count, seed + piece, **arguments))
        yield {
            "machine": description,
            "attacks": count * (piece + 1),
            "seed": seed if pieces == 1 else [*range(seed, seed + piece + 1)],
            "seconds": round(time.perf_counter() - started, 1),
            "counts": counts,
        }


def added(counts: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of two pieces' numbers, and their lists one after the other."""
    sums = dict(others)
    for name, value in counts.items():
        if isinstance(value, Mapping):
            sums[name] = added(value, others.get(name, {}))
        elif name not in others:
            sums[name] = value
        elif isinstance(value, int | list):
            sums[name] = value + others[name]
    return sums


def main() -> int:
    """Run the parts, write the file, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the attacks of each part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pieces", type=int, default=1, help="number of pieces of each part")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    failed = False
    for name in options.parts:
        for result in measure(name, options.scale, options.seed, options.pieces):
            results[name] = result
            print(name, json.dumps(results[name]), flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
        for fault, count in faults(results[name]["counts"]):
            failed = True
            print(f"attacks: {name}: {count} {fault}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
