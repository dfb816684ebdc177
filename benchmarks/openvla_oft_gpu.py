"""Benchmark OpenVLA-OFT at full size with random weights on a GPU: rollout and PPO updates with LoRA.

    python benchmarks/openvla_oft_gpu.py --out benchmarks/results/openvla_oft_gpu.json [--micro-batches 4 8 16]

The policy has the shape of the published checkpoints: DINOv2 and SigLIP towers for images of 224 × 224 pixels, Llama
with 7 B parameters, 8 actions of 7 dimensions per chunk, a value head, and adapters of rank 32. Chunks per second of
sampling for `--robots` robots, and of one optimizer step of PPO over `--chunks` chunk steps for each micro-batch size,
with and without recomputed activations; medians of `--rounds` after one that is not counted, and peak memory. A size
that does not fit has no result. On a machine without a GPU, `--tiny` checks that the script works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from machine import machine
from quintet.algorithms.chunks.objective import ChunkObjective
from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSampling, ChunkBatch, RobotObservation
from quintet.policies.tiny_models import MESSAGE_START, train_tokenizer
from quintet.policies.vla.build import prepare_for_training
from quintet.policies.vla.openvla_config import OpenVlaConfig
from quintet.policies.vla.openvla_oft import OpenVlaOftPolicy
from quintet.runtime.device import compute_device
from quintet.runtime.embodied.robot_learner import build_policy_learner
from quintet.training.chunk_learner import ChunkLearner, ChunkRates
from quintet.training.parallel.process_group import RankGroup

INSTRUCTION = "put the carrot on the plate"
TINY = {
    "text_config": {
        "vocab_size": 640 + 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    },
    "vision_towers": [
        {"hidden": 24, "depth": 2, "heads": 2, "mlp": 48, "patch": 14, "image": 28}
    ],
}  # fmt: skip


def experiment(micro_batch: int, *, recomputes: bool) -> Experiment:
    """Return the configuration of PPO with LoRA and a value head."""
    return Experiment.model_validate(
        {
            "env": {"name": "simulator"},
            "policy": {"kind": "openvla_oft", "dtype": "bfloat16", "lora": {"rank": 32, "alpha": 32}},
            "algorithm": {"advantage": {"name": "gae"}},
            "critic": {"shares_policy": True},
            "actor": {"budget": {"sequences": micro_batch}, "gradient_checkpointing": recomputes},
        }
    )


def build(*, tiny: bool) -> OpenVlaOftPolicy:
    """Return the policy with random weights and a value head, created on the device."""
    tokenizer = train_tokenizer(384, [INSTRUCTION])
    tokenizer.bos_token = MESSAGE_START
    torch.manual_seed(0)
    sizes = {"num_action_chunks": 8, "prompt": "{instruction}", "prompt_end": "", "add_value_head": True}
    with torch.device(compute_device()):
        policy = OpenVlaOftPolicy(OpenVlaConfig(**sizes, **(TINY if tiny else {})))
    policy.set_tokenizer(tokenizer)
    return policy


def observe(robots: int) -> RobotObservation:
    images = np.random.default_rng(0).integers(0, 256, (robots, 1, 224, 224, 3), dtype=np.uint8)
    return RobotObservation(images, np.zeros((robots, 0), np.float32), (INSTRUCTION,) * robots)


def timed(function: Callable[[], Any], rounds: int) -> list[float]:
    """Return the seconds of each round but the first."""
    seconds = []
    for _ in range(rounds + 1):
        _wait()
        started = time.perf_counter()
        function()
        _wait()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def sample_batch(learner: ChunkLearner, robots: int) -> tuple[ChunkBatch, Callable[[], Any]]:
    """Return the chunk steps of one sampling with random advantages, and the function that samples."""
    inputs = learner.policy.prepare(observe(robots))
    uniforms = torch.rand(robots, 8, 7, generator=torch.Generator().manual_seed(0))
    sample = learner.sample(inputs, uniforms, ActionSampling())
    assert sample.values is not None
    random = torch.randn(sample.values.shape, generator=torch.Generator().manual_seed(1))
    batch = ChunkBatch(
        inputs=inputs,
        actions=sample.actions,
        logprobs=sample.logprobs,
        rewards=torch.zeros(robots, 8),
        dones=torch.zeros(robots, 8, dtype=torch.bool),
        loss_mask=torch.ones(robots, 8, dtype=torch.bool),
        group=torch.zeros(robots, dtype=torch.long),
        values=sample.values,
        advantages=random,
        returns=sample.values + random,
    )
    return batch, lambda: learner.sample(inputs, uniforms, ActionSampling())


def repeated(batch: ChunkBatch, chunks: int) -> ChunkBatch:
    return replace(batch, last_values=None).select(torch.arange(chunks) % batch.num_chunks)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield each result by its name."""
    policy = prepare_for_training(build(tiny=arguments.tiny), experiment(1, recomputes=False))
    yield {"parameters": sum(parameter.numel() for parameter in policy.parameters())}
    is_sampling_measured = False
    for recomputes in (False, True):
        for micro_batch in arguments.micro_batches:
            config = experiment(micro_batch, recomputes=recomputes)
            learner = build_policy_learner(config, policy, config.actor.optimizer, RankGroup())
            batch, sample = sample_batch(learner, arguments.robots)
            if not is_sampling_measured:
                yield {"sample": report(arguments.robots, partial(timed, sample, arguments.rounds))}
                is_sampling_measured = True
            objective, rates = ChunkObjective(config), ChunkRates(1e-4, 3e-3, 0.0)
            update = partial(learner.update, repeated(batch, arguments.chunks), objective, ActionSampling(), rates)
            name = f"update of {micro_batch} chunk steps per pass" + (", recomputed" if recomputes else "")
            yield {name: report(arguments.chunks, partial(timed, update, arguments.rounds))}
            del learner, update


def report(chunks: int, run: Callable[[], list[float]]) -> dict[str, Any]:
    """Return the rate and the peak memory of a measurement."""
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = run()
    except torch.cuda.OutOfMemoryError:
        return {"out_of_memory": True}
    memory = torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None
    return {"seconds": seconds, "chunks_per_second": chunks / statistics.median(seconds), "memory_gib": memory}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--robots", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    arguments, started = parser.parse_args(), time.perf_counter()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    results: dict[str, Any] = {"device": device, "machine": machine()}
    for result in measure(arguments):
        print(f"{time.perf_counter() - started:.1f} s", result, flush=True)
        results |= result
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
