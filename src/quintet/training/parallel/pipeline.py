"""Pipeline parallelism: micro-batches of an optimizer step pass through stages on different ranks.

Every rank of a pipeline has the full mini-batch and splits it in the same way, so it knows the shapes of what it
receives, and the schedule depends on the number of micro-batches only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.parallel.pipeline_stages import (
    EMBEDDING_NAME,
    HEAD_NAME,
    apply_pipeline_parallel,
    get_stage_body,
    tied_copy_names,
)
from quintet.training.optim.grad_norm import GradNormGroup, clip_grad_norm
from quintet.training.parallel.process_group import RankGroup
from quintet.training.parallel.strategy import ParallelStrategy, parameter_name

T = TypeVar("T")
BackwardContext = Callable[[bool], AbstractContextManager[object]]
LINKS = ("forward", "forward round", "backward", "backward round")
"""Kinds of messages between neighbours: hidden states to the next rank, or from the last rank to the first rank's next
virtual stage ("round"); gradients in the opposite direction. Backends that match messages by order get a channel per
kind."""


@dataclass(frozen=True, slots=True)
class Action:
    """Forward or backward pass of one micro-batch through one (virtual) stage."""

    forward: bool
    stage: int
    micro_batch: int


def build_schedule(num_ranks: int, virtual_stages: int, num_passes: int) -> list[list[Action]]:
    """Return each rank's actions in order: 1F1B (Narayanan et al. 2019, arXiv:1806.03377), interleaved with virtual
    stages (Narayanan et al. 2021, arXiv:2104.04473).

    The schedule is simulated, so it cannot deadlock, even if the number of micro-batches is not a multiple of the
    ranks. Rank p has at most P - p micro-batches in flight, or with v > 1 virtual stages 2 (P - p - 1) + (v - 1) P + 1.
    """
    max_in_flight = [
        num_ranks - p if virtual_stages == 1 else 2 * (num_ranks - p - 1) + (virtual_stages - 1) * num_ranks + 1
        for p in range(num_ranks)
    ]
    while (plan := _simulate(num_ranks, virtual_stages, num_passes, max_in_flight)) is None:
        max_in_flight = [limit + 1 for limit in max_in_flight]
    return plan


def _simulate(ranks: int, virtual: int, passes: int, max_in_flight: Sequence[int]) -> list[list[Action]] | None:
    """Return the schedule; None if all ranks block each other."""
    remaining = {
        is_forward: [deque(_order(p, ranks, virtual, passes, is_forward)) for p in range(ranks)]
        for is_forward in (True, False)
    }
    plan: list[list[Action]] = [[] for _ in range(ranks)]
    completed: set[Action] = set()
    while any(remaining[False]):
        started: list[Action] = []
        for p in range(ranks):
            in_flight = len(remaining[False][p]) - len(remaining[True][p])
            directions = (False, True) if in_flight < max_in_flight[p] else (False,)
            is_forward = next(
                (
                    direction
                    for direction in directions
                    if remaining[direction][p]
                    and _dependencies(remaining[direction][p][0], ranks * virtual) <= completed
                ),
                None,
            )
            if is_forward is not None:
                started.append(remaining[is_forward][p].popleft())
                plan[p].append(started[-1])
        if not started:
            return None
        completed.update(started)
    return plan


def _order(rank: int, ranks: int, virtual: int, passes: int, forward: bool) -> Iterator[Action]:
    """Yield a rank's forward or backward actions: as many micro-batches as ranks through one of its stages, then the
    same ones through its next stage, and so on."""
    stages = [v * ranks + rank for v in (range(virtual) if forward else reversed(range(virtual)))]
    for first in range(0, passes, ranks):
        for stage in stages:
            for micro_batch in range(first, min(first + ranks, passes)):
                yield Action(forward, stage, micro_batch)


def _dependencies(action: Action, num_stages: int) -> set[Action]:
    """Return the actions that must come before this one."""
    if action.forward:
        return {Action(True, action.stage - 1, action.micro_batch)} if action.stage else set()
    if action.stage == num_stages - 1:
        return {Action(True, action.stage, action.micro_batch)}
    return {Action(False, action.stage + 1, action.micro_batch)}


class Pipeline:
    """A module's layers in stages on the ranks of a pipeline.

    All ranks call the methods in the same order with the same passes.
    """

    def __init__(
        self,
        module: PolicyModule | ValueModel,
        mesh: DeviceMesh,
        virtual: int = 1,
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype = torch.float32,
        component: str = "actor",
    ) -> None:
        """Split the module into stages in place, before its weights are sharded; see `apply_pipeline_parallel`. Passes
        run on the weights' current device, even if shards are offloaded later. Hidden states and their gradients are
        sent in `dtype`; all but the last stage compute under autocast to `autocast`.

        Raises:
            ConfigError: the layers cannot be divided this way.
            MachineError: the model computes more than its layers.
        """
        self._hidden_size = _hidden_size(module)
        self._device = next(module.parameters()).device
        apply_pipeline_parallel(module, mesh, virtual, component)
        self.module: Any = module
        self.ranks = RankGroup(mesh.get_local_rank(), mesh.size(), mesh.get_group())
        self._tied = any(self.ranks.all_gather(bool(tied_copy_names(module))))
        self.virtual = virtual
        self._dtype = dtype
        self._autocast = autocast
        self._links = _Links(self.ranks)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, with the head."""
        return self.ranks.rank == self.ranks.size - 1

    def forward_backward(
        self,
        passes: Sequence[PackedBatch],
        compute_loss: Callable[[int], Tensor],
        backward_context: BackwardContext | None = None,
    ) -> None:
        """Run all passes of an optimizer step forward and backward, and accumulate gradients of this rank's stages.

        `compute_loss(index)` is called on the last stage; it calls `module`, which continues from the received hidden
        states, and returns the loss. `backward_context(last)` is entered around each backward pass; `last` is true
        for the last one through a stage.
        """
        in_flight: dict[tuple[int, int], _InFlight] = {}
        for action in build_schedule(self.ranks.size, self.virtual, len(passes))[self.ranks.rank]:
            key = (action.stage, action.micro_batch)
            if action.forward:
                in_flight[key] = self._forward(action, passes[action.micro_batch], compute_loss)
                continue
            with (backward_context or _no_context)(action.micro_batch == len(passes) - 1):
                self._backward(action, in_flight.pop(key))
        self._links.wait()
        self._reduce_tied_gradient()

    def forward_only(self, passes: Sequence[PackedBatch], compute: Callable[[int], Tensor]) -> list[Tensor]:
        """Return `compute(index)` of each pass on the last stage, [..., M], on all ranks in float32."""
        results = self.precompute(passes, compute)
        return [self._broadcast_result(results.get(index)) for index in range(len(passes))]

    @torch.no_grad()
    def precompute(self, passes: Sequence[PackedBatch], compute: Callable[[int], T]) -> dict[int, T]:
        """Return `compute(index)` of each pass, of any type, on the last rank only."""
        results: dict[int, T] = {}

        def store(index: int) -> Tensor:
            results[index] = compute(index)
            return torch.zeros([])

        for action in _order(self.ranks.rank, self.ranks.size, self.virtual, len(passes), forward=True):
            self._forward(action, passes[action.micro_batch], store)
        self._links.wait()
        return results

    def _forward(self, action: Action, packed: PackedBatch, compute_loss: Callable[[int], Tensor]) -> _InFlight:
        packed, received = self._local_tokens(packed), None
        if action.stage:
            received = self._links.receive(action, self._empty(packed)).requires_grad_(torch.is_grad_enabled())
        if action.stage == get_stage_body(self.module).num_stages - 1:
            get_stage_body(self.module).input_states = received
            out = compute_loss(action.micro_batch)
            get_stage_body(self.module).input_states = None
            return _InFlight(received, out)
        with self._autocast_context():
            out = self.module(packed, stage=action.stage, states=received)
        self._links.send(action, out.detach().to(self._dtype))
        return _InFlight(received, out)

    def _backward(self, action: Action, in_flight: _InFlight) -> None:
        if action.stage == get_stage_body(self.module).num_stages - 1:
            torch.autograd.backward(in_flight.out)
        else:
            empty = torch.empty_like(in_flight.out, dtype=self._dtype)
            grad = self._links.receive(action, empty)
            if in_flight.out.requires_grad:  # unless the first layers are frozen
                torch.autograd.backward(in_flight.out, grad.to(in_flight.out.dtype))
        if in_flight.received is not None:
            input_grad = in_flight.received.grad
            self._links.send(action, torch.zeros_like(in_flight.received) if input_grad is None else input_grad)

    def _local_tokens(self, packed: PackedBatch) -> PackedBatch:
        """Return this rank's tokens of a pass, on its device."""
        sharding = self.module.token_sharding
        local: PackedBatch = sharding.shard(packed).packed if sharding else packed
        return local.to(self._device)

    def _autocast_context(self) -> AbstractContextManager[object]:
        if self._autocast is torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def _empty(self, packed: PackedBatch) -> Tensor:
        return packed.tokens.new_empty((len(packed.tokens), self._hidden_size), dtype=self._dtype)

    def _reduce_tied_gradient(self) -> None:
        """Sum the gradients of tied embedding and head over the first and last rank."""
        weight = self._tied_weight()
        if weight is None or weight.grad is None:
            return
        weight_grad: Any = weight.grad
        grad = weight_grad.to_local() if hasattr(weight_grad, "to_local") else weight_grad
        received, other = torch.empty_like(grad), 0 if self.is_last else self.ranks.size - 1
        operations = [
            dist.P2POp(operation, tensor, group=self.ranks.group, group_peer=other)
            for operation, tensor in ((dist.isend, grad.contiguous()), (dist.irecv, received))
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        grad.add_(received)

    def _tied_weight(self) -> nn.Parameter | None:
        """Return the tied weight if this is the first or last rank and both have a copy of it."""
        if not self._tied or 0 < self.ranks.rank < self.ranks.size - 1:
            return None
        return self.module.get_parameter(HEAD_NAME if self.is_last else EMBEDDING_NAME)  # type: ignore[no-any-return]

    def clip_grad_norm(self, max_norm: float, groups: Sequence[GradNormGroup] | None = None) -> Tensor:
        """Clip gradients to a norm over all stages and return the norm before, []. `groups` are those of this rank's
        weights, if some are on other ranks than the rest."""
        copies = [w for w in (self._tied_weight(),) if w is not None and self.is_last]
        copy_ids = {id(weight) for weight in copies}
        stage_groups = [
            GradNormGroup(
                [p for p in group.parameters if id(p) not in copy_ids], (*group.process_groups, self.ranks.group)
            )
            for group in groups or [GradNormGroup(list(self.module.parameters()))]
        ]
        return clip_grad_norm(stage_groups, max_norm, copies)

    @property
    def has_tied_head_copy(self) -> bool:
        """Whether this rank's head is a copy of the embedding of the first rank."""
        return self.is_last and self._tied_weight() is not None

    def stream_weights(self, local: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield all ranks' full tensors by name, one after the other; `local` yields those of this rank in its turn."""
        for owner in range(self.ranks.size):
            weights = iter(local) if owner == self.ranks.rank else iter(())
            while True:
                name, tensor = next(weights, ("", torch.zeros(0)))
                header = [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
                name, shape, dtype = self.ranks.all_gather(header)[owner]
                if not name:
                    break
                yield name, self._broadcast(owner, tensor, shape, getattr(torch, dtype))

    def _broadcast_result(self, tensor: Tensor | None) -> Tensor:
        """Return the last rank's tensor, float32, on all ranks."""
        owner = self.ranks.size - 1
        shape = self.ranks.all_gather([] if tensor is None else list(tensor.shape))[owner]
        return self._broadcast(owner, torch.zeros(0) if tensor is None else tensor.float(), shape, torch.float32).cpu()

    def _broadcast(self, owner: int, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.ranks.size == 1:
            return tensor
        if owner == self.ranks.rank:
            tensor = tensor.detach().to(self._device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.broadcast(tensor, group=self.ranks.group, group_src=owner)
        return tensor


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A forward pass that awaits its backward pass."""

    received: Tensor | None
    out: Tensor


@dataclass(slots=True)
class _Links:
    """Messages between the ranks of consecutive stages. Sent tensors are referenced until they are delivered."""

    ranks: RankGroup
    groups: dict[str, Any] = field(default_factory=dict)
    _sent: deque[tuple[Any, Tensor]] = field(default_factory=deque)

    def send(self, action: Action, tensor: Tensor) -> None:
        """Send to the rank with the next stage, or the previous one in a backward pass."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        link, tag = self._link(action.forward, action.stage if action.forward else action.stage - 1, action.micro_batch)
        target = (self.ranks.rank + (1 if action.forward else -1)) % self.ranks.size
        contiguous = tensor.contiguous()
        self._sent.append((dist.isend(contiguous, group=link, group_dst=target, tag=tag), contiguous))

    def receive(self, action: Action, empty: Tensor) -> Tensor:
        """Receive the input of this action into `empty`."""
        link, tag = self._link(action.forward, action.stage - 1 if action.forward else action.stage, action.micro_batch)
        source = (self.ranks.rank + (-1 if action.forward else 1)) % self.ranks.size
        dist.recv(empty, group=link, group_src=source, tag=tag)
        return empty

    def wait(self) -> None:
        """Wait until all messages are delivered."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _link(self, forward: bool, stage: int, micro_batch: int) -> tuple[Any, int]:
        """Return process group and tag of a message between `stage` and the next one."""
        if not self.groups:
            self.groups.update(self._create_groups())
        kind = ("forward" if forward else "backward") + (" round" if (stage + 1) % self.ranks.size == 0 else "")
        return self.groups[kind], 2 * (micro_batch * 4096 + stage) + forward

    def _create_groups(self) -> dict[str, Any]:
        """Create a group for each kind of message, because NCCL matches messages by order; gloo matches them by tag."""
        if dist.get_backend(self.ranks.group) == "gloo":
            return dict.fromkeys(LINKS, self.ranks.group)
        members = dist.get_process_group_ranks(self.ranks.group)
        return {kind: dist.new_group(members, use_local_synchronization=True) for kind in LINKS}


def _no_context(last: bool) -> AbstractContextManager[object]:
    return nullcontext()


def _hidden_size(module: nn.Module) -> int:
    body = "body" if isinstance(module, ValueModel) else "policy.model"
    return int(module.get_parameter(f"{body}.embed_tokens.weight").shape[1])


class PipelineStrategy:
    """`ParallelStrategy` of pipeline stages; the weights of a stage are placed by its own strategy."""

    needs_equal_passes = True

    def __init__(
        self, stage: ParallelStrategy, pipeline: Pipeline, grad_norm_groups: Callable[[], Sequence[GradNormGroup]]
    ) -> None:
        """`stage` places the weights of this rank's stage, and `grad_norm_groups` are its groups for clipping."""
        self.module: Any = stage.module
        self.loss_factor = stage.loss_factor
        self._stage = stage
        self._pipeline = pipeline
        self._grad_norm_groups = grad_norm_groups

    @property
    def device(self) -> torch.device:
        return self._stage.device

    def parameters(self) -> list[nn.Parameter]:
        return self._stage.parameters()

    def accumulate_gradients(self, *, last: bool) -> AbstractContextManager[object]:
        return self._stage.accumulate_gradients(last=last)

    def reduce_gradients(self) -> None:
        self._stage.reduce_gradients()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        return self._pipeline.clip_grad_norm(max_norm, self._grad_norm_groups())

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `ParallelStrategy.full_weights`; one stage after the other."""
        skipped = parameter_name(HEAD_NAME) if self._pipeline.has_tied_head_copy else None
        return self._pipeline.stream_weights(entry for entry in self._stage.full_weights() if entry[0] != skipped)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._stage.load_weights(self._with_tied_head(weights))

    def _with_tied_head(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            yield name, tensor
            if self._pipeline.has_tied_head_copy and name == parameter_name(EMBEDDING_NAME):
                yield parameter_name(HEAD_NAME), tensor

    def forward_backward(self, passes: Sequence[PackedBatch], compute_loss: Callable[[int], Tensor]) -> None:
        self._pipeline.forward_backward(passes, compute_loss, lambda last: self.accumulate_gradients(last=last))

    def forward(self, passes: Sequence[PackedBatch], compute: Callable[[int], Tensor]) -> Iterator[Tensor]:
        return iter(self._pipeline.forward_only(passes, compute))

    def broadcast_from_last_stage(self, value: T) -> T:
        last_value: T = self._pipeline.ranks.all_gather(value)[-1]
        return last_value

    def precompute(self, passes: Sequence[PackedBatch], compute: Callable[[int], T]) -> dict[int, T]:
        return self._pipeline.precompute(passes, compute)
