"""Run the FrozenLake training command on several seeds, and controls that have nothing to learn from.

    python benchmarks/main_job.py [CONFIG] [--seeds 0 1 2] [--controls zero_advantages blank_images] [--control-seeds 0]
        [--out FILE] [KEY=VALUE ...]

Writes one JSON file: per seed the wall time, peak resident memory, and success before and after reinforcement
learning, greedy on held-out maps and sampled on the maps of the first and last training steps; for each control the
same on its seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).parent.parent
ZERO_ADVANTAGES = """
import torch
from quintet.config.native.advantages import ADVANTAGES

entry = ADVANTAGES.get("grpo")
real = entry.load()

def zero(batch, config):
    advantages, returns = real(batch, config)
    return torch.zeros_like(advantages), returns

del ADVANTAGES._entries["grpo"]
ADVANTAGES.add("grpo", zero, help="advantages of zero: nothing to learn from")
"""
BLANK_IMAGES = """
import numpy as np
from quintet.envs import grid

real = grid.draw_tiles
grid.draw_tiles = lambda rows, tiles: np.zeros_like(real(rows, tiles))
"""
CONTROLS = {"zero_advantages": ZERO_ADVANTAGES, "blank_images": BLANK_IMAGES}
"""Code that runs before the command."""
RUN = """
import sys
from quintet.cli.main import main

sys.argv = ["quintet", *sys.argv[1:]]
main()
"""


def run_seed(config: str | None, seed: int, overrides: list[str], *, control: str | None = None) -> dict[str, Any]:
    """Run the whole command in a new directory, with one of `CONTROLS`; return its figures."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["train", *([config] if config else []), f"seed={seed}", f"output_dir={directory}", "name=run"]
        code = ["-c", CONTROLS[control] + RUN] if control else ["-m", "quintet"]
        started = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        subprocess.run([sys.executable, *code, *arguments, *overrides], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        memory = max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
        lines = [json.loads(line) for line in (Path(directory) / "run/metrics.jsonl").read_text().splitlines()]
    validations = [
        (line["step"], line[key])
        for line in lines
        for key in line
        if key.endswith("/success_rate") and key.startswith("val/")
    ]
    return {
        "seed": seed,
        "wall_seconds": round(seconds, 1),
        "max_rss_gb": round(memory / 1e6, 3),
        "warm_start_seconds": lines[0]["time_seconds"],
        "success_after_warm_start": validations[0][1],
        "success_after_rl": validations[-1][1],
        "validations": validations,
        "sampled_success_first_steps": _mean(line["trajectory/success_rate"] for line in lines[1:4]),
        "sampled_success_last_steps": _mean(line["trajectory/success_rate"] for line in lines[-5:]),
        "median_step_seconds": sorted(line["timing_s/step"] for line in lines[1:])[(len(lines) - 1) // 2],
        "median_throughput_tokens_per_second": sorted(line["perf/throughput"] for line in lines[1:])[
            (len(lines) - 1) // 2
        ],
        "largest_engine_learner_gap": max(
            line["training/rollout_probs_diff_max"] for line in lines[1:] if "training/rollout_probs_diff_max" in line
        ),
    }


def _mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--controls", nargs="+", choices=sorted(CONTROLS), default=[])
    parser.add_argument("--control-seeds", type=int, nargs="+", help="the first of --seeds if not given")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/main_job.json")
    arguments, overrides = parser.parse_known_args()
    result: dict[str, Any] = {
        "machine": machine(),
        "config": os.path.relpath(arguments.config, ROOT) if arguments.config else "defaults",
        "overrides": overrides,
    }
    runs = [("seeds", None, seed) for seed in arguments.seeds]
    runs += [(name, name, seed) for name in arguments.controls for seed in arguments.control_seeds or runs[0][2:]]
    for key, control, seed in runs:
        result.setdefault(key, []).append(run_seed(arguments.config, seed, overrides, control=control))
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(key, json.dumps(result[key][-1]), flush=True)


if __name__ == "__main__":
    main()
