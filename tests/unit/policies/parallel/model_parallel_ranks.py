"""Several ranks that share the passes of one model, beside the plain model; as a program, one of them, which tells how
far they come apart over five AdamW steps.

python model_parallel_ranks.py CASES RANK SIZE MEETING
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from quintet.config.native.policy import LoraConfig
from quintet.policies.attention import register_attention
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.lora import add_lora
from quintet.policies.parallel.tensor_parallel import (
    apply_tensor_parallel,
    apply_tensor_parallel_to_critic,
)
from quintet.policies.parallel.token_sharding import TokenSharding
from quintet.records import Batch
from quintet.training.packing import MicroBatch, MicroBatchBudget, iter_micro_batches
from quintet.training.parallel.fsdp import clip_dtensor_grad_norm, gather_full_tensor
from quintet.training.parallel.process_group import RankGroup

STEPS = 5
RATE = 1e-3
EPSILON = 1e-6
"""Large enough that rounding of gradients near 0 isn't blown up to whole steps."""
VOCABULARY = 97


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
    pieces: bool = False
    lora: bool = False
    data: int = 1
    """With more than one, weights are sharded by `fully_shard` over all ranks but those that split layers."""


def make_model(case: Case) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        case.family,
        vocab_size=VOCABULARY,
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
    """Prompts that begin alike, most with several answers of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, VOCABULARY, (n,), generator=generator)  # noqa: E731
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
    own = weights[micro.index]
    if isinstance(module, ValueModel):
        return ((module(micro.packed) - own) ** 2).sum()
    found = module(micro.packed, 0.7)
    ratio = (found.logprobs - found.logprobs.detach()).exp()
    return -(own * ratio).sum() + 0.1 * (own.square() * found.logprobs.square()).sum() - 0.01 * found.entropy.sum()


ALONE = RankGroup()


@dataclass(frozen=True)
class Way:
    """How ranks come together in a step."""

    ranks: RankGroup = ALONE
    factor: float = 1.0
    finish: Callable[[Iterable[nn.Parameter]], None] = lambda parameters: None


def steps(module: nn.Module, case: Case, way: Way) -> dict[str, list[float]]:
    """Loss and gradient norm of each step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.1)
    told: dict[str, list[float]] = {"loss": [], "norm": []}
    for step in range(STEPS):
        batch = ragged_batch(step)
        weights = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(step))
        loss = 0.0
        for dealt in way.ranks.assign(iter_micro_batches(batch, MicroBatchBudget(case.budget)), even=True):
            part = loss_of(module, dealt.item, weights) * dealt.is_counted
            (part * way.factor).backward()
            loss += float(part.detach())
        way.finish(module.parameters())
        loss = way.ranks.all_reduce_dict({"loss": loss})["loss"]
        norm = clip_dtensor_grad_norm(module.parameters(), 1.0)
        told["loss"].append(loss)
        told["norm"].append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return told


def make_module(case: Case) -> Any:
    model = make_model(case)
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


def split(module: Any, case: Case, mesh: DeviceMesh) -> Way:
    if case.tensor > 1:
        divide = apply_tensor_parallel_to_critic if case.critic else apply_tensor_parallel
        divide(module if case.critic else module.policy, mesh["tensor"], sequence=case.sequence)
    module.token_sharding = TokenSharding(
        mesh["context"].get_group(), mesh["ulysses"].get_group(), case.tensor if case.sequence else 1
    )
    if case.data == 1:
        return Way(finish=summing(mesh))
    sharing = mesh["data", "context", "ulysses"]._flatten("sharing")
    shard(module, sharing)
    data = mesh["data"]
    return Way(RankGroup(data.get_local_rank(), data.size(), data.get_group()), float(sharing.size()))


def summing(mesh: DeviceMesh) -> Callable[[Iterable[nn.Parameter]], None]:
    """Gradients are summed over the ranks that share tokens."""

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


def gap(ours: Tensor, theirs: Tensor) -> float:
    """Relative to the largest."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))


def run(case: Case) -> dict[str, Any]:
    if case.pieces:
        from quintet.policies import token_statistics

        token_statistics.MAX_LOGITS_IN_MEMORY = 7 * VOCABULARY
    mesh = init_device_mesh(
        "cpu",
        (case.data, case.context, case.ulysses, case.tensor),
        mesh_dim_names=("data", "context", "ulysses", "tensor"),
    )
    plain, module = make_module(case), make_module(case)
    if case.recompute:
        from quintet.policies.model_loading import enable_activation_checkpointing

        enable_activation_checkpointing(module.policy)
    wanted = steps(plain, case, Way())
    told = steps(module, case, split(module, case, mesh))
    pairs = {key: gap(torch.tensor(told[key]), torch.tensor(wanted[key])) for key in wanted}
    theirs = dict(plain.named_parameters())
    whole = {name: gather_full_tensor(parameter.detach()) for name, parameter in module.named_parameters()}
    assert whole.keys() == theirs.keys()
    pairs["weights"] = max(gap(whole[name], theirs[name].detach()) for name in whole)
    start = dict(make_module(case).named_parameters())
    moved = max(gap(theirs[name].detach(), start[name].detach()) for name in theirs)
    if case.tied and not case.critic:
        assert module.policy.lm_head.weight is module.policy.model.embed_tokens.weight
    kept = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in module.parameters())
    return pairs | {
        "moved": moved,
        "kept": kept / sum(p.numel() for p in theirs.values()),
        "told": told,
        "wanted": wanted,
    }


def gaps(size: int, cases: dict[str, Case], meeting: Path) -> dict[str, dict[str, Any]]:
    """What `run` tells of each case in so many processes, by case; they have to tell the same."""
    words = json.dumps({name: asdict(case) for name, case in cases.items()})
    command = [sys.executable, __file__, words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(meeting)], stdout=-1, text=True, env=environment)
        for rank in range(size)
    ]
    try:
        answers = [json.loads(rank.communicate(timeout=300)[0] or "{}") for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert answers[0].keys() == cases.keys()
    for other in answers[1:]:
        assert all(other[name]["told"] == answers[0][name]["told"] for name in cases)
    return {name: answers[0][name] for name in cases}


def same(told: dict[str, Any]) -> None:
    """Loss, gradient norm and weights are the plain model's."""
    assert max(told["told"]["norm"]) > 0.1
    assert told["moved"] > 1e-3
    assert told["loss"] < 2e-6
    assert told["norm"] < 2e-6
    assert told["weights"] < 3e-5  # AdamW amplifies the rounding of gradients near 0, which depends on the CPU


def main(cases: dict[str, dict[str, Any]], rank: int, size: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, size, meeting, timeout_seconds=60.0)
    print(json.dumps({name: run(Case(**case)) for name, case in cases.items()}))
    ranks.destroy()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
