"""Steps of a policy with LoRA adapters; as a program, one of the ranks over which it is sharded.

python lora_ranks.py RANK NUM_RANKS RENDEZVOUS_FILE POLICY OUT BACKEND…; prints the results as JSON by backend.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from loss_grid import ragged_batch
from rank_processes import join_ranks, leave_group
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
from quintet.training.reference_snapshot import ReferenceSnapshot

OBJECTIVE = PolicyObjective(AlgorithmConfig(kl=KlConfig(apply_to="loss", estimator="full", coefficient=0.1)))


def measure(directory: Path, mesh: LearnerMesh, backend: str, out: Path | None) -> dict[str, Any]:
    """Return the metrics of three steps and the log-probs after them; write the merged weights, and the adapters of the
    reference snapshot, to `out`."""
    model = load_model(directory)
    add_lora(model, LoraConfig(rank=2, alpha=3.0), seed=1)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    backend, _, policy = backend.partition(" ")
    sharding = ShardingConfig(policy=policy or "full_shard")
    strategy = build_strategy(PolicyModule(model), backend, mesh, sharding, MemoryConfig())
    actor = ActorLearner(
        model, OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(40), ranks=mesh.data, strategy=strategy)
    )
    reference, batch = ReferenceSnapshot(actor.scorer, MicroBatchBudget(40)), ragged_batch()
    steps = [actor.update(batch, OBJECTIVE, "token-mean", 1e-2, reference=reference) for _ in range(3)]
    results = {"losses": [step["actor/pg_loss"] for step in steps], "norms": [step["grad_norm"] for step in steps]}
    results |= {"kl": [step["actor/kl_loss"] for step in steps]}
    results |= {
        "logprobs": actor.scorer.compute_log_probs(batch).tolist(),
        "reference": reference.compute_log_probs(batch).tolist(),
    }
    stored = reference.state_dict()
    reference.load_state_dict(stored)
    results["restored"] = reference.compute_log_probs(batch).tolist()
    weights = dict(actor.weights()) | {f"reference.{name}": tensor for name, tensor in stored.items()}
    if out is not None:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, out)
    return results


def main() -> None:
    torch.set_num_threads(1)
    ranks, (policy, out, *backends) = join_ranks()
    mesh = LearnerMesh.build(ranks, ParallelConfig(), None)
    results = {
        backend: measure(Path(policy), mesh, backend, None if ranks.rank else Path(out) / f"{backend}.safetensors")
        for backend in backends
    }
    leave_group(ranks)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
