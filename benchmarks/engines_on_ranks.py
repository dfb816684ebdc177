"""Measure generation on one and on two ranks, each on one CPU core.

    python benchmarks/engines_on_ranks.py [--out benchmarks/results/engines_on_ranks.json]

Each rank has an `hf` engine with random weights. All requests have a prompt of 100 tokens of their own and responses of
64 tokens, and are submitted at once. Writes one JSON file: medians of response tokens per second, prefill included, and
the duration of a call that all ranks answer.
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

PROMPT, RESPONSE, ROUNDS, CALLS = 100, 64, 3, 200
SIZES = {"3 M": (192, 6), "25 M": (512, 8)}
"""Hidden size and layers of the policies."""
REQUESTS = (16, 64, 256)


def create_policy(directory: Path, hidden: int, layers: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from quintet.policies.tiny_models import create_preset_policy

    create_preset_policy("grid-3m", directory, ["P _ O\n_ _ G go left"], seed=0)
    config = AutoConfig.from_pretrained(directory)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 4 * hidden}
    config.update({**sizes, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "head_dim": 64})
    config.layer_types = None
    AutoModelForCausalLM.from_config(
        type(config)(**{k: v for k, v in config.to_dict().items() if v is not None})
    ).save_pretrained(directory)


def measure_rank(policy: Path) -> None:
    """Measure on rank 0, and print the result; the other ranks work for it."""
    from quintet.config.compose import load_experiment
    from quintet.config.torchrun import current_rank
    from quintet.rollout.engines.restarting_engine import RestartingEngine
    from quintet.runtime.calls.listener import WorkerListener
    from quintet.runtime.calls.run_secret import RunSecret
    from quintet.runtime.controller import Controller
    from quintet.runtime.engines.engine_builders import engine_builder, load_checked_tokenizer
    from quintet.runtime.engines.engine_group import RoutedEngines
    from quintet.runtime.worker_process import run_worker
    from quintet.training.parallel.rendezvous import rendezvous

    secret = RunSecret("the secret of this benchmark")
    rank = current_rank()
    ranks = rendezvous(rank, "benchmark", 60.0)
    if rank.rank:
        run_worker(ranks, secret)
        ranks.close()
        return
    words = ["policy.preset=null", f"policy.path={policy}", "warm_start=null", "training.threads=1"]
    words.append(f"placement.devices_per_node={rank.size}")
    limits = [f"rollout.max_prompt_tokens={PROMPT}", f"rollout.max_response_tokens={RESPONSE}"]
    config = load_experiment(None, [*words, *limits]).experiment
    others_by_rank = {process.rank: process.components for process in ranks.processes[1:]}
    listener = WorkerListener(ranks.address, others_by_rank, ranks.processes[0].fingerprint, 60.0, secret=secret)
    listener.publish(ranks.shared_store)
    controller = Controller.on_ranks(ranks, listener)
    learners = controller.build_learners(config, policy)
    tokenizer = load_checked_tokenizer(config, policy, learners.actor.model.config.vocab_size)
    remote = controller.build_remote_engines(config, policy, learners)
    builder = engine_builder(config, policy, learners, tokenizer)
    others = remote.engines()
    engines = RoutedEngines([RestartingEngine(builder, remote.weights), *others])
    speeds = {count: statistics.median(_speed(engines, count) for _ in range(ROUNDS)) for count in REQUESTS}
    result: dict[str, Any] = {"tokens_per_second": {count: round(speed) for count, speed in speeds.items()}}
    started = time.perf_counter()
    for _ in range(CALLS):
        for engine in others:
            engine.reset_prefix_cache()
            engine.finish_calls()
    print(json.dumps(result | {"call_ms": round((time.perf_counter() - started) / CALLS * 1000, 2)}))
    controller.close()
    ranks.close()


def _speed(engines: Any, count: int) -> float:
    """Return the tokens per second of `count` requests."""
    from quintet.records import Request

    engines.reset_prefix_cache()
    for number in range(count):
        prompt = (number % 250 + 5, *range(5, 4 + PROMPT))
        engines.add_request(Request(number, prompt, RESPONSE, seed=number))
    started, tokens = time.perf_counter(), 0
    while engines.busy:
        tokens += sum(len(generation.tokens) for generation in engines.step())
    return tokens / (time.perf_counter() - started)


def measure(policy: Path, ranks: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "--policy", str(policy)], env=environment, capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.policy:
        measure_rank(options.policy)
        return
    result: dict[str, Any] = {"machine": machine()}
    for name, (hidden, layers) in SIZES.items():
        with tempfile.TemporaryDirectory() as directory:
            create_policy(Path(directory), hidden, layers)
            one, two = (measure(Path(directory), ranks) for ranks in (1, 2))
        speeds = one["tokens_per_second"], two["tokens_per_second"]
        ratios = {count: round(speeds[1][count] / speeds[0][count], 2) for count in speeds[0]}
        result[name] = {"one rank": speeds[0], "two ranks": speeds[1], "ratio": ratios, "call_ms": two["call_ms"]}
        print(name, json.dumps(result[name]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
