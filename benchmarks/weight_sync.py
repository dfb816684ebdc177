"""Measure weight syncs from the controller to an engine in another process, next to the memory copies that they need.

    python benchmarks/weight_sync.py [--engines hf vllm] [--out benchmarks/results/weight_sync.json]

A standalone worker is started as in a run, with random float32 weights. A sync copies the learner's weights to where
the worker reads them and ends when the engine has loaded them. Copies are timed in the same run between allocated
tensors of the same sizes: one into shared memory and one into the engine. vLLM's copy on a CPU is followed by the
packing of every matrix for its kernels, which is timed with vLLM's own function. With LoRA the learner only trains
adapters of rank 16: these are sent, and the worker merges them. Writes one JSON file: medians in milliseconds, and the
megabytes that a sync sends to an engine of another machine.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engines_on_ranks import create_policy
from machine import machine

ROUNDS = 15
TRANSFERS = ("shared_memory", "process_group", "tcp")
SIZES = {"3 M": (192, 6), "100 M": (768, 11)}
"""Hidden size and layers of the policies."""
LORA_SIZE = "100 M"
"""Size that is also measured with LoRA."""
WORKER = """
import sys
from quintet.runtime.calls.listener import ControllerAddress
from quintet.runtime.worker import Worker
from quintet.runtime.worker_process import WorkerProcess
if __name__ == "__main__":
    host, port, token = sys.argv[1:]
    WorkerProcess(ControllerAddress(host, int(port), token), 1, "benchmark").run(Worker())
"""


@contextmanager
def standalone_worker() -> Iterator[Any]:
    """Start a standalone worker and yield the controller's connection to it."""
    from quintet.runtime.calls.listener import ControllerAddress, WorkerListener

    listener = WorkerListener("127.0.0.1", {1: ""}, "benchmark", lost_seconds=60.0)
    address = ControllerAddress.of(listener)
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "worker.py"
        script.write_text(WORKER)
        process = subprocess.Popen([sys.executable, script, address.host, str(address.port), address.token])
        try:
            (worker,) = listener.wait_for([1], 120.0)
            yield worker
            worker.stop()
            process.wait(30)
        finally:
            process.kill()
            process.wait()
            listener.close()


def measure(policy: Path, engine_name: str, options: list[str], *, lora: bool = False) -> dict[str, Any]:
    import torch

    from quintet.config.compose import load_experiment

    words = ["policy.preset=null", f"policy.path={policy}", "warm_start=null", "training.threads=1"]
    words += ["rollout.max_concurrent=8", "rollout.max_response_tokens=64"]
    words += ["placement.devices_per_node=2", "placement.actor.devices=[0]", "placement.rollout.devices=[1]"]
    words += [f"rollout.engine={engine_name}", *options]
    configs = {
        name: load_experiment(None, [*words, f"placement.weight_transfer={name}"]).experiment for name in TRANSFERS
    }
    torch.set_num_threads(1)
    actor = build_actor(policy, lora=lora)
    tensors = [tensor for _, tensor in actor.base_weights()]
    with standalone_worker() as worker:
        adapted = actor if lora else None
        staged = {name: policy_weights(config, actor.weights, adapted) for name, config in configs.items()}
        engine = build_engine(worker, configs["shared_memory"], policy, staged["shared_memory"])
        for each in staged.values():
            each.connect([worker])
        copied = [torch.empty_like(tensor) for tensor in tensors]

        def sync(transfer: str) -> None:
            staged[transfer].stage()
            engine.load_weights(1, staged[transfer])
            engine.finish_calls()

        def copy_and_pack() -> None:
            for _ in range(2):
                for tensor, other in zip(tensors, copied, strict=True):
                    other.copy_(tensor)
            if engine_name == "vllm":
                pack(copied)

        timed = {"copies": copy_and_pack, **{name: partial(sync, name) for name in TRANSFERS}}
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for number in range(ROUNDS + 2):
            for name, function in timed.items():
                seconds[name] += [_seconds(function)] * (number >= 2)
        sent = staged["tcp"].load_call(worker, 1).arguments["weights"].values()
        for each in staged.values():
            each.close()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = {name: round(medians[name] / medians["copies"], 2) for name in medians if name != "copies"}
    return {
        "ms": {name: round(1000 * median, 1) for name, median in medians.items()},
        "ratio": ratios,
        "sent_mb": round(sum(tensor.nbytes for tensor in sent) / 1e6, 1),
    }


def policy_weights(config: Any, weights: Callable[[], Iterator[Any]], adapted: Any = None) -> Any:
    """Return the source of a learner's weights for standalone engines."""
    from quintet.runtime.calls.transport import Transport
    from quintet.runtime.engines.engine_weights import EngineWeights
    from quintet.runtime.engines.weight_sources import PolicyWeights
    from quintet.runtime.worker import Worker

    learners: Any = SimpleNamespace(actor=SimpleNamespace(weights=weights), has_full_weights=False)
    return PolicyWeights(learners, Transport(local=Worker()), EngineWeights(config, weights, adapted))


def build_engine(worker: Any, config: Any, policy: Path, weights: Any) -> Any:
    """Return the engine of a standalone worker."""
    from quintet.runtime.calls.transport import Transport
    from quintet.runtime.engines.remote_engines import RemoteEngines
    from quintet.runtime.worker import Worker

    (engine,) = RemoteEngines(Transport(local=Worker()), [worker], config, policy, weights).engines()
    return engine


def build_actor(policy: Path, *, lora: bool) -> Any:
    """Return a learner of the policy, which only trains adapters with `lora`."""
    from quintet.config.native.learners import OptimizerConfig
    from quintet.config.native.policy import LoraConfig
    from quintet.policies.lora import add_lora
    from quintet.policies.model_loading import load_model
    from quintet.training.learner import ActorLearner
    from quintet.training.learner_setup import LearnerSetup
    from quintet.training.packing import MicroBatchBudget

    model = load_model(policy)
    if lora:
        add_lora(model, LoraConfig(rank=16))
    return ActorLearner(model, OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(64)))


def pack(tensors: list[Any]) -> None:
    """Pack every matrix as vLLM does on a CPU."""
    from vllm._custom_ops import create_onednn_mm

    for tensor in tensors:
        if tensor.ndim > 1:
            create_onednn_mm(tensor.t(), 32)


def _seconds(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="*", default=["hf", "vllm"])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    result: dict[str, Any] = {"machine": machine()}
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as directory:
            create_policy(Path(directory), *SIZES[size])
            for name in options.engines:
                separate = [True] if name == "vllm" else []
                for is_separate in [False, *separate]:
                    words = [f"rollout.engine_options.separate_process={str(is_separate).lower()}"]
                    for lora in [False, True] if size == LORA_SIZE else [False]:
                        row = f"{size}, {name}" + ", separate process" * is_separate + ", LoRA" * lora
                        result[row] = measure(Path(directory), name, words if name == "vllm" else [], lora=lora)
                        print(row, json.dumps(result[row]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
