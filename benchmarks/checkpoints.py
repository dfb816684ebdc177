"""Measure how long training is blocked by a checkpoint that is written in the background.

    python benchmarks/checkpoints.py [--layers 12] [--saves 4] [--out FILE]

A preset policy, large enough that a write takes seconds, is saved several times while training steps continue. A
checkpoint contains weights and both moments, with hashes. Steps are timed alone and during a write. Training is
blocked only by the snapshot; that steps are slower during a write is reported separately, because they share the
cores with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from machine import machine
from quintet.config.native.learners import OptimizerConfig
from quintet.policies.attention import register_attention
from quintet.training.checkpoint.async_save import AsyncCheckpointer, WriteFiles
from quintet.training.checkpoint.hf_directory import HfDirectory
from quintet.training.checkpoint.learner_state import snapshot_learner
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.learner import ActorLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.packing import MicroBatchBudget


def policy(layers: int) -> ActorLearner:
    """Create a model with about 8 million parameters per layer."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=layers,
        num_attention_heads=12,
        tie_word_embeddings=True,
        attn_implementation=register_attention(),
    )
    return ActorLearner(LlamaForCausalLM(config), OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget()))


def train(actor: ActorLearner) -> float:
    """Return the seconds of one step that updates every weight and moment."""
    started = time.perf_counter()
    for parameter in actor.strategy.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    actor.optimizer.step()
    actor.optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def measure(layers: int, saves: int, place: Path) -> dict[str, Any]:
    actor, memory = policy(layers), HostBuffers()
    alone = statistics.median(train(actor) for _ in range(6))
    hf, written = HfDirectory.from_model(actor.model), [0.0]

    def copy(directory: Path) -> WriteFiles:
        held = snapshot_learner(actor, "actor", ("model", "optimizer"), memory)

        def write(staging: Path) -> None:
            written[0] = time.perf_counter()
            held.write(staging, hf.write(staging, "hf", held.whole))

        return write

    def publish(final: Path) -> None:
        written[0] = time.perf_counter() - written[0]

    saver = AsyncCheckpointer(place, keep=1, publish=publish)
    found: list[dict[str, float]] = []
    for step in range(saves):
        saver.wait()
        written[0] = 0.0
        started = time.perf_counter()
        saver.save(step, {}, copy)
        still, beside = time.perf_counter() - started, []
        while not (place / f"global_step_{step}").is_dir():
            beside.append(train(actor))
        saver.wait()
        found.append({"still": still, "write": written[0], "step_meanwhile": statistics.median(beside)})
    size = sum(path.stat().st_size for path in place.rglob("*.safetensors"))
    saver.close()
    first, later = found[0], found[1:]
    write = statistics.median(one["write"] for one in later)
    still = statistics.median(one["still"] for one in later)
    return {
        "parameters": sum(parameter.numel() for parameter in actor.strategy.parameters()),
        "checkpoint_mib": round(size / 2**20, 1),
        "write_seconds": round(write, 3),
        "still_seconds": round(still, 3),
        "still_share_of_the_write": round(still / write, 4),
        "first_still_seconds": round(first["still"], 3),
        "first_still_share_of_the_write": round(first["still"] / first["write"], 4),
        "step_alone_seconds": round(alone, 3),
        "step_meanwhile_seconds": round(statistics.median(one["step_meanwhile"] for one in later), 3),
        "saves": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.out.parent if arguments.out else None) as place:
        found = measure(arguments.layers, arguments.saves, Path(place) / "checkpoints")
    text = json.dumps({"machine": machine(), **found}, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
