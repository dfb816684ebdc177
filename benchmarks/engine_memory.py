"""Measure the memory that a sleeping engine of a standalone worker returns to the system.

    python benchmarks/engine_memory.py [--out benchmarks/results/engine_memory.json]

An `hf` engine with 3 M random float32 weights answers 256 requests at a time, sleeps, wakes up and answers them again,
three times. Writes one JSON file: resident memory of the worker in MiB after each of these.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import psutil

from engines_on_ranks import create_policy
from weight_sync import SIZES, build_engine, policy_weights, standalone_worker

REQUESTS, PROMPT, RESPONSE, ROUNDS = 256, 400, 16, 3


def measure(policy: Path) -> dict[str, Any]:
    from quintet.config.compose import load_experiment
    from quintet.records import Request

    words = ["policy.preset=null", f"policy.path={policy}", "warm_start=null", "training.threads=1"]
    words += ["placement.devices_per_node=2", "placement.actor.devices=[0]", "placement.rollout.devices=[1]"]
    limits = [f"rollout.max_prompt_tokens={PROMPT}", f"rollout.max_response_tokens={RESPONSE}"]
    config = load_experiment(None, [*words, *limits, f"rollout.max_concurrent={REQUESTS}"]).experiment
    mib: dict[str, list[int]] = {"asleep": [], "generating": []}
    with standalone_worker() as worker:
        engine = build_engine(worker, config, policy, policy_weights(config, lambda: iter(())))
        process = psutil.Process(worker.pid)
        for _ in range(ROUNDS):
            engine.sleep()
            engine.finish_calls()
            mib["asleep"].append(process.memory_info().rss >> 20)
            engine.wake_up()
            for number in range(REQUESTS):
                prompt = (5 + number % 200, 5 + number // 200, *(5 + n % 200 for n in range(2, PROMPT)))
                engine.add_request(Request(number, prompt, RESPONSE, seed=number))
            while engine.busy:
                engine.step()
            mib["generating"].append(process.memory_info().rss >> 20)
        engine.sleep()
        engine.finish_calls()
        mib["asleep"].append(process.memory_info().rss >> 20)
    return mib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        create_policy(Path(directory), *SIZES["3 M"])
        result = measure(Path(directory))
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
