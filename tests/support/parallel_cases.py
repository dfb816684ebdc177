"""Steps of learners whose weights are sharded over several ranks; as a program, one of the ranks.

python parallel_cases.py RANK NUM_RANKS RENDEZVOUS_FILE POLICY OUT CASE…; prints the results as JSON by case.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from loss_grid import near_batch, objective, ragged_batch
from rank_processes import join_ranks, leave_group, run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
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
from quintet.training.parallel.strategy import ParallelStrategy
from quintet.training.scorer import PolicyScorer

STEPS = 5
LEARNING = OptimizerConfig(learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5)


@dataclass(frozen=True)
class Case:
    """How weights are sharded."""

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
OTHER_DTYPES: dict[str, Case] = {
    "fsdp2 bfloat16": Case(sharding=NARROW),
    "pipeline bfloat16": Case(sharding=NARROW, parallel={"pipeline": 2}),
    "fsdp bfloat16": Case("fsdp", NARROW),
    "no_shard float64": Case("fsdp", {"policy": "no_shard", "parameter_dtype": "float64"}),
}
"""Cases in lower precision, whose results are only near those of float32."""


STAGES: dict[str, Case] = {
    "pipeline": Case(parallel={"pipeline": 2}),
    "virtual pipeline": Case(parallel={"pipeline": 2, "virtual_pipeline": 2}),
    "four ranks, pipeline": Case(parallel={"pipeline": 4}),
    "four ranks, pipeline × data": Case(parallel={"pipeline": 2}),
    "four ranks, pipeline × tensor": Case(parallel={"pipeline": 2, "tensor": 2}),
    "four ranks, pipeline × ulysses": Case(parallel={"pipeline": 2, "ulysses": 2}),
}
"""Cases of a policy with five layers."""
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
"""Cases of a mixture of experts."""


def shard(module: Any, mesh: LearnerMesh, case: Case) -> ParallelStrategy:
    """Divide layers, experts and tokens over the ranks and shard the weights."""
    config = ActorConfig.model_validate({"backend": case.backend, "parallel": case.parallel, "megatron": case.megatron})
    parallelism = parallelize_module(module, mesh, config)
    sharding, memory = ShardingConfig(**case.sharding), MemoryConfig(**case.memory)
    return build_strategy(module, case.backend, mesh, sharding, memory, parallelism=parallelism)


def actor(directory: Path, mesh: LearnerMesh, case: Case) -> ActorLearner:
    model = load_model(directory)
    strategy, scale = shard(PolicyModule(model), mesh, case), LossScale.from_config(ShardingConfig(**case.sharding))
    offload = Offload(
        strategy.module, parameters="offload_parameters" in case.memory, optimizer="offload_optimizer" in case.memory
    )
    return ActorLearner(
        model,
        LEARNING,
        LearnerSetup(
            budget=MicroBatchBudget(40), ranks=mesh.data, strategy=strategy, loss_scale=scale, offload=offload
        ),
    )


def reference(model: PreTrainedModel, mesh: LearnerMesh, case: Case) -> PolicyScorer:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.05)
    model.requires_grad_(requires_grad=False)
    strategy = shard(PolicyModule(model), mesh, case)
    return PolicyScorer(model, LearnerSetup(budget=MicroBatchBudget(40), ranks=mesh.data, strategy=strategy))


def critic(directory: Path, mesh: LearnerMesh, case: Case) -> CriticLearner:
    model = ValueModel(load_model(directory))
    with torch.no_grad():
        model.head.weight.copy_(0.2 * torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(5)))
    strategy = shard(model, mesh, case)
    return CriticLearner(model, LEARNING, LearnerSetup(budget=MicroBatchBudget(40), ranks=mesh.data, strategy=strategy))


def measure(directory: Path, mesh: LearnerMesh, case: Case, out: Path | None) -> dict[str, Any]:
    """Return log-probs and values before some steps, and the loss and gradient norm of each step; write the weights
    after them to `out`."""
    batch = near_batch(actor(directory, LearnerMesh(), Case()).scorer)
    learner, other = actor(directory, mesh, case), reference(load_model(directory), mesh, case)
    results: dict[str, Any] = {
        "logprobs": learner.scorer.compute_log_probs(batch).tolist(),
        "fsdp_options": fsdp_options(learner.strategy),
    }
    results["divergence"] = learner.scorer.compute_divergence(batch, other).tolist()
    steps = [
        learner.update(batch, objective(name), "token-mean", 1e-3, reference=other, seed=3)
        for name in ("cispo", "ppo", "gspo", "ppo", "reinforce")
    ]
    results["loss"] = [step["actor/pg_loss"] for step in steps]
    results["grad_norm"] = [step["grad_norm"] for step in steps]
    values = critic(directory, mesh, case)
    ragged = ragged_batch()
    results["values"] = values.compute_values(ragged).tolist()
    updates = [values.update(ragged, CriticObjective(CriticConfig()), "token-mean", 1e-3) for _ in range(2)]
    results["critic"] = [value for step in updates for value in (step["critic/vf_loss"], step["grad_norm"])]
    weights = dict(learner.weights()) | {f"critic.{name}": value for name, value in values.weights()}
    if out is not None:
        save_file({name: value.contiguous() for name, value in weights.items()}, out)
    return results


def measure_in_one_process(policy: Path, out: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the results of `measure` without sharding, on one thread as on the ranks, and the weights written to
    `out`."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = measure(policy, LearnerMesh(), Case(), out)
    torch.set_num_threads(num_threads)
    return results, load_file(out)


def fsdp_options(strategy: Any) -> dict[str, Any]:
    """Return the options with which torch's FSDP modules were created."""
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


def run_cases(policy: Path, names: list[str], num_ranks: int, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each case on each rank; rank 0 writes its weights to `directory`.

    A name is one of the cases of this module, or the fields of another case as JSON, whose file is `case.safetensors`.
    """
    outputs = [json.loads(output) for output in run_ranks(__file__, num_ranks, directory, policy, directory, *names)]
    return {name: [output[name] for output in outputs] for name in names}


def main() -> None:
    torch.set_num_threads(1)
    ranks, (policy, out, *names) = join_ranks()
    results = {}
    for name in names:
        is_json = name.startswith("{")
        case = Case(**json.loads(name)) if is_json else {**CASES, **OTHER_DTYPES, **STAGES, **EXPERTS}[name]
        mesh = LearnerMesh.build(ranks, ParallelConfig(**case.parallel), case.sharding.get("group_size"))
        file = Path(out) / f"{'case' if is_json else name}.safetensors"
        results[name] = measure(Path(policy), mesh, case, file if ranks.rank == 0 else None)
    leave_group(ranks)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
