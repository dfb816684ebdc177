"""Five steps of AdamW on ragged micro-batches with pipeline or expert parallelism; as a program, one of the ranks.

python model_parallel_steps.py RANK NUM_RANKS RENDEZVOUS_FILE POLICY CASE…, of `CASES`; prints the results as JSON by
case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from loss_grid import ragged_batch
from rank_processes import join_ranks, leave_group, run_ranks
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
Results = dict[str, Any]


class LogProbModule(nn.Module):
    """Computes log-probs in its forward pass, which FSDP wraps."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, packed: PackedBatch) -> Tensor:
        return compute_token_statistics(self.policy, packed).logprobs


def loss_of(logprobs: Tensor, micro: MicroBatch) -> Tensor:
    """Return the part of the mini-batch's loss that is of a micro-batch."""
    batch = ragged_batch()
    assert batch.advantages is not None
    return -(logprobs * batch.advantages[micro.index]).sum() / batch.loss_mask.sum()


def one_sequence(length: int) -> PackedLayout:
    return PackedLayout(torch.tensor([length]))


def micro_batches() -> list[MicroBatch]:
    return list(iter_micro_batches(ragged_batch(), BUDGET))


def optimizer(groups: Iterable[list[nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": group} for group in groups], lr=3e-3, fused=True)


def results(losses: list[float], norms: list[float], weights: dict[str, Tensor]) -> Results:
    """Return losses and gradient norms, and for each weight its sum and its sum of squares."""
    doubles = {name: weight.detach().double() for name, weight in weights.items()}
    sums = {name: [float(weight.sum()), float(weight.square().sum())] for name, weight in doubles.items()}
    return {"losses": losses, "norms": norms, "weights": sums}


def train_in_one_process(directory: Path) -> Results:
    """Return the results of a single process."""
    module = LogProbModule(load_model(directory))
    adamw, losses, norms = optimizer([list(module.parameters())]), [], []
    for _ in range(STEPS):
        total = 0.0
        for micro in micro_batches():
            loss = loss_of(module(micro.packed), micro)
            torch.autograd.backward(loss)
            total += loss.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
        adamw.step()
        adamw.zero_grad()
    with torch.no_grad():
        after = sum(float(module(micro.packed).double().sum()) for micro in micro_batches())
    return results(losses, norms, dict(module.policy.named_parameters())) | {"logprobs": after}


def experts(
    directory: Path, ranks: RankGroup, dispatcher: TokenDispatcher, shared_by: int, recompute: bool = False
) -> Results:
    """Divide the experts over `shared_by` data ranks, and shard everything else over all of them."""
    from torch.distributed.fsdp import fully_shard

    policy = load_model(directory)
    if recompute:
        enable_activation_checkpointing(policy)
    data = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("data",))
    meshes = init_device_mesh("cpu", (ranks.size // shared_by, shared_by), mesh_dim_names=("rest", "expert"))
    parallelism = apply_expert_parallel(policy, meshes["expert"], dispatcher)
    parallelism.shard(meshes["rest"], ranks.size)
    module = LogProbModule(policy)
    for layer in policy.model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(module, mesh=data)
    dense = [parameter for parameter in module.parameters() if not parallelism.is_expert(parameter)]
    adamw, losses, norms = optimizer([dense, parallelism.parameters]), [], []
    for _ in range(STEPS):
        losses.append(_data_step(module, ranks))
        norms.append(
            float(
                clip_grad_norm([GradNormGroup(dense), GradNormGroup(parallelism.parameters, [parallelism.group])], 0.05)
            )
        )
        adamw.step()
        adamw.zero_grad()
    return results(
        losses, norms, {name: _full_weight(parallelism, weight) for name, weight in policy.named_parameters()}
    )


def _data_step(module: nn.Module, ranks: RankGroup) -> float:
    """Compute the gradients of the mini-batch, and return its loss. The loss of a rank without a micro-batch is
    multiplied by 0."""
    batches, total = micro_batches(), 0.0
    local = batches[ranks.rank :: ranks.size]
    for micro, _ in zip_longest(local, range(-(-len(batches) // ranks.size))):
        micro_or_first = micro or batches[0]
        loss = loss_of(module(micro_or_first.packed), micro_or_first) * float(micro is not None)
        torch.autograd.backward(loss * ranks.size)
        total += loss.item()
    return ranks.all_reduce_dict({"loss": total})["loss"]


def _full_weight(parallelism: ExpertParallel, weight: nn.Parameter) -> Tensor:
    return parallelism.gather(weight) if parallelism.is_expert(weight) else weight.full_tensor()  # type: ignore[attr-defined]


def idle(directory: Path, ranks: RankGroup, dispatcher: TokenDispatcher) -> Results:
    """Compare the gradients of one layer's experts with those of the full layer, if all tokens come from rank 0 and go
    to its own experts."""
    data = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("expert",))
    policy = load_model(directory)
    parallelism = apply_expert_parallel(policy, data["expert"], dispatcher)
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(5, 32, generator=generator)[: 0 if ranks.rank else 5].requires_grad_()
    index, weights = torch.tensor([[0, 1]] * 5)[: len(states)], torch.rand(5, 2, generator=generator)[: len(states)]
    out = policy.model.layers[0].mlp.experts(states, index, weights)
    torch.autograd.backward(out.sin().sum())
    expected = _full_layer_gradients(directory, states, index, weights) if len(states) else []
    gradients = [parallelism.gather(weight.grad) for weight in parallelism.parameters[:2]]  # type: ignore[arg-type]
    actual = [grad for grad in (states.grad, *gradients) if grad is not None]
    gaps = [float((grad - other).abs().max()) for grad, other in zip(actual, expected, strict=False)]
    return {"gaps": gaps, "sizes": [float(grad.abs().max()) for grad in expected]}


def _full_layer_gradients(directory: Path, states: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the gradients of the states and of all experts' weights, without parallelism."""
    inputs, layer = states.detach().clone().requires_grad_(), load_model(directory).model.layers[0].mlp.experts
    torch.autograd.backward(layer(inputs, index, weights).sin().sum())
    return [tensor.grad for tensor in (inputs, *layer.parameters()) if tensor.grad is not None]


def stages(directory: Path, ranks: RankGroup, virtual: int = 1) -> Results:
    """Divide the layers over the stages of a pipeline."""
    mesh = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("pipeline",))
    module, batches = PolicyModule(load_model(directory)), micro_batches()
    pipeline, packed = Pipeline(module, mesh["pipeline"], virtual), [micro.packed for micro in batches]
    adamw, losses, norms = optimizer([list(module.parameters())]), [], []
    for _ in range(STEPS):
        total = [0.0]

        def loss_of_pass(number: int, total: list[float] = total) -> Tensor:
            loss = loss_of(module(packed[number]).logprobs, batches[number])
            total.append(loss.item())
            return loss

        pipeline.forward_backward(packed, loss_of_pass)
        losses.append(pipeline.ranks.all_gather(sum(total))[-1])
        norms.append(float(pipeline.clip_grad_norm(0.05)))
        adamw.step()
        adamw.zero_grad()
    logprobs = pipeline.forward_only(packed, lambda number: module(packed[number]).logprobs)
    parameters = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if not (pipeline.has_tied_head_copy and "lm_head" in name)
    ]
    weights = {name.removeprefix("policy."): weight for name, weight in pipeline.stream_weights(parameters)}
    return results(losses, norms, weights) | {"logprobs": sum(float(values.double().sum()) for values in logprobs)}


def critic(directory: Path, ranks: RankGroup) -> Results:
    """Compare values and gradients of a critic in two stages with those of the full one."""
    mesh = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("pipeline",))
    full, module = value_model(directory), value_model(directory)
    pipeline = Pipeline(module, mesh["pipeline"])
    packed = [micro.packed for micro in micro_batches()]
    values = torch.cat(pipeline.forward_only(packed, lambda number: module(packed[number])))
    pipeline.forward_backward(packed, lambda number: module(packed[number]).square().sum())
    expected = torch.cat([full(batch) for batch in packed])
    torch.autograd.backward(expected.square().sum())
    staged, unstaged = dict(module.named_parameters()), dict(full.named_parameters())
    gaps = [float((staged[n].grad - unstaged[n].grad).abs().max() / unstaged[n].grad.abs().max()) for n in staged]  # type: ignore[operator, union-attr]
    return {"values": float((values - expected).abs().max()), "largest": float(expected.max()), "gradients": max(gaps)}


def value_model(directory: Path) -> ValueModel:
    """Return a critic whose head is not 0."""
    model = ValueModel(load_model(directory))
    with torch.no_grad():
        model.head.weight.copy_(torch.linspace(-1, 1, model.head.weight.numel())[None])
    return model


CASES: dict[str, Callable[[Path, RankGroup], Results]] = {
    "pipeline": lambda path, ranks: stages(path, ranks),
    "virtual pipeline": lambda path, ranks: stages(path, ranks, virtual=2),
    "critic": critic,
    "alltoall idle": lambda path, ranks: idle(path, ranks, "alltoall"),
    "allgather idle": lambda path, ranks: idle(path, ranks, "allgather"),
    "alltoall": lambda path, ranks: experts(path, ranks, "alltoall", 2),
    "alltoall recomputed": lambda path, ranks: experts(path, ranks, "alltoall", 2, recompute=True),
    "allgather": lambda path, ranks: experts(path, ranks, "allgather", 2),
}


def train_on_ranks(cases: Iterable[str], policy: Path, num_ranks: int, directory: Path) -> list[dict[str, Results]]:
    """Return the results of each rank by case; the rendezvous file is in `directory`."""
    return [json.loads(output) for output in run_ranks(__file__, num_ranks, directory, policy, *cases)]


def main() -> None:
    torch.set_num_threads(1)
    ranks, (policy, *cases) = join_ranks()
    print(json.dumps({case: CASES[case](Path(policy), ranks) for case in cases}))
    leave_group(ranks)


if __name__ == "__main__":
    main()
