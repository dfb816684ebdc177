"""Run the FrozenLake training command on several seeds, and with all advantages set to zero as a control.

    python benchmarks/main_job.py [CONFIG] [--seeds 0 1 2] [--control] [--out FILE]

Writes one JSON file: per seed the wall time, peak resident memory, and success before and after reinforcement
learning, and for the control the same on the first seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CONTROL = """
import sys
import torch
from quintet.config.native.advantages import ADVANTAGES
from quintet.cli.main import main

entry = ADVANTAGES.get("{name}")
real = entry.load()

def zero(batch, config):
    advantages, returns = real(batch, config)
    return torch.zeros_like(advantages), returns

del ADVANTAGES._entries["{name}"]
ADVANTAGES.add("{name}", zero, help="advantages of zero: nothing to learn from")
sys.argv = ["quintet", *sys.argv[1:]]
main()
"""


def run_seed(config: str | None, seed: int, *, control: bool, overrides: list[str]) -> dict[str, Any]:
    """Run the whole command in a new directory; return its figures."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["train", *([config] if config else []), f"seed={seed}", f"output_dir={directory}", "name=run"]
        code = ["-c", CONTROL.format(name="grpo")] if control else ["-m", "quintet"]
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
        "median_step_seconds": sorted(line["timing_s/step"] for line in lines[1:])[(len(lines) - 1) // 2],
        "median_throughput_tokens_per_second": sorted(line["perf/throughput"] for line in lines[1:])[
            (len(lines) - 1) // 2
        ],
        "largest_engine_learner_gap": max(
            line["training/rollout_probs_diff_max"] for line in lines[1:] if "training/rollout_probs_diff_max" in line
        ),
    }


def machine() -> dict[str, Any]:
    """Return the description of this machine."""
    import torch
    import transformers

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--control", action="store_true", help="also run the first seed with advantages of zero")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/main_job.json")
    arguments, overrides = parser.parse_known_args()
    result: dict[str, Any] = {
        "machine": machine(),
        "config": os.path.relpath(arguments.config, ROOT) if arguments.config else "defaults",
        "overrides": overrides,
        "seeds": [],
    }
    for seed in arguments.seeds:
        result["seeds"].append(run_seed(arguments.config, seed, control=False, overrides=overrides))
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result["seeds"][-1]), flush=True)
    if arguments.control:
        result["zero_advantages"] = run_seed(arguments.config, arguments.seeds[0], control=True, overrides=overrides)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result["zero_advantages"]), flush=True)


if __name__ == "__main__":
    main()
