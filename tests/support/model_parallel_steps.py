"""Five steps of AdamW on ragged micro-batches by a policy that lies on several ranks; as a program, one of them.

python model_parallel_steps.py WHAT,WHAT POLICY RANK SIZE MEETING, each WHAT as in `WAYS`; tells what it learnt as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from loss_grid import ragged_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from quintet.policies.attention import PackedLayout
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.model_loading import enable_activation_checkpointing, load_model
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.parallel.expert_parallel import ExpertParallel, TokenDispatcher, apply_expert_parallel
from quintet.policies.token_statistics import compute_token_statistics
from quintet.training.optim.grad_norm import GradNormGroup, clip_grad_norm
from quintet.training.packing import MicroBatch, MicroBatchBudget, iter_micro_batches
from quintet.training.parallel.pipeline import Pipeline
from quintet.training.parallel.process_group import RankGroup

STEPS = 5
BUDGET = MicroBatchBudget(40, 2)
Told = dict[str, Any]


class Measured(nn.Module):
    """Log-probs of targets as one forward pass, which is what sharding wants."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, packed: PackedBatch) -> Tensor:
        return compute_token_statistics(self.policy, packed).logprobs


def loss_of(logprobs: Tensor, micro: MicroBatch) -> Tensor:
    """A share of the whole mini-batch's loss."""
    batch = ragged_batch()
    assert batch.advantages is not None
    return -(logprobs * batch.advantages[micro.index]).sum() / batch.loss_mask.sum()


def one_sequence(length: int) -> PackedLayout:
    return PackedLayout(torch.tensor([length]))


def passes() -> list[MicroBatch]:
    return list(iter_micro_batches(ragged_batch(), BUDGET))


def optimizer(groups: Iterable[list[nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": group} for group in groups], lr=3e-3, fused=True)


def told(losses: list[float], norms: list[float], weights: dict[str, Tensor]) -> Told:
    """Sums of weights and of their squares by name stand for the weights themselves."""
    wide = {name: weight.detach().double() for name, weight in weights.items()}
    sums = {name: [float(weight.sum()), float(weight.square().sum())] for name, weight in wide.items()}
    return {"losses": losses, "norms": norms, "weights": sums}


def alone(directory: Path) -> Told:
    """What a single process learns."""
    module = Measured(load_model(directory))
    steps, losses, norms = optimizer([list(module.parameters())]), [], []
    for _ in range(STEPS):
        total = 0.0
        for micro in passes():
            loss = loss_of(module(micro.packed), micro)
            torch.autograd.backward(loss)
            total += loss.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
        steps.step()
        steps.zero_grad()
    with torch.no_grad():
        after = sum(float(module(micro.packed).double().sum()) for micro in passes())
    return told(losses, norms, dict(module.policy.named_parameters())) | {"logprobs": after}


def experts(
    directory: Path, ranks: RankGroup, dispatcher: TokenDispatcher, shared_by: int, recompute: bool = False
) -> Told:
    """Experts shared out over `shared_by` data ranks, everything else sharded over all of them."""
    from torch.distributed.fsdp import fully_shard

    policy = load_model(directory)
    if recompute:
        enable_activation_checkpointing(policy)
    data = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("data",))
    both = init_device_mesh("cpu", (ranks.size // shared_by, shared_by), mesh_dim_names=("rest", "expert"))
    split = apply_expert_parallel(policy, both["expert"], dispatcher)
    split.shard(both["rest"], ranks.size)
    module = Measured(policy)
    for layer in policy.model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(module, mesh=data)
    dense = [parameter for parameter in module.parameters() if not split.is_expert(parameter)]
    steps, losses, norms = optimizer([dense, split.parameters]), [], []
    for _ in range(STEPS):
        losses.append(_data_step(module, ranks))
        norms.append(
            float(clip_grad_norm([GradNormGroup(dense), GradNormGroup(split.parameters, [split.group])], 0.05))
        )
        steps.step()
        steps.zero_grad()
    return told(losses, norms, {name: _whole(split, weight) for name, weight in policy.named_parameters()})


def _data_step(module: nn.Module, ranks: RankGroup) -> float:
    """Gradients of the mini-batch; a rank without a pass computes one that counts for nothing."""
    every, total = passes(), 0.0
    mine = every[ranks.rank :: ranks.size]
    for micro, _ in zip_longest(mine, range(-(-len(every) // ranks.size))):
        one = micro or every[0]
        loss = loss_of(module(one.packed), one) * float(micro is not None)
        torch.autograd.backward(loss * ranks.size)
        total += loss.item()
    return ranks.all_reduce_dict({"loss": total})["loss"]


def _whole(split: ExpertParallel, weight: nn.Parameter) -> Tensor:
    return split.gather(weight) if split.is_expert(weight) else weight.full_tensor()  # type: ignore[attr-defined]


def idle(directory: Path, ranks: RankGroup, dispatcher: TokenDispatcher) -> Told:
    """Gradients of one layer's experts where all tokens come from rank 0 and go to its own experts, beside those of
    the whole layer."""
    data = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("expert",))
    policy = load_model(directory)
    split = apply_expert_parallel(policy, data["expert"], dispatcher)
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(5, 32, generator=generator)[: 0 if ranks.rank else 5].requires_grad_()
    index, weights = torch.tensor([[0, 1]] * 5)[: len(states)], torch.rand(5, 2, generator=generator)[: len(states)]
    out = policy.model.layers[0].mlp.experts(states, index, weights)
    torch.autograd.backward(out.sin().sum())
    theirs = _whole_layer(directory, states, index, weights) if len(states) else []
    ours = [split.gather(weight.grad) for weight in split.parameters[:2]]  # type: ignore[arg-type]
    found = [one for one in (states.grad, *ours) if one is not None]
    gaps = [float((one - other).abs().max()) for one, other in zip(found, theirs, strict=False)]
    return {"gaps": gaps, "sizes": [float(grad.abs().max()) for grad in theirs]}


def _whole_layer(directory: Path, states: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """Gradients of the states and of all experts' weights, computed in one place."""
    given, layer = states.detach().clone().requires_grad_(), load_model(directory).model.layers[0].mlp.experts
    torch.autograd.backward(layer(given, index, weights).sin().sum())
    return [one.grad for one in (given, *layer.parameters()) if one.grad is not None]


def stages(directory: Path, ranks: RankGroup, virtual: int = 1) -> Told:
    """Layers over the stages of a pipeline."""
    mesh = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("pipeline",))
    module, every = PolicyModule(load_model(directory)), passes()
    pipeline, packed = Pipeline(module, mesh["pipeline"], virtual), [micro.packed for micro in every]
    steps, losses, norms = optimizer([list(module.parameters())]), [], []
    for _ in range(STEPS):
        total = [0.0]

        def loss_of_pass(number: int, total: list[float] = total) -> Tensor:
            loss = loss_of(module(packed[number]).logprobs, every[number])
            total.append(loss.item())
            return loss

        pipeline.forward_backward(packed, loss_of_pass)
        losses.append(pipeline.ranks.all_gather(sum(total))[-1])
        norms.append(float(pipeline.clip_grad_norm(0.05)))
        steps.step()
        steps.zero_grad()
    found = pipeline.forward_only(packed, lambda number: module(packed[number]).logprobs)
    held = [one for one in module.named_parameters() if not (pipeline.has_tied_head_copy and "lm_head" in one[0])]
    weights = {name.removeprefix("policy."): weight for name, weight in pipeline.stream_weights(held)}
    return told(losses, norms, weights) | {"logprobs": sum(float(one.double().sum()) for one in found)}


def critic(directory: Path, ranks: RankGroup) -> Told:
    """Values and gradients of a critic over two stages, beside those of the whole."""
    mesh = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("pipeline",))
    whole, module = value_model(directory), value_model(directory)
    pipeline = Pipeline(module, mesh["pipeline"])
    packed = [micro.packed for micro in passes()]
    found = torch.cat(pipeline.forward_only(packed, lambda number: module(packed[number])))
    pipeline.forward_backward(packed, lambda number: module(packed[number]).square().sum())
    expected = torch.cat([whole(one) for one in packed])
    torch.autograd.backward(expected.square().sum())
    own, theirs = dict(module.named_parameters()), dict(whole.named_parameters())
    gaps = [float((own[n].grad - theirs[n].grad).abs().max() / theirs[n].grad.abs().max()) for n in own]  # type: ignore[operator, union-attr]
    return {"values": float((found - expected).abs().max()), "largest": float(expected.max()), "gradients": max(gaps)}


def value_model(directory: Path) -> ValueModel:
    """With a head that isn't 0."""
    model = ValueModel(load_model(directory))
    with torch.no_grad():
        model.head.weight.copy_(torch.linspace(-1, 1, model.head.weight.numel())[None])
    return model


WAYS: dict[str, Callable[[Path, RankGroup], Told]] = {
    "pipeline": lambda path, ranks: stages(path, ranks),
    "virtual pipeline": lambda path, ranks: stages(path, ranks, virtual=2),
    "critic": critic,
    "alltoall idle": lambda path, ranks: idle(path, ranks, "alltoall"),
    "allgather idle": lambda path, ranks: idle(path, ranks, "allgather"),
    "alltoall": lambda path, ranks: experts(path, ranks, "alltoall", 2),
    "alltoall recomputed": lambda path, ranks: experts(path, ranks, "alltoall", 2, recompute=True),
    "allgather": lambda path, ranks: experts(path, ranks, "allgather", 2),
}


def on_ranks(what: Iterable[str], directory: Path, size: int, meeting: Path) -> list[dict[str, Told]]:
    """What each of several processes says in the end, by what it did."""
    command = [sys.executable, "-W", "ignore", __file__, ",".join(what), str(directory)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(meeting)], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        answers = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(answer) for answer in answers]


def main(what: str, directory: Path, rank: int, size: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, size, meeting, timeout_seconds=120.0)
    said = {one: WAYS[one](directory, ranks) for one in what.split(",")}
    ranks.destroy()
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
