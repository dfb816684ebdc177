"""Compare a model with tensor, context or Ulysses parallelism with the unsharded model over five AdamW steps; as a
program, one of the ranks.

python model_parallel_ranks.py RANK NUM_RANKS RENDEZVOUS_FILE CASES; prints the differences as JSON by case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import join_ranks, leave_group, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from quintet.config.native.policy import LoraConfig
from quintet.policies.attention import register_attention
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.lora import add_lora
from quintet.policies.parallel.dtensor_shards import gather_full_tensor
from quintet.policies.parallel.tensor_parallel import (
    apply_tensor_parallel,
    apply_tensor_parallel_to_critic,
)
from quintet.policies.parallel.token_sharding import TokenSharding
from quintet.records import Batch
from quintet.training.packing import MicroBatch, MicroBatchBudget, iter_micro_batches
from quintet.training.parallel.fsdp import clip_dtensor_grad_norm
from quintet.training.parallel.process_group import RankGroup

STEPS = 5
RATE = 1e-3
EPSILON = 1e-6
"""Large enough that AdamW does not amplify the rounding of gradients near 0."""
VOCAB_SIZE = 97


@dataclass(frozen=True)
class Case:
    family: str = "qwen2"
    kv_heads: int = 2
    tied: bool = True
    tensor: int = 1
    ulysses: int = 1
    context: int = 1
    sequence: bool = False
    critic: bool = False
    budget: int | None = 48
    recompute: bool = False
    chunked_logits: bool = False
    lora: bool = False
    data: int = 1
    """With more than one, `fully_shard` shards the weights over all ranks except those of tensor parallelism."""


def build_model(case: Case) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        case.family,
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=case.kv_heads,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=case.tied,
        initializer_range=0.3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        sliding_window=None,
        use_sliding_window=False,
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention())
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(parameter, 0.5, 0.2)
    return model.eval()


def ragged_batch(seed: int) -> Batch:
    """Return prompts with a common prefix, most of them with several responses of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, VOCAB_SIZE, (n,), generator=generator)  # noqa: E731
    common = draw(5)
    prompts = [torch.cat([common, draw(n)]) for n in (3, 7, 1)]
    rows = [(prompts[i], draw(n)) for i, n in ((0, 4), (0, 9), (0, 1), (1, 13), (1, 2), (2, 21), (2, 5))]
    rows += [(draw(6), draw(8))]
    masks = [
        torch.cat([torch.zeros(len(p), dtype=torch.bool), torch.rand(len(a), generator=generator) < 0.8])
        for p, a in rows
    ]
    for mask in masks:
        mask[-1] = True
    lengths = torch.tensor([len(p) + len(a) for p, a in rows])
    size = int(lengths.sum())
    return Batch(
        tokens=torch.cat([torch.cat(row) for row in rows]),
        positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        lengths=lengths,
        loss_mask=torch.cat(masks),
        turn=torch.zeros(size, dtype=torch.long),
        turn_end=torch.zeros(size, dtype=torch.bool),
        trajectory=torch.arange(len(rows)),
        group=torch.arange(len(rows)),
        logprobs=torch.zeros(size),
        rewards=torch.zeros(size),
    )


def loss_of(module: nn.Module, micro: MicroBatch, weights: Tensor) -> Tensor:
    local_weights = weights[micro.index]
    if isinstance(module, ValueModel):
        return ((module(micro.packed) - local_weights) ** 2).sum()
    statistics = module(micro.packed, 0.7)
    ratio = (statistics.logprobs - statistics.logprobs.detach()).exp()
    return (
        -(local_weights * ratio).sum()
        + 0.1 * (local_weights.square() * statistics.logprobs.square()).sum()
        - 0.01 * statistics.entropy.sum()
    )


@dataclass(frozen=True)
class Reduction:
    """How the ranks of a step share micro-batches and reduce gradients."""

    ranks: RankGroup = field(default_factory=RankGroup)
    factor: float = 1.0
    finish: Callable[[Iterable[nn.Parameter]], None] = lambda parameters: None


def steps(module: nn.Module, case: Case, reduction: Reduction) -> dict[str, list[float]]:
    """Return loss and gradient norm of each step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.1)
    metrics: dict[str, list[float]] = {"loss": [], "norm": []}
    for step in range(STEPS):
        batch = ragged_batch(step)
        weights = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(step))
        loss = 0.0
        for assigned in reduction.ranks.assign(iter_micro_batches(batch, MicroBatchBudget(case.budget)), even=True):
            part = loss_of(module, assigned.item, weights) * assigned.is_counted
            (part * reduction.factor).backward()
            loss += float(part.detach())
        reduction.finish(module.parameters())
        loss = reduction.ranks.all_reduce_dict({"loss": loss})["loss"]
        norm = clip_dtensor_grad_norm(module.parameters(), 1.0)
        metrics["loss"].append(loss)
        metrics["norm"].append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return metrics


def build_module(case: Case) -> Any:
    model = build_model(case)
    if case.lora:
        add_lora(model, LoraConfig(rank=4))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, 0.0, 0.2)
    if not case.critic:
        return PolicyModule(model)
    critic = ValueModel(model)
    nn.init.normal_(critic.head.weight, 0.0, 0.3)
    return critic


def parallelize(module: Any, case: Case, mesh: DeviceMesh) -> Reduction:
    if case.tensor > 1:
        divide = apply_tensor_parallel_to_critic if case.critic else apply_tensor_parallel
        divide(module if case.critic else module.policy, mesh["tensor"], sequence=case.sequence)
    module.token_sharding = TokenSharding(
        mesh["context"].get_group(), mesh["ulysses"].get_group(), case.tensor if case.sequence else 1
    )
    if case.data == 1:
        return Reduction(finish=sum_gradients_over(mesh))
    sharding_mesh = mesh["data", "context", "ulysses"]._flatten("sharding")
    shard(module, sharding_mesh)
    data = mesh["data"]
    return Reduction(RankGroup(data.get_local_rank(), data.size(), data.get_group()), float(sharding_mesh.size()))


def sum_gradients_over(mesh: DeviceMesh) -> Callable[[Iterable[nn.Parameter]], None]:
    """Return a function that sums gradients over the ranks that share tokens."""

    def finish(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                continue
            if isinstance(grad, DTensor):
                grad = parameter.grad = grad.redistribute(placements=parameter.placements)
                grad = grad.to_local()
            for name in ("context", "ulysses"):
                dist.all_reduce(grad, group=mesh[name].get_group())

    return finish


def shard(module: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    body = module.body if isinstance(module, ValueModel) else module.policy.model
    for layer in body.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def run(case: Case) -> dict[str, Any]:
    if case.chunked_logits:
        from quintet.policies import token_statistics

        token_statistics.MAX_LOGITS_IN_MEMORY = 7 * VOCAB_SIZE
    mesh = init_device_mesh(
        "cpu",
        (case.data, case.context, case.ulysses, case.tensor),
        mesh_dim_names=("data", "context", "ulysses", "tensor"),
    )
    unsharded, module = build_module(case), build_module(case)
    if case.recompute:
        from quintet.policies.model_loading import enable_activation_checkpointing

        enable_activation_checkpointing(module.policy)
    expected = steps(unsharded, case, Reduction())
    metrics = steps(module, case, parallelize(module, case, mesh))
    differences = {
        key: relative_difference(torch.tensor(metrics[key]), torch.tensor(expected[key])) for key in expected
    }
    expected_weights = dict(unsharded.named_parameters())
    full_weights = {name: gather_full_tensor(parameter.detach()) for name, parameter in module.named_parameters()}
    assert full_weights.keys() == expected_weights.keys()
    differences["weights"] = max(
        relative_difference(full_weights[name], expected_weights[name].detach()) for name in full_weights
    )
    start = dict(build_module(case).named_parameters())
    weight_change = max(
        relative_difference(expected_weights[name].detach(), start[name].detach()) for name in expected_weights
    )
    if case.tied and not case.critic:
        assert module.policy.lm_head.weight is module.policy.model.embed_tokens.weight
    num_local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in module.parameters())
    return differences | {
        "weight_change": weight_change,
        "parameter_share": num_local / sum(p.numel() for p in expected_weights.values()),
        "metrics": metrics,
    }


def run_cases(num_ranks: int, cases: dict[str, Case], directory: Path) -> dict[str, dict[str, Any]]:
    """Return the results of `run` by case, on ranks whose metrics must agree; the rendezvous file is in `directory`."""
    options = json.dumps({name: asdict(case) for name, case in cases.items()})
    results = [json.loads(output) for output in run_ranks(__file__, num_ranks, directory, options)]
    assert results[0].keys() == cases.keys()
    for other in results[1:]:
        assert all(other[name]["metrics"] == results[0][name]["metrics"] for name in cases)
    return {name: results[0][name] for name in cases}


def assert_agrees(results: dict[str, Any]) -> None:
    """Assert that loss, gradient norm and weights are those of the unsharded model."""
    assert max(results["metrics"]["norm"]) > 0.1
    assert results["weight_change"] > 1e-3
    assert results["loss"] < 2e-6
    assert results["norm"] < 2e-6
    assert results["weights"] < 3e-5  # AdamW amplifies the rounding of gradients near 0, which depends on the CPU


def main() -> None:
    torch.set_num_threads(1)
    ranks, (cases,) = join_ranks()
    print(json.dumps({name: run(Case(**options)) for name, options in json.loads(cases).items()}))
    leave_group(ranks)


if __name__ == "__main__":
    main()
