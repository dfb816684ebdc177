"""Learners of a vision-language model whose weights are spread over processes, step by step; run once for each rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from parallel_cases import CASES, Case, actor, critic, reference
from safetensors.torch import save_file
from vision_models import (
    batch_of,
    process,
    prompt_with,
    save_qwen2_5_vl,
    save_qwen2_vl,
    save_qwen3_vl,
    turn,
)

from quintet.algorithms.objective import CriticObjective, CrossEntropyObjective
from quintet.config.native.learners import CriticConfig, ParallelConfig
from quintet.policies.model_loading import load_model
from quintet.records import Batch
from quintet.training.checkpoint.learner_state import snapshot_learner
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.learner import ActorLearner
from quintet.training.parallel.device_mesh import LearnerMesh
from quintet.training.parallel.process_group import RankGroup

EVERYTHING = ["model", "optimizer"]
SAVED = "tensor by tokens"
"""Case whose learner is saved before two more steps."""
MODELS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "qwen2_5_vl": (
        save_qwen2_5_vl,
        ("fsdp2", "fsdp2 units", "fsdp", "no_shard", "tensor", SAVED, "tensor units", "context", "ulysses"),
    ),
    "qwen3_vl": (save_qwen3_vl, (SAVED, "context")),
    "qwen2_vl": (save_qwen2_vl, ("tensor",)),
}
"""How each model is created, and the cases in which it is trained."""


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
    other = reference(load_model(directory), mesh, case)
    told["divergence"] = learner.scorer.compute_divergence(batch, other).tolist()
    told["values"] = values.compute_values(batch).tolist()
    told["steps"] = steps(learner, batch, 3)
    updates = [values.update(batch, CriticObjective(CriticConfig()), "token-mean", 1e-3) for _ in range(2)]
    told["critic"] = [number for step in updates for number in (step["critic/vf_loss"], step["grad_norm"])]
    weights = dict(learner.weights())
    if out is not None:
        save_file({name: value.contiguous() for name, value in weights.items()}, out)
    return told


def steps(learner: ActorLearner, batch: Batch, count: int) -> list[float]:
    """Loss and gradient norm of some steps."""
    taken = [learner.update(batch, CrossEntropyObjective(), "token-mean", 1e-3) for _ in range(count)]
    return [number for step in taken for number in (step["sft/loss"], step["grad_norm"])]


def saved(directory: Path, mesh: LearnerMesh, ranks: RankGroup, place: Path) -> list[float]:
    """Save a learner after a step to `place`; what two more steps say."""
    learner, batch = actor(directory, mesh, CASES[SAVED]), batch_with_images()
    steps(learner, batch, 1)
    snapshot_learner(learner, "actor", EVERYTHING, HostBuffers(), ranks).write(place)
    return steps(learner, batch, 2)


def main(rank: int, place: Path) -> None:
    """Run all cases as one of two ranks."""
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, 2, place / "meeting", timeout_seconds=60.0)
    told: dict[str, dict[str, Any]] = {}
    for model, (_, names) in MODELS.items():
        for name in names:
            case = CASES[name]
            mesh = LearnerMesh.build(ranks, ParallelConfig(**case.parallel), None)
            out = place / f"{model} {name}.safetensors" if rank == 0 else None
            told.setdefault(model, {})[name] = tell(place / model, mesh, case, out)
            if name == SAVED:
                told[model][name]["resumed"] = saved(place / model, mesh, ranks, place / f"{model} saved")
    ranks.destroy()
    print(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
