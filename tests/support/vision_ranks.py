"""Steps of learners of vision-language models that are sharded over two ranks; as a program, one of the ranks.

python vision_ranks.py RANK NUM_RANKS RENDEZVOUS_FILE DIRECTORY, with the models of `MODELS`; prints the results as JSON
by model and case.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from parallel_cases import CASES, Case, actor, critic, reference
from rank_processes import join_ranks, leave_group
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
    with_images = [turn(prompt_with(large), (60, 61), (large,))], [turn(prompt_with(small, first=90), (62,), (small,))]
    batch = batch_of(with_images[0], *texts, with_images[1])
    return replace(batch, values=torch.zeros(len(batch.tokens)), returns=batch.loss_mask.float())


def measure(directory: Path, mesh: LearnerMesh, case: Case, out: Path | None) -> dict[str, Any]:
    """Return log-probs and values before some steps, and the loss and gradient norm of each step; write the weights
    after them to `out`."""
    batch, learner, values = batch_with_images(), actor(directory, mesh, case), critic(directory, mesh, case)
    results: dict[str, Any] = {"logprobs": learner.scorer.compute_log_probs(batch).tolist()}
    other = reference(load_model(directory), mesh, case)
    results["divergence"] = learner.scorer.compute_divergence(batch, other).tolist()
    results["values"] = values.compute_values(batch).tolist()
    results["steps"] = steps(learner, batch, 3)
    updates = [values.update(batch, CriticObjective(CriticConfig()), "token-mean", 1e-3) for _ in range(2)]
    results["critic"] = [number for step in updates for number in (step["critic/vf_loss"], step["grad_norm"])]
    weights = dict(learner.weights())
    if out is not None:
        save_file({name: value.contiguous() for name, value in weights.items()}, out)
    return results


def steps(learner: ActorLearner, batch: Batch, count: int) -> list[float]:
    """Return loss and gradient norm of `count` steps."""
    metrics = [learner.update(batch, CrossEntropyObjective(), "token-mean", 1e-3) for _ in range(count)]
    return [number for step in metrics for number in (step["sft/loss"], step["grad_norm"])]


def save_and_continue(directory: Path, mesh: LearnerMesh, ranks: RankGroup, out: Path) -> list[float]:
    """Save a learner after a step to `out`; return loss and gradient norm of two more steps."""
    learner, batch = actor(directory, mesh, CASES[SAVED]), batch_with_images()
    steps(learner, batch, 1)
    snapshot_learner(learner, "actor", EVERYTHING, HostBuffers(), ranks).write(out)
    return steps(learner, batch, 2)


def main() -> None:
    torch.set_num_threads(1)
    ranks, (models,) = join_ranks()
    directory = Path(models)
    results: dict[str, dict[str, Any]] = {}
    for model, (_, names) in MODELS.items():
        for name in names:
            case = CASES[name]
            mesh = LearnerMesh.build(ranks, ParallelConfig(**case.parallel), None)
            out = directory / f"{model} {name}.safetensors" if ranks.rank == 0 else None
            results.setdefault(model, {})[name] = measure(directory / model, mesh, case, out)
            if name == SAVED:
                resumed = save_and_continue(directory / model, mesh, ranks, directory / f"{model} saved")
                results[model][name]["resumed"] = resumed
    leave_group(ranks)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
