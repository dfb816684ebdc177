"""Train on sums of two numbers with verifiable rewards: GRPO on several seeds, PPO and RLOO on the first.

    python benchmarks/verified_answers.py [--seeds 0 1 2] [--out FILE]

Generates data and a policy with 0.9 million parameters per seed and runs `quintet train
examples/native/addition.yaml`. Writes one JSON file: per run the wall time and the accuracy on held-out sums,
decoded greedily, after the warm start and after reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).parent.parent
CONFIG = "examples/native/addition.yaml"
ALGORITHMS = {
    "grpo": [],
    "rloo": ["algorithm.advantage={name: rloo}"],
    "ppo": ["algorithm.advantage={name: gae, lam: 1.0}", "critic.optimizer.learning_rate=1e-3"],
}


def quintet(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "quintet", *words], check=True, stdout=subprocess.DEVNULL)


def run(algorithm: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Run one seed from scratch; return its figures."""
    with tempfile.TemporaryDirectory() as directory:
        data = f"{directory}/data"
        started = time.perf_counter()
        quintet(
            "data",
            "make",
            "addition",
            data,
            "--train",
            "4000",
            "--validation",
            "256",
            "--style",
            "worked",
            "--seed",
            str(seed),
        )
        files = [f"data.train_files={data}/train.parquet", f"data.validation_files={data}/validation.parquet"]
        places = [f"seed={seed}", f"output_dir={directory}", "name=run"]
        quintet("train", str(ROOT / CONFIG), *files, *places, *ALGORITHMS[algorithm], *overrides)
        seconds = time.perf_counter() - started
        lines = [json.loads(line) for line in (Path(directory) / "run/metrics.jsonl").read_text().splitlines()]
    validations = [(line["step"], line[key]) for line in lines for key in line if key == "val/prompts/success_rate"]
    return {
        "algorithm": algorithm,
        "seed": seed,
        "wall_seconds": round(seconds, 1),
        "warm_start_seconds": round(lines[0]["time_seconds"], 1),
        "right_after_warm_start": validations[0][1],
        "right_after_rl": validations[-1][1],
        "lift": round(validations[-1][1] - validations[0][1], 4),
        "validations": validations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/verified_answers.json")
    arguments, overrides = parser.parse_known_args()
    result: dict[str, Any] = {"machine": machine(), "config": CONFIG, "overrides": overrides, "runs": []}
    for algorithm in arguments.algorithms:
        for seed in arguments.seeds:
            result["runs"].append(run(algorithm, seed, overrides))
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result["runs"][-1]), flush=True)


if __name__ == "__main__":
    main()
