"""Experts of a mixture shared out over devices, which see different tokens (Lepikhin et al. 2021, arXiv:2006.16668).

Expert parallelism lives inside data parallelism: e neighbours of the data ranks hold 1/e of each layer's experts each,
and everything else as all data ranks do. Tokens travel to their experts and the results back, and so do gradients: the
gradient of an expert is the sum over the tokens of all e ranks at once, and mustn't be summed over them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quintet.errors import ConfigError
from quintet.policies.spread import spread_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

__all__ = ["Dispatcher", "ExpertParallel", "expert_places", "in_whole", "split_experts"]

Dispatcher = Literal["alltoall", "allgather"]


@dataclass(frozen=True, slots=True, eq=False)
class _Peers:
    """The ranks among which experts are shared out. A copied model talks to the same ones."""

    rank: int
    size: int
    group: Any

    def __deepcopy__(self, memo: object) -> _Peers:
        return self

    def exchange(self, rows: Tensor, out: list[int], back: list[int]) -> Tensor:
        """The first `out[0]` rows go to the first peer and so on; what comes, `back[i]` rows from peer i."""
        got = rows.new_empty(sum(back), *rows.shape[1:])
        dist.all_to_all_single(got, rows.contiguous(), back, out, group=self.group)
        return got

    def gather(self, rows: Tensor, counts: list[int]) -> Tensor:
        """All peers' rows, in their order; peer i has `counts[i]`."""
        longest = max(counts)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        got = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(got, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(got, counts, strict=True)])

    def reduce(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The sum over peers of their tables, of which each takes its own `counts[rank]` rows."""
        whole = rows.contiguous().clone()
        dist.all_reduce(whole, group=self.group)
        own: Tensor = torch.split(whole, counts)[self.rank]
        return own


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: _Peers, out: list[int], back: list[int]) -> Tensor:
        ctx.peers, ctx.out, ctx.back = peers, out, back
        return peers.exchange(rows, out, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.peers.exchange(grads[0], ctx.back, ctx.out), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: _Peers, counts: list[int]) -> Tensor:
        ctx.peers, ctx.counts = peers, counts
        return peers.gather(rows, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.peers.reduce(grads[0], ctx.counts), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: _Peers, counts: list[int]) -> Tensor:
        ctx.peers, ctx.counts = peers, counts
        return peers.reduce(rows, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.peers.gather(grads[0].contiguous(), ctx.counts), None, None


def _apply(function: type[torch.autograd.Function], *given: object) -> Tensor:
    got: Tensor = function.apply(*given)  # type: ignore[no-untyped-call]
    return got


class _Split(nn.Module):
    """In front of the class of a layer's experts: tokens go to whoever holds theirs.

    Every peer must come here as often as the others, with tokens or without.
    """

    peers: _Peers
    dispatcher: Dispatcher
    num_experts: int
    """Those held here."""
    places: DeviceMesh | None = None
    """How they lie over all ranks that hold some: peers × ranks with the same ones. For their places in files alone,
    nobody talks through it."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens [T, hidden], the numbers of their experts [T, k] among all and their weights to [T, hidden]."""
        through = self._there_and_back if self.dispatcher == "alltoall" else self._all_to_each
        return through(hidden_states, top_k_index, top_k_weights)

    def _there_and_back(self, states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Each token goes to its experts' holders, k times; weighted where it came from."""
        peers, flat = self.peers, index.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=peers.size * self.num_experts)
        coming = peers.exchange(counts, [self.num_experts] * peers.size, [self.num_experts] * peers.size)
        out, back = (x.view(peers.size, -1).sum(1).tolist() for x in (counts, coming))
        arrived = _apply(_Exchange, states[order // index.shape[1]], peers, out, back)
        experts = torch.arange(self.num_experts, device=flat.device).repeat(peers.size).repeat_interleave(coming)
        done = _apply(_Exchange, self._compute(arrived, experts), peers, back, out)
        weighted = done[order.argsort()].view(*index.shape, states.shape[1]) * weights[..., None]
        return weighted.sum(1).to(states.dtype)

    def _all_to_each(self, states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """All tokens go to all peers; each adds what its own experts have to say."""
        peers = self.peers
        mine = torch.tensor([len(states)], device=states.device)
        counts = peers.gather(mine, [1] * peers.size).tolist()
        states_of_all, weights_of_all = (_apply(_Gather, x, peers, counts) for x in (states, weights))
        local = peers.gather(index, counts).reshape(-1) - peers.rank * self.num_experts
        pairs = ((local >= 0) & (local < self.num_experts)).nonzero().squeeze(-1)
        done = self._compute(states_of_all[pairs // index.shape[1]], local[pairs])
        weighted = (done * weights_of_all.reshape(-1)[pairs][:, None]).to(states.dtype)
        table = weighted.new_zeros(len(local), states.shape[1]).index_copy(0, pairs, weighted)
        return _apply(_Reduce, table.view(-1, *index.shape[1:], states.shape[1]).sum(1), peers, counts)

    def _compute(self, rows: Tensor, experts: Tensor) -> Tensor:
        """What the own expert of each row makes of it, [n, hidden]. Without any row, one of zeros is computed and
        dropped: the experts must have a gradient on every rank."""
        if len(rows):
            return self._own(rows, experts)
        return self._own(rows.new_zeros(1, rows.shape[1]), experts.new_zeros(1))[:0] + rows

    def _own(self, rows: Tensor, experts: Tensor) -> Tensor:
        done: Tensor = super().forward(rows, experts[:, None], rows.new_ones(len(rows), 1))
        return done


class ExpertParallel:
    """The experts of a model whose tokens travel; for a learner that shards, sums and stores what they are."""

    def __init__(self, model: nn.Module, peers: _Peers) -> None:
        self._model = model
        self._peers = peers

    def _layers(self) -> Iterator[_Split]:
        return (module for module in self._model.modules() if isinstance(module, _Split))

    def _places(self, rest: DeviceMesh) -> DeviceMesh:
        """All calls are of all ranks."""
        from torch.distributed.device_mesh import DeviceMesh

        own = torch.tensor(dist.get_process_group_ranks(rest.get_group()))
        every = [torch.empty_like(own) for _ in range(self._peers.size)]
        dist.all_gather(every, own, group=self._peers.group)
        names = ("expert", "same_experts")
        return DeviceMesh(rest.device_type, torch.stack(every), mesh_dim_names=names, _init_backend=False)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The experts' own, slices of the whole. They want a group of the optimizer to themselves, since they lie on
        another mesh than the rest."""
        return [parameter for layer in self._layers() for parameter in layer.parameters()]

    def shard(self, rest: DeviceMesh, data_ranks: int, **options: Any) -> None:
        """`fully_shard` on each layer's experts, before the layers and the model themselves are sharded over all
        data ranks. `rest` is the 1-D mesh of the data ranks that hold the same experts, of size 1 where there are no
        others; `options` are those of `fully_shard`.

        Gradients are summed over `rest` and divided by `data_ranks`, all of them, as those of the other weights are:
        the loss is multiplied by their number alike.
        """
        from torch.distributed.fsdp import fully_shard

        places = self._places(rest)
        for layer in self._layers():
            layer.places = places
            sharded: FSDPModule = fully_shard(layer, mesh=rest, **options)
            sharded.set_gradient_divide_factor(float(data_ranks))
            # gloo can't multiply while it sums; a rank by itself would divide twice (torch 2.13)
            sums = rest.size() > 1 and dist.get_backend(rest.get_group()) == "gloo"
            sharded.set_force_sum_reduction_for_comms(sums)

    @property
    def group(self) -> Any:
        """The ranks among which they are shared out; a norm is over all of them."""
        return self._peers.group

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether it is a slice that `whole` puts together."""
        return any(parameter is one for one in self.parameters)

    def whole(self, part: Tensor) -> Tensor:
        """All experts' tensor [E, …] from the slices [E/e, …] of all peers, who all call this. For weights and for the
        optimizer's moments; a DTensor is gathered over the other data ranks, too."""
        part = _full(part).contiguous()
        parts = [torch.empty_like(part) for _ in range(self._peers.size)]
        dist.all_gather(parts, part, group=self._peers.group)
        return torch.cat(parts)

    def own(self, whole: Tensor) -> Tensor:
        """The slice of all experts' tensor that is held here."""
        return whole.chunk(self._peers.size)[self._peers.rank]


def _full(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def expert_places(module: nn.Module) -> dict[nn.Parameter, DeviceMesh]:
    """Of each parameter that is a slice, the mesh for `in_whole`."""
    layers = (part for part in module.modules() if isinstance(part, _Split))
    return {parameter: layer.places for layer in layers if layer.places for parameter in layer.parameters()}


def in_whole(part: Tensor, places: DeviceMesh) -> Tensor:
    """A sharded slice, or what an optimizer holds of it, as its part of all experts' tensor [E, …]: the same memory."""
    from torch.distributed.tensor import DTensor, Shard

    local = part.to_local() if isinstance(part, DTensor) else part
    shape = torch.Size((part.shape[0] * int(places.size(0)), *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return spread_tensor(local.detach(), places, [Shard(0), Shard(0)], shape, stride)


def split_experts(
    model: nn.Module, mesh: DeviceMesh, dispatcher: Dispatcher = "alltoall", component: str = "actor"
) -> ExpertParallel:
    """Keep of each layer's experts the share of this rank, in place, and have tokens travel.

    `mesh` is the 1-D mesh of the ranks that share them out; each of them holds the whole model before, and has tokens
    of its own after. Names of parameters stay. With `alltoall` a token goes to its own experts alone; with `allgather`
    every token goes to all ranks, which is quicker where it has nearly as many experts as there are ranks. The
    configuration is that of `component`.

    Raises:
        ConfigError: the model has no experts of the fused kind, or not a multiple of the ranks.
    """
    peers = _Peers(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    found = [module for module in model.modules() if _is_mixture(module)]
    key = f"{component}.parallel.expert"
    if not found:
        raise ConfigError(
            f"{key} = {peers.size}: the model has no experts that could be shared out",
            key=key,
            value=peers.size,
            hint=f"set {key}=1, or take a mixture of experts such as Qwen3-MoE",
        )
    for experts in found:
        _refuse_uneven(experts, peers.size, key)
        _split(experts, peers, dispatcher)
    return ExpertParallel(model, peers)


def _is_mixture(module: nn.Module) -> bool:
    """Whether it is transformers' fused experts: every weight [experts, …], called with tokens, numbers and weights."""
    count = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    return hasattr(module, "_apply_gate") and bool(own) and all(len(parameter) == count for parameter in own)


def _refuse_uneven(experts: nn.Module, ranks: int, key: str) -> None:
    count: int = experts.num_experts  # type: ignore[assignment]
    if count % ranks:
        fits = [size for size in range(1, count + 1) if count % size == 0]
        raise ConfigError(
            f"{key} = {ranks} doesn't divide the {count} experts of a layer",
            key=key,
            value=ranks,
            hint=f"take one of {', '.join(map(str, fits))}",
        )


def _split(experts: nn.Module, peers: _Peers, dispatcher: Dispatcher) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        own = parameter.detach().chunk(peers.size)[peers.rank].clone()
        setattr(experts, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
    kind = type(experts)
    # forward comes from _Split, and everything else from the model's own class
    experts.__class__ = type(f"Split{kind.__name__}", (_Split, kind), {})
    split = cast(_Split, experts)
    split.num_experts, split.peers, split.dispatcher = split.num_experts // peers.size, peers, dispatcher
