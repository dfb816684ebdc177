"""Learners of a vision-language model whose weights are spread over processes, step by step; run once for each rank."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from parallel_cases import CASES, Case, actor, critic
from safetensors.torch import save_file
from vision_models import batch_of, process, prompt_with, turn

from quintet.algorithms.objective import CriticObjective, CrossEntropyObjective
from quintet.config.native.learners import CriticConfig, ParallelConfig
from quintet.records import Batch
from quintet.training.parallel.device_mesh import LearnerMesh
from quintet.training.parallel.process_group import RankGroup

NAMES = ("fsdp2", "fsdp2 units", "fsdp", "no_shard")


def batch_with_images() -> Batch:
    """Sequences of which two have images, in different micro-batches, and five have none."""
    large, small = process(24, 32), process(8, 16)
    texts = [[turn(range(20 + n, 40 + n), (50 + n, 51, 52))] for n in range(5)]
    pictures = [turn(prompt_with(large), (60, 61), (large,))], [turn(prompt_with(small, first=90), (62,), (small,))]
    batch = batch_of(pictures[0], *texts, pictures[1])
    return replace(batch, values=torch.zeros(len(batch.tokens)), returns=batch.loss_mask.float())


def tell(directory: Path, mesh: LearnerMesh, case: Case, out: Path | None) -> dict[str, Any]:
    """Log-probs and values before any step, loss and gradient norm of each step; the weights after them go to `out`."""
    batch, learner, values = batch_with_images(), actor(directory, mesh, case), critic(directory, mesh, case)
    told: dict[str, Any] = {"logprobs": learner.scorer.compute_log_probs(batch).tolist()}
    told["values"] = values.compute_values(batch).tolist()
    steps = [learner.update(batch, CrossEntropyObjective(), "token-mean", 1e-3) for _ in range(3)]
    told["steps"] = [number for step in steps for number in (step["sft/loss"], step["grad_norm"])]
    updates = [values.update(batch, CriticObjective(CriticConfig()), "token-mean", 1e-3) for _ in range(2)]
    told["critic"] = [number for step in updates for number in (step["critic/vf_loss"], step["grad_norm"])]
    weights = dict(learner.weights())
    if out is not None:
        save_file({name: value.contiguous() for name, value in weights.items()}, out)
    return told


def main(directory: Path, rank: int, place: Path) -> None:
    """Run all cases as one of two ranks."""
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, 2, place / "meeting", timeout_seconds=60.0)
    told = {}
    for name in NAMES:
        case = CASES[name]
        mesh = LearnerMesh.build(ranks, ParallelConfig(**case.parallel), None)
        told[name] = tell(directory, mesh, case, place / f"{name}.safetensors" if rank == 0 else None)
    ranks.destroy()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
