"""Train a robot arm from camera images by PPO and GRPO on several seeds, and with blank images.

    python benchmarks/embodied_arm.py [--runs reach_ppo reach_grpo …] [--seeds 0 1 2] [--controls reach_ppo …]
        [--control-seeds 0] [--out FILE] [KEY=VALUE ...]

Writes one JSON file: actions and images of the simulator per second; per run and seed the wall time and the CPU time of
the whole command on one thread, peak resident memory, and success before and after reinforcement learning: greedy on
held-out start states, and sampled in training. Controls are the same with black images.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine
from main_job import ROOT, _mean

RUNS = {
    "reach_ppo": "examples/native/arm.yaml",
    "reach_grpo": "examples/native/arm_grpo.yaml",
    "reach_color_ppo": "examples/native/arm_color.yaml",
}
"""Configuration of each run."""


def run_seed(run: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Run the whole command in a new directory; return its figures."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["train", str(ROOT / RUNS[run]), f"seed={seed}", f"output_dir={directory}", "name=run"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "quintet", *arguments, *overrides],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1"},
        )
        seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = [json.loads(line) for line in (Path(directory) / "run/metrics.jsonl").read_text().splitlines()]
    validations = [
        (line["step"], round(value, 4))
        for line in lines
        for key, value in line.items()
        if key.startswith("val/") and key.endswith("/success_rate")
    ]
    sampled = [line["env/success_once"] for line in lines if "env/success_once" in line]
    return {
        "seed": seed,
        "wall_seconds": round(seconds, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "max_rss_gb": round(after.ru_maxrss / 1e6, 3),
        "warm_start_seconds": lines[0]["time_seconds"],
        "success_after_warm_start": validations[0][1],
        "success_after_rl": validations[-1][1],
        "lift": round(validations[-1][1] - validations[0][1], 4),
        "validations": validations,
        "sampled_success_first_steps": _mean(sampled[:3]),
        "sampled_success_last_steps": _mean(sampled[-5:]),
        "episodes_failed": sum(line.get("env/failed", 0) for line in lines),
    }


def simulator_speed() -> dict[str, float]:
    """Return actions per second of each task, and images of 32 and 64 pixels per second of each renderer, per second
    of CPU time."""
    import numpy as np

    from quintet.config.native.arm_simulator import ArmOptions
    from quintet.envs.simulators.arm.simulator import ArmSimulator
    from quintet.envs.simulators.arm.tasks import TASKS

    robots, figures = np.arange(256), {}
    for task in TASKS:
        simulator = ArmSimulator(task, ArmOptions(), len(robots), 0)
        simulator.reset(robots, robots)
        started = time.process_time()
        for _ in range(40):
            simulator.step(robots, simulator.expert_actions(robots))
        figures[f"{task}_actions"] = round(40 * len(robots) / (time.process_time() - started))
    for renderer, size in (("egl", 32), ("egl", 64), ("numpy", 32), ("numpy", 64)):
        simulator = ArmSimulator("reach", ArmOptions(renderer=renderer), len(robots), 0, (size, size))
        simulator.reset(robots, robots)
        simulator.observe(robots[:1])
        started = time.process_time()
        simulator.observe(robots)
        figures[f"{renderer}_images_{size}"] = round(len(robots) / (time.process_time() - started))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="+", choices=sorted(RUNS), default=sorted(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--controls", nargs="*", choices=sorted(RUNS), default=["reach_grpo", "reach_ppo"])
    parser.add_argument("--control-seeds", type=int, nargs="+", help="the first of --seeds if not given")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/embodied_arm.json")
    arguments, overrides = parser.parse_known_args()
    result: dict[str, Any] = {"machine": machine(), "overrides": overrides, "per_second": simulator_speed()}
    runs = [(run, run, seed, []) for run in arguments.runs for seed in arguments.seeds]
    blank = ["env.options.blank_images=true"]
    control_seeds = arguments.control_seeds or arguments.seeds[:1]
    runs += [(f"{run}_blank_images", run, seed, blank) for run in arguments.controls for seed in control_seeds]
    for key, run, seed, control in runs:
        result.setdefault(key, []).append(run_seed(run, seed, [*overrides, *control]))
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(key, json.dumps(result[key][-1]), flush=True)


if __name__ == "__main__":
    main()
