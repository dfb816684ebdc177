"""Pipeline parallelism: the passes of an optimizer step go through stages on different ranks.

Every rank of a pipeline has the whole mini-batch and cuts it in the same way, so each knows the shapes of what comes,
and the order in which everything is done follows from the number of passes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quintet.policies.causal_lm import Packed, PolicyModule, ValueModel
from quintet.policies.stages import EMBEDDING, HEAD, copied_names, split_stages, staged_body
from quintet.training.norms import NormPart, clip_parts
from quintet.training.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Action", "Pipeline", "schedule"]

T = TypeVar("T")
Around = Callable[[bool], AbstractContextManager[object]]
LINKS = ("forward", "forward round", "backward", "backward round")
"""What travels between neighbours: states up, or from the last rank to the first one's next part; gradients the other
way. Each kind has a channel of its own where messages are told apart by their order alone."""


@dataclass(frozen=True, slots=True)
class Action:
    """One pass through one part of the layers, forward or backward."""

    forward: bool
    part: int
    number: int
    """Of the pass in the mini-batch."""


def schedule(ranks: int, virtual: int, passes: int) -> list[list[Action]]:
    """What each rank does, in its order: one forward, one backward (Narayanan et al. 2019, arXiv:1806.03377), in its
    interleaved form with virtual stages (Narayanan et al. 2021, arXiv:2104.04473).

    It is found by playing it through, so nobody ever waits for what can't come, also where the passes aren't a
    multiple of the ranks. Rank p has at most P - p passes in flight, or with v > 1 virtual stages
    2 (P - p - 1) + (v - 1) P + 1 passes through one of its parts.
    """
    room = [ranks - p if virtual == 1 else 2 * (ranks - p - 1) + (virtual - 1) * ranks + 1 for p in range(ranks)]
    while (plan := _played(ranks, virtual, passes, room)) is None:
        room = [most + 1 for most in room]
    return plan


def _played(ranks: int, virtual: int, passes: int, room: Sequence[int]) -> list[list[Action]] | None:
    """The plan; None where nobody can go on."""
    todo = {way: [deque(_order(p, ranks, virtual, passes, way)) for p in range(ranks)] for way in (True, False)}
    plan: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while any(todo[False]):
        now: list[Action] = []
        for p in range(ranks):
            flying = len(todo[False][p]) - len(todo[True][p])
            ways = (False, True) if flying < room[p] else (False,)
            way = next((w for w in ways if todo[w][p] and _needs(todo[w][p][0], ranks * virtual) <= done), None)
            if way is not None:
                now.append(todo[way][p].popleft())
                plan[p].append(now[-1])
        if not now:
            return None
        done.update(now)
    return plan


def _order(rank: int, ranks: int, virtual: int, passes: int, forward: bool) -> Iterator[Action]:
    """As many passes as there are ranks through one part, then the same through the next; and so on with others."""
    rounds = range(virtual) if forward else reversed(range(virtual))
    turns = [v * ranks + rank for v in rounds]
    for first in range(0, passes, ranks):
        for part in turns:
            for number in range(first, min(first + ranks, passes)):
                yield Action(forward, part, number)


def _needs(action: Action, parts: int) -> set[Action]:
    """What must have been done before."""
    if action.forward:
        return {Action(True, action.part - 1, action.number)} if action.part else set()
    if action.part == parts - 1:
        return {Action(True, action.part, action.number)}
    return {Action(False, action.part + 1, action.number)}


class Pipeline:
    """A module's layers over the ranks of a pipeline, and how passes go through them.

    Methods are called by all ranks in the same order, with the same passes.
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
        """Takes the module apart, in place, before its weights are sharded; see `split_stages`. Passes are computed
        where they lie now, also if shards of them are kept elsewhere later. States and their gradients travel in
        `dtype`; products of all but the last part are computed in `autocast`.

        Raises:
            ConfigError: the layers can't be shared out that way.
            MachineError: the model does something besides its layers.
        """
        self._hidden = _width(module)
        self._device = next(module.parameters()).device
        split_stages(module, mesh, virtual, component)
        self.module: Any = module
        self.ranks = Ranks(mesh.get_local_rank(), mesh.size(), mesh.get_group())
        self._tied = any(self.ranks.gather(bool(copied_names(module))))
        self.virtual = virtual
        self._dtype = dtype
        self._autocast = autocast
        self._links = _Links(self.ranks)

    @property
    def last(self) -> bool:
        """Whether this rank has the last part, and so what the model says."""
        return self.ranks.rank == self.ranks.size - 1

    def run(self, passes: Sequence[Packed], loss_of: Callable[[int], Tensor], around: Around | None = None) -> None:
        """All passes of an optimizer step forward and backward: gradients of the parts held here are added up.

        `loss_of(number)` is called where the last part is. It calls `module` as ever, which goes on from the states
        that came, and gives what the backward pass begins with. `around(last)` is entered around each backward pass;
        `last` is true for the last one through a part.
        """
        flying: dict[tuple[int, int], _Flying] = {}
        for action in schedule(self.ranks.size, self.virtual, len(passes))[self.ranks.rank]:
            key = (action.part, action.number)
            if action.forward:
                flying[key] = self._forward(action, passes[action.number], loss_of)
                continue
            with (around or _nothing)(action.number == len(passes) - 1):
                self._backward(action, flying.pop(key))
        self._links.finish()
        self._sum_tied()

    def measure(self, passes: Sequence[Packed], measure: Callable[[int], Tensor]) -> list[Tensor]:
        """What `measure(number)` gives for each pass where the last part is, [..., M]; every rank gets it, in
        float32."""
        found = self.ahead(passes, measure)
        return [self._told(found.get(number)) for number in range(len(passes))]

    @torch.no_grad()
    def ahead(self, passes: Sequence[Packed], compute: Callable[[int], T]) -> dict[int, T]:
        """The same for the last rank alone, of whatever type."""
        found: dict[int, T] = {}

        def keep(number: int) -> Tensor:
            found[number] = compute(number)
            return torch.zeros([])

        for action in _order(self.ranks.rank, self.ranks.size, self.virtual, len(passes), forward=True):
            self._forward(action, passes[action.number], keep)
        self._links.finish()
        return found

    def _forward(self, action: Action, given: Packed, loss_of: Callable[[int], Tensor]) -> _Flying:
        packed, came = self._here(given), None
        if action.part:
            came = self._links.receive(action, self._empty(packed)).requires_grad_(torch.is_grad_enabled())
        if action.part == staged_body(self.module).parts - 1:
            staged_body(self.module).incoming = came
            out = loss_of(action.number)
            staged_body(self.module).incoming = None
            return _Flying(came, out)
        with self._precision():
            out = self.module(packed, part=action.part, states=came)
        self._links.send(action, out.detach().to(self._dtype))
        return _Flying(came, out)

    def _backward(self, action: Action, flying: _Flying) -> None:
        if action.part == staged_body(self.module).parts - 1:
            torch.autograd.backward(flying.out)
        else:
            empty = torch.empty_like(flying.out, dtype=self._dtype)
            grad = self._links.receive(action, empty)
            if flying.out.requires_grad:  # not where the first layers learn nothing
                torch.autograd.backward(flying.out, grad.to(flying.out.dtype))
        if flying.came is not None:
            came = flying.came.grad
            self._links.send(action, torch.zeros_like(flying.came) if came is None else came)

    def _here(self, packed: Packed) -> Packed:
        """What this rank computes of a pass, on its device."""
        split = self.module.split
        own: Packed = split.share(packed).packed if split else packed
        return own.to(self._device)

    def _precision(self) -> AbstractContextManager[object]:
        if self._autocast is torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def _empty(self, packed: Packed) -> Tensor:
        return packed.tokens.new_empty((len(packed.tokens), self._hidden), dtype=self._dtype)

    def _sum_tied(self) -> None:
        """Embedding and head are one weight: its gradient is the sum of both ranks'."""
        weight = self._tied_weight()
        if weight is None or weight.grad is None:
            return
        own: Any = weight.grad
        mine = own.to_local() if hasattr(own, "to_local") else own
        theirs, other = torch.empty_like(mine), 0 if self.last else self.ranks.size - 1
        ways = ((dist.isend, mine.contiguous()), (dist.irecv, theirs))
        sent = [dist.P2POp(way, tensor, group=self.ranks.group, group_peer=other) for way, tensor in ways]
        for work in dist.batch_isend_irecv(sent):
            work.wait()
        mine.add_(theirs)

    def _tied_weight(self) -> nn.Parameter | None:
        """The weight that first and last rank both have, where they are two and this is one of them."""
        if not self._tied or 0 < self.ranks.rank < self.ranks.size - 1:
            return None
        return self.module.get_parameter(HEAD if self.last else EMBEDDING)  # type: ignore[no-any-return]

    def clip(self, max_norm: float, parts: Sequence[NormPart] | None = None) -> Tensor:
        """Scale gradients down to a norm over all stages; gives the norm before, []. `parts` of the weights held here,
        where some lie on other ranks than the rest."""
        copies = [w for w in (self._tied_weight(),) if w is not None and self.last]
        known = {id(weight) for weight in copies}
        mine = [
            NormPart([p for p in part.parameters if id(p) not in known], (*part.groups, self.ranks.group))
            for part in parts or [NormPart(list(self.module.parameters()))]
        ]
        return clip_parts(mine, max_norm, copies)

    @property
    def has_copy(self) -> bool:
        """Whether the head here is a copy of the embedding that another rank has."""
        return self.last and self._tied_weight() is not None

    def stream(self, held: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """All ranks' tensors by name, one after the other, from what each holds: whole ones, taken from `held` when
        their turn comes."""
        for owner in range(self.ranks.size):
            mine = iter(held) if owner == self.ranks.rank else iter(())
            while True:
                name, tensor = next(mine, ("", torch.zeros(0)))
                head = self.ranks.gather([name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")])[owner]
                if not head[0]:
                    break
                yield head[0], self._broadcast(owner, tensor, head[1], getattr(torch, head[2]))

    def _told(self, tensor: Tensor | None) -> Tensor:
        """The last rank's tensor, float32, on all of them."""
        owner = self.ranks.size - 1
        shape = self.ranks.gather([] if tensor is None else list(tensor.shape))[owner]
        return self._broadcast(owner, torch.zeros(0) if tensor is None else tensor.float(), shape, torch.float32).cpu()

    def _broadcast(self, owner: int, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.ranks.size == 1:
            return tensor
        mine, device = owner == self.ranks.rank, self._device
        whole = tensor.detach().to(device).contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(whole, group=self.ranks.group, group_src=owner)
        return whole


@dataclass(frozen=True, slots=True)
class _Flying:
    """A pass through a part whose backward pass is to come."""

    came: Tensor | None
    out: Tensor


@dataclass(slots=True)
class _Links:
    """Messages between the parts' ranks. What is sent is kept until it is there."""

    ranks: Ranks
    groups: dict[str, Any] = field(default_factory=dict)
    _sent: deque[tuple[Any, Tensor]] = field(default_factory=deque)

    def send(self, action: Action, tensor: Tensor) -> None:
        """To the rank whose part is next, or whose was before."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        link, tag = self._link(action.forward, action.part if action.forward else action.part - 1, action.number)
        to = (self.ranks.rank + (1 if action.forward else -1)) % self.ranks.size
        whole = tensor.contiguous()
        self._sent.append((dist.isend(whole, group=link, group_dst=to, tag=tag), whole))

    def receive(self, action: Action, empty: Tensor) -> Tensor:
        """What this action goes on from."""
        link, tag = self._link(action.forward, action.part - 1 if action.forward else action.part, action.number)
        source = (self.ranks.rank + (-1 if action.forward else 1)) % self.ranks.size
        dist.recv(empty, group=link, group_src=source, tag=tag)
        return empty

    def finish(self) -> None:
        """All that was sent is there."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _link(self, forward: bool, before: int, number: int) -> tuple[Any, int]:
        """The channel and the mark of a message between the part `before` and the one after it."""
        if not self.groups:
            self.groups.update(self._opened())
        kind = ("forward" if forward else "backward") + (" round" if (before + 1) % self.ranks.size == 0 else "")
        return self.groups[kind], 2 * (number * 4096 + before) + forward

    def _opened(self) -> dict[str, Any]:
        """gloo tells messages apart by their marks. NCCL by their order alone: a kind each has a channel."""
        if dist.get_backend(self.ranks.group) == "gloo":
            return dict.fromkeys(LINKS, self.ranks.group)
        members = dist.get_process_group_ranks(self.ranks.group)
        return {kind: dist.new_group(members, use_local_synchronization=True) for kind in LINKS}


def _nothing(last: bool) -> AbstractContextManager[object]:
    return nullcontext()


def _width(module: nn.Module) -> int:
    body = "body" if isinstance(module, ValueModel) else "policy.model"
    return int(module.get_parameter(f"{body}.embed_tokens.weight").shape[1])
