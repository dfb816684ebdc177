"""A policy of which adapters alone are trained, on one rank of several or alone; run once for each rank.

python lora_ranks.py POLICY RANK SIZE MEETING OUT BACKEND…
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from loss_grid import ragged_batch
from safetensors.torch import save_file

from quintet.algorithms.objective import PolicyObjective
from quintet.config.native.algorithm import AlgorithmConfig, KlConfig
from quintet.config.native.learners import MemoryConfig, OptimizerConfig, ParallelConfig, ShardingConfig
from quintet.config.native.policy import LoraConfig
from quintet.policies.causal_lm import PolicyModule
from quintet.policies.lora import add_lora
from quintet.policies.model_loading import load_model
from quintet.training.learner import ActorLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.packing import MicroBatchBudget
from quintet.training.parallel.device_mesh import LearnerMesh
from quintet.training.parallel.fsdp import build_strategy
from quintet.training.parallel.process_group import RankGroup
from quintet.training.reference_snapshot import ReferenceSnapshot

OBJECTIVE = PolicyObjective(AlgorithmConfig(kl=KlConfig(apply_to="loss", estimator="full", coefficient=0.1)))


def tell(directory: Path, mesh: LearnerMesh, backend: str, out: Path | None) -> dict[str, Any]:
    """What is learnt in three steps; merged weights, and those of the kept policy's adapters, go to `out`."""
    model = load_model(directory)
    add_lora(model, LoraConfig(rank=2, alpha=3.0), seed=1)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    strategy = build_strategy(PolicyModule(model), backend, mesh, ShardingConfig(), MemoryConfig())
    actor = ActorLearner(
        model, OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(40), ranks=mesh.data, strategy=strategy)
    )
    kept, batch = ReferenceSnapshot(actor.scorer, MicroBatchBudget(40)), ragged_batch()
    steps = [actor.update(batch, OBJECTIVE, "token-mean", 1e-2, reference=kept) for _ in range(3)]
    told = {"losses": [step["actor/pg_loss"] for step in steps], "norms": [step["grad_norm"] for step in steps]}
    told |= {"kl": [step["actor/kl_loss"] for step in steps]}
    told |= {"logprobs": actor.scorer.compute_log_probs(batch).tolist(), "kept": kept.compute_log_probs(batch).tolist()}
    stored = kept.state_dict()
    kept.load_state_dict(stored)
    told["again"] = kept.compute_log_probs(batch).tolist()
    weights = dict(actor.weights()) | {f"kept.{name}": tensor for name, tensor in stored.items()}
    if out is not None:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, out)
    return told


def main(directory: Path, rank: int, size: int, meeting: Path, out: Path, backends: list[str]) -> None:
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, size, meeting, timeout_seconds=60.0)
    mesh = LearnerMesh.build(ranks, ParallelConfig(), None)
    told = {one: tell(directory, mesh, one, None if rank else out / f"{one}.safetensors") for one in backends}
    ranks.destroy()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]), sys.argv[6:])
