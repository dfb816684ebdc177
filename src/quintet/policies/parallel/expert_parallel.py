"""Expert parallelism: the experts of each layer distributed over ranks (Lepikhin et al. 2021, arXiv:2006.16668).

The e ranks of an expert-parallel group are neighbouring data ranks: each holds 1/e of each layer's experts, and
everything else like all data ranks. Tokens are sent to the ranks of their experts and the results back, and so are
gradients: an expert's gradient already sums over the tokens of all e ranks and must not be summed over them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quintet.errors import ConfigError
from quintet.policies.parallel.collectives import differentiable
from quintet.policies.parallel.dtensor_shards import dtensor_from_shard, gather_full_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

TokenDispatcher = Literal["alltoall", "allgather"]


@dataclass(frozen=True, slots=True, eq=False)
class _Peers:
    """Ranks over which experts are distributed; copies of a model share the group."""

    rank: int
    size: int
    group: Any

    def __deepcopy__(self, memo: object) -> _Peers:
        return self

    def all_to_all(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Send `send_counts[i]` rows to peer i, in order, and return the `receive_counts[i]` rows from each peer i."""
        received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive_counts, send_counts, group=self.group)
        return received

    def all_gather(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Concatenate the rows of all peers; peer i has `counts[i]`."""
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        received = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(received, padded, group=self.group)
        return torch.cat([shard[:count] for shard, count in zip(received, counts, strict=True)])

    def exchange(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        """Call `all_to_all` with gradients."""
        return differentiable(
            rows,
            lambda sent: self.all_to_all(sent, send_counts, receive_counts),
            lambda grad: self.all_to_all(grad, receive_counts, send_counts),
        )

    def reduce_scatter(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Sum the peers' rows and return this rank's `counts[rank]` of them."""
        full = rows.contiguous().clone()
        dist.all_reduce(full, group=self.group)
        local: Tensor = torch.split(full, counts)[self.rank]
        return local


class _ExpertParallelLayer(nn.Module):
    """Mixin for the class of a layer's experts that sends tokens to the ranks of their experts.

    All peers must run the layer equally often, with or without tokens.
    """

    peers: _Peers
    dispatcher: TokenDispatcher
    num_experts: int
    """Number of local experts."""
    expert_mesh: DeviceMesh | None = None
    """Mesh [peers, ranks with the same experts] of the placement in checkpoints; it has no process groups."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [T, hidden] for tokens [T, hidden], the indices [T, k] of their experts and the experts' weights."""
        dispatch = self._dispatch_all_to_all if self.dispatcher == "alltoall" else self._dispatch_all_gather
        return dispatch(hidden_states, top_k_index, top_k_weights)

    def _dispatch_all_to_all(self, states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Send each token to the ranks of its k experts; weight the outputs on the sending rank."""
        peers, expert_ids = self.peers, index.reshape(-1)
        order = expert_ids.argsort(stable=True)
        counts = torch.bincount(expert_ids, minlength=peers.size * self.num_experts)
        received_counts = peers.all_to_all(counts, [self.num_experts] * peers.size, [self.num_experts] * peers.size)
        send_counts, receive_counts = (x.view(peers.size, -1).sum(1).tolist() for x in (counts, received_counts))
        received = peers.exchange(states[order // index.shape[1]], send_counts, receive_counts)
        experts = (
            torch.arange(self.num_experts, device=expert_ids.device)
            .repeat(peers.size)
            .repeat_interleave(received_counts)
        )
        outputs = peers.exchange(self._compute(received, experts), receive_counts, send_counts)
        weighted = outputs[order.argsort()].view(*index.shape, states.shape[1]) * weights[..., None]
        return weighted.sum(1).to(states.dtype)

    def _dispatch_all_gather(self, states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Send all tokens to all peers and sum the weighted outputs of each peer's experts."""
        peers = self.peers
        num_local = torch.tensor([len(states)], device=states.device)
        counts = peers.all_gather(num_local, [1] * peers.size).tolist()
        gather, scatter = partial(peers.all_gather, counts=counts), partial(peers.reduce_scatter, counts=counts)
        all_states, all_weights = (differentiable(x, gather, scatter) for x in (states, weights))
        local = peers.all_gather(index, counts).reshape(-1) - peers.rank * self.num_experts
        pairs = ((local >= 0) & (local < self.num_experts)).nonzero().squeeze(-1)
        outputs = self._compute(all_states[pairs // index.shape[1]], local[pairs])
        weighted = (outputs * all_weights.reshape(-1)[pairs][:, None]).to(states.dtype)
        table = weighted.new_zeros(len(local), states.shape[1]).index_copy(0, pairs, weighted)
        return differentiable(table.view(-1, *index.shape[1:], states.shape[1]).sum(1), scatter, gather)

    def _compute(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Return the outputs [n, hidden] of the rows' local experts.

        Without rows, a row of zeros is computed and dropped: the experts need a gradient on every rank.
        """
        if len(rows):
            return self._local_experts(rows, experts)
        return self._local_experts(rows.new_zeros(1, rows.shape[1]), experts.new_zeros(1))[:0] + rows

    def _local_experts(self, rows: Tensor, experts: Tensor) -> Tensor:
        outputs: Tensor = super().forward(rows, experts[:, None], rows.new_ones(len(rows), 1))
        return outputs


class ExpertParallel:
    """Access to a model's distributed experts, to shard, gather and store them."""

    def __init__(self, model: nn.Module, peers: _Peers) -> None:
        self._model = model
        self._peers = peers

    def _layers(self) -> Iterator[_ExpertParallelLayer]:
        return (module for module in self._model.modules() if isinstance(module, _ExpertParallelLayer))

    def _build_mesh(self, replicate_mesh: DeviceMesh) -> DeviceMesh:
        """Build `expert_mesh`; collective over all ranks."""
        from torch.distributed.device_mesh import DeviceMesh

        local = torch.tensor(dist.get_process_group_ranks(replicate_mesh.get_group()))
        rank_lists = [torch.empty_like(local) for _ in range(self._peers.size)]
        dist.all_gather(rank_lists, local, group=self._peers.group)
        names = ("expert", "expert_replicas")
        return DeviceMesh(
            replicate_mesh.device_type, torch.stack(rank_lists), mesh_dim_names=names, _init_backend=False
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Local slices of the experts' weights. They need their own optimizer group, since their mesh differs."""
        return [parameter for layer in self._layers() for parameter in layer.parameters()]

    def shard(self, replicate_mesh: DeviceMesh, data_ranks: int, **options: Any) -> None:
        """Apply `fully_shard` to each layer's experts; call it before sharding the layers and the model.

        `replicate_mesh` is the 1-D mesh of the data ranks with the same experts (size 1 if there are no others);
        `options` are passed to `fully_shard`. Gradients are summed over `replicate_mesh` and divided by `data_ranks`,
        the number of all data ranks, as for the other weights.
        """
        from torch.distributed.fsdp import fully_shard

        mesh = self._build_mesh(replicate_mesh)
        for layer in self._layers():
            layer.expert_mesh = mesh
            sharded: FSDPModule = fully_shard(layer, mesh=replicate_mesh, **options)
            sharded.set_gradient_divide_factor(float(data_ranks))
            # gloo cannot scale while it sums; a single rank would divide twice (torch 2.13)
            sums = replicate_mesh.size() > 1 and dist.get_backend(replicate_mesh.get_group()) == "gloo"
            sharded.set_force_sum_reduction_for_comms(sums)

    @property
    def group(self) -> Any:
        """Process group over which experts are distributed; norms must be reduced over it."""
        return self._peers.group

    def is_expert(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter is a slice of experts' weights."""
        return any(parameter is expert for expert in self.parameters)

    def gather(self, shard: Tensor) -> Tensor:
        """Gather all experts' tensor [E, …] from the slices [E/e, …] of all peers; collective.

        For weights and optimizer moments. DTensors are gathered over the other data ranks, too.
        """
        shard = gather_full_tensor(shard.detach()).contiguous()
        shards = [torch.empty_like(shard) for _ in range(self._peers.size)]
        dist.all_gather(shards, shard, group=self._peers.group)
        return torch.cat(shards)

    def local_slice(self, full: Tensor) -> Tensor:
        """Return this rank's slice of all experts' tensor."""
        return full.chunk(self._peers.size)[self._peers.rank]


def expert_meshes(module: nn.Module) -> dict[nn.Parameter, DeviceMesh]:
    """Return the mesh for `as_full_experts` by parameter, for all local slices of experts."""
    layers = (layer for layer in module.modules() if isinstance(layer, _ExpertParallelLayer))
    return {parameter: layer.expert_mesh for layer in layers if layer.expert_mesh for parameter in layer.parameters()}


def as_full_experts(shard: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a slice, or an optimizer state of it, as a DTensor of all experts [E, …], without a copy."""
    from torch.distributed.tensor import DTensor, Shard

    local = shard.to_local() if isinstance(shard, DTensor) else shard
    shape = torch.Size((shard.shape[0] * int(mesh.size(0)), *shard.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return dtensor_from_shard(local.detach(), mesh, [Shard(0), Shard(0)], shape, stride)


def apply_expert_parallel(
    model: nn.Module, mesh: DeviceMesh, dispatcher: TokenDispatcher = "alltoall", component: str = "actor"
) -> ExpertParallel:
    """Remove other ranks' experts from each layer, in place, and dispatch tokens between ranks.

    `mesh` is the 1-D mesh of the expert-parallel ranks, each of which has the full model before the call and processes
    its own tokens afterwards. Parameter names stay. `alltoall` sends a token only to its experts; `allgather` sends it
    to all ranks, which is faster if a token has nearly as many experts as there are ranks. `component` is the learner
    whose configuration error messages name.

    Raises:
        ConfigError: the model has no fused experts, or their number is not divisible by the number of ranks.
    """
    peers = _Peers(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    mixtures = [module for module in model.modules() if _is_mixture(module)]
    key = f"{component}.parallel.expert"
    if not mixtures:
        raise ConfigError(
            f"{key} = {peers.size}: the model has no experts to distribute",
            key=key,
            value=peers.size,
            hint=f"set {key}=1, or use a mixture-of-experts model such as Qwen3-MoE",
        )
    for experts in mixtures:
        _check_divisible(experts, peers.size, key)
        _shard_experts(experts, peers, dispatcher)
    return ExpertParallel(model, peers)


def _is_mixture(module: nn.Module) -> bool:
    """Return whether the module is transformers' fused experts, with all weights stacked to [experts, …]."""
    count = getattr(module, "num_experts", None)
    weights = list(module.parameters(recurse=False))
    return hasattr(module, "_apply_gate") and bool(weights) and all(len(weight) == count for weight in weights)


def _check_divisible(experts: nn.Module, ranks: int, key: str) -> None:
    count: int = experts.num_experts  # type: ignore[assignment]
    if count % ranks:
        divisors = [size for size in range(1, count + 1) if count % size == 0]
        raise ConfigError(
            f"{key} = {ranks} does not divide the {count} experts of a layer",
            key=key,
            value=ranks,
            hint=f"valid values: {', '.join(map(str, divisors))}",
        )


def _shard_experts(experts: nn.Module, peers: _Peers, dispatcher: TokenDispatcher) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        local = parameter.detach().chunk(peers.size)[peers.rank].clone()
        setattr(experts, name, nn.Parameter(local, requires_grad=parameter.requires_grad))
    original = type(experts)
    # forward comes from the mixin, everything else from the model's own class
    experts.__class__ = type(f"ExpertParallel{original.__name__}", (_ExpertParallelLayer, original), {})
    sharded = cast(_ExpertParallelLayer, experts)
    sharded.num_experts = sharded.num_experts // peers.size
    sharded.peers = peers
    sharded.dispatcher = dispatcher
