"""Learners whose weights are spread over several processes, step by step; run once for each rank."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from loss_grid import near_batch, objective, ragged_batch
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedModel

from quintet.algorithms.objective import CriticObjective
from quintet.config.native.learners import (
    ActorConfig,
    CriticConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    ShardingConfig,
)
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.model_loading import load_model
from quintet.training.learner import ActorLearner, CriticLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.offload import Offload
from quintet.training.optim.loss_scale import LossScale
from quintet.training.packing import MicroBatchBudget
from quintet.training.parallel.device_mesh import LearnerMesh
from quintet.training.parallel.fsdp import Fsdp2Strategy, build_strategy
from quintet.training.parallel.parallelize import parallelize_module
from quintet.training.parallel.process_group import RankGroup
from quintet.training.parallel.strategy import ParallelStrategy
from quintet.training.scorer import PolicyScorer

STEPS = 5
LEARNING = OptimizerConfig(learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5)


@dataclass(frozen=True)
class Case:
    """How weights are spread."""

    backend: str = "fsdp2"
    sharding: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] | None = None


MOVED = {"offload_parameters": True, "offload_optimizer": True}
CASES: dict[str, Case] = {
    "fsdp2": Case(),
    "fsdp2 gathered": Case(sharding={"reshard_after_forward": False, "sync_every_micro_batch": True}),
    "fsdp2 prefetch": Case(
        sharding={"forward_prefetch": True, "backward_prefetch": "pre", "reshard_after_forward": True}
    ),
    "fsdp2 offload": Case(memory={"sharded_offload": True, "pin": True}),
    "fsdp2 moved": Case(memory=MOVED),
    "fsdp moved": Case("fsdp", memory=MOVED),
    "fsdp original, moved": Case("fsdp", {"keep_original_parameters": True}, MOVED),
    "fsdp2 units": Case(sharding={"min_parameters": 3000}),
    "fsdp2 shard_grad_op": Case(sharding={"policy": "shard_grad_op"}),
    "fsdp2 scaled": Case(sharding={"grad_scaler": True, "grad_scaler_start": 1024.0, "grad_scaler_growth_steps": 2}),
    "fsdp": Case("fsdp"),
    "fsdp shard_grad_op": Case("fsdp", {"policy": "shard_grad_op", "limit_all_gathers": True}),
    "fsdp original": Case("fsdp", {"keep_original_parameters": True, "forward_prefetch": True}),
    "fsdp offload": Case("fsdp", {"backward_prefetch": "post"}, {"sharded_offload": True}),
    "fsdp units": Case("fsdp", {"min_parameters": 3000, "backward_prefetch": "pre", "sync_every_micro_batch": True}),
    "no_shard": Case("fsdp", {"policy": "no_shard"}),
    "tensor": Case(parallel={"tensor": 2}),
    "tensor by tokens": Case(parallel={"tensor": 2, "sequence": True}),
    "tensor units": Case(sharding={"min_parameters": 3000}, parallel={"tensor": 2}),
    "ulysses": Case(parallel={"ulysses": 2}),
    "context": Case(parallel={"context": 2}),
    "fsdp ulysses": Case("fsdp", parallel={"ulysses": 2}),
    "fsdp context": Case("fsdp", {"policy": "shard_grad_op"}, parallel={"context": 2}),
    "no_shard ulysses": Case(sharding={"policy": "no_shard"}, parallel={"ulysses": 2}),
    "four ranks, tensor": Case(parallel={"tensor": 2, "sequence": True}),
    "four ranks, ulysses × tensor": Case(parallel={"tensor": 2, "ulysses": 2}),
    "four ranks, context × ulysses": Case(parallel={"context": 2, "ulysses": 2}),
    "four ranks, hybrid × context": Case(sharding={"policy": "hybrid_shard", "group_size": 2}, parallel={"context": 2}),
    "hybrid fsdp2": Case(sharding={"policy": "hybrid_shard", "group_size": 2}),
    "hybrid fsdp": Case("fsdp", {"policy": "hybrid_shard", "group_size": 2}),
    "hybrid fsdp shard_grad_op": Case("fsdp", {"policy": "shard_grad_op", "group_size": 2}),
}


NARROW = {"parameter_dtype": "bfloat16", "reduce_dtype": "float64", "buffer_dtype": "float16"}
LOOSE: dict[str, Case] = {
    "fsdp2 bfloat16": Case(sharding=NARROW),
    "pipeline bfloat16": Case(sharding=NARROW, parallel={"pipeline": 2}),
    "fsdp bfloat16": Case("fsdp", NARROW),
    "no_shard float64": Case("fsdp", {"policy": "no_shard", "parameter_dtype": "float64"}),
}
"""Other types, other numbers: near those of float32."""


STAGES: dict[str, Case] = {
    "pipeline": Case(parallel={"pipeline": 2}),
    "virtual pipeline": Case(parallel={"pipeline": 2, "virtual_pipeline": 2}),
    "four ranks, pipeline": Case(parallel={"pipeline": 4}),
    "four ranks, pipeline × data": Case(parallel={"pipeline": 2}),
    "four ranks, pipeline × tensor": Case(parallel={"pipeline": 2, "tensor": 2}),
    "four ranks, pipeline × ulysses": Case(parallel={"pipeline": 2, "ulysses": 2}),
}
"""Of a policy of five layers."""
EXPERTS: dict[str, Case] = {
    "experts": Case(parallel={"expert": 2}),
    "experts, all to each": Case(
        sharding={"min_parameters": 3000}, parallel={"expert": 2}, megatron={"moe_token_dispatcher_type": "allgather"}
    ),
    "four ranks, experts × data": Case(parallel={"expert": 2}),
    "four ranks, experts × hybrid": Case(sharding={"group_size": 2}, parallel={"expert": 4}),
    "four ranks, experts × pipeline": Case(parallel={"expert": 2, "pipeline": 2}),
    "four ranks, experts × ulysses": Case(parallel={"expert": 4, "ulysses": 2}),
}
"""Of a mixture."""


def laid(module: Any, mesh: LearnerMesh, case: Case) -> ParallelStrategy:
    """With layers, experts and tokens shared out, and weights sharded."""
    config = ActorConfig.model_validate({"backend": case.backend, "parallel": case.parallel, "megatron": case.megatron})
    shared = parallelize_module(module, mesh, config)
    sharding, memory = ShardingConfig(**case.sharding), MemoryConfig(**case.memory)
    return build_strategy(module, case.backend, mesh, sharding, memory, parallelism=shared)


def actor(directory: Path, mesh: LearnerMesh, case: Case) -> ActorLearner:
    model = load_model(directory)
    strategy, scale = laid(PolicyModule(model), mesh, case), LossScale.from_config(ShardingConfig(**case.sharding))
    away = Offload(
        strategy.module, parameters="offload_parameters" in case.memory, optimizer="offload_optimizer" in case.memory
    )
    return ActorLearner(
        model,
        LEARNING,
        LearnerSetup(budget=MicroBatchBudget(40), ranks=mesh.data, strategy=strategy, loss_scale=scale, offload=away),
    )


def reference(model: PreTrainedModel, mesh: LearnerMesh, case: Case) -> PolicyScorer:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.05)
    model.requires_grad_(requires_grad=False)
    strategy = laid(PolicyModule(model), mesh, case)
    return PolicyScorer(model, LearnerSetup(budget=MicroBatchBudget(40), ranks=mesh.data, strategy=strategy))


def critic(directory: Path, mesh: LearnerMesh, case: Case) -> CriticLearner:
    model = ValueModel(load_model(directory))
    with torch.no_grad():
        model.head.weight.copy_(0.2 * torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(5)))
    strategy = laid(model, mesh, case)
    return CriticLearner(model, LEARNING, LearnerSetup(budget=MicroBatchBudget(40), ranks=mesh.data, strategy=strategy))


def tell(directory: Path, mesh: LearnerMesh, case: Case, out: Path | None) -> dict[str, Any]:
    """Loss and gradient norm of each step, log-probs and values before them; the weights after them go to `out`."""
    plain = actor(directory, LearnerMesh(), Case())
    batch = near_batch(plain.scorer)
    learner, other = actor(directory, mesh, case), reference(load_model(directory), mesh, case)
    told: dict[str, Any] = {
        "logprobs": learner.scorer.compute_log_probs(batch).tolist(),
        "held": held(learner.strategy),
    }
    told["divergence"] = learner.scorer.compute_divergence(batch, other).tolist()
    steps = [
        learner.update(batch, objective(name), "token-mean", 1e-3, reference=other, seed=3)
        for name in ("cispo", "ppo", "gspo", "ppo", "reinforce")
    ]
    told["loss"] = [step["actor/pg_loss"] for step in steps]
    told["grad_norm"] = [step["grad_norm"] for step in steps]
    values = critic(directory, mesh, case)
    ragged = ragged_batch()
    told["values"] = values.compute_values(ragged).tolist()
    updates = [values.update(ragged, CriticObjective(CriticConfig()), "token-mean", 1e-3) for _ in range(2)]
    told["critic"] = [value for step in updates for value in (step["critic/vf_loss"], step["grad_norm"])]
    weights = dict(learner.weights()) | {f"critic.{name}": value for name, value in values.weights()}
    if out is not None:
        save_file({name: value.contiguous() for name, value in weights.items()}, out)
    return told


def held(strategy: Any) -> dict[str, Any]:
    """What torch's own modules say of the options that they got."""
    if isinstance(strategy, Fsdp2Strategy):
        states = [part._get_fsdp_state() for part in strategy.module.modules() if isinstance(part, FSDPModule)]
        policy = states[0]._mp_policy
        groups = [state._fsdp_param_group for state in states if state._fsdp_param_group]
        return {
            "units": len(states),
            "parameter_dtype": str(policy.param_dtype),
            "reduce_dtype": str(policy.reduce_dtype),
            "buffer_dtype": str(next(strategy.module.buffers()).dtype),
            "offload": type(groups[0].offload_policy).__name__,
            "forward_prefetch": sum(len(state._states_to_forward_prefetch) for state in states),
            "backward_prefetch": sum(len(state._states_to_backward_prefetch) for state in states),
            "reshard": [group._reshard_after_forward for group in groups],
        }
    parts = [part for part in strategy.module.modules() if isinstance(part, FullyShardedDataParallel)]
    if not parts:
        return {"parameter_dtype": str(next(strategy.module.parameters()).dtype)}
    root = parts[0]
    return {
        "units": len(parts),
        "parameter_dtype": str(root.mixed_precision.param_dtype),
        "reduce_dtype": str(root.mixed_precision.reduce_dtype),
        "buffer_dtype": str(root.mixed_precision.buffer_dtype),
        "strategy": root.sharding_strategy.name,
        "forward_prefetch": root.forward_prefetch,
        "backward_prefetch": root.backward_prefetch and root.backward_prefetch.name,
        "limit_all_gathers": root.limit_all_gathers,
        "original": root._use_orig_params,
    }


def main(directory: Path, rank: int, size: int, meeting: Path, out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, size, meeting, timeout_seconds=60.0)
    told = {}
    for name in names:
        # one that has no name comes as JSON
        case = Case(**json.loads(name)) if name.startswith("{") else {**CASES, **LOOSE, **STAGES, **EXPERTS}[name]
        title, group = "case" if name.startswith("{") else name, case.sharding.get("group_size")
        mesh = LearnerMesh.build(ranks, ParallelConfig(**case.parallel), group)
        told[name] = tell(directory, mesh, case, out / f"{title}.safetensors" if rank == 0 else None)
    ranks.destroy()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]), sys.argv[6:])
