"""Groups of ranks: how they divide work and reduce results.

Every rank has the whole mini-batch and calls the same methods in the same order. Reduced values are bit-equal on all
ranks, so that replicated weights stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Assignment(Generic[T]):
    """An item that this rank processes."""

    item: T
    is_counted: bool
    """False for a repeated item that only keeps ranks in step."""
    last: bool
    """Whether it is the last one of this rank."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group and this process's rank in it; by default a single rank without a process group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """Group of the collectives; None is the default group."""

    def assign(self, items: Iterable[T], *, even: bool) -> Iterator[Assignment[T]]:
        """Yield this rank's items, round robin. If `even`, all ranks get the same number: a rank that is one short
        repeats the last item of all, which does not count."""
        items = list(items)
        local = items[self.rank :: self.size]
        padded = even and len(local) < -(-len(items) // self.size)
        for index, item in enumerate(local):
            yield Assignment(item, is_counted=True, last=index == len(local) - 1 and not padded)
        if padded:
            yield Assignment(items[-1], is_counted=False, last=True)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over all ranks; gradients that are None on all ranks stay None."""
        if self.size == 1:
            return
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        present = self.all_reduce(torch.tensor([float(parameter.grad is not None) for parameter in trainable]))
        with_grad = [parameter for parameter, owners in zip(trainable, present.tolist(), strict=True) if owners]
        if not with_grad:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in with_grad]
        flat = self.all_reduce(torch.cat([grad.flatten() for grad in grads]))
        for parameter, part in zip(with_grad, torch.split(flat, [p.numel() for p in with_grad]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def all_reduce_dict(self, values: dict[str, float]) -> dict[str, float]:
        """Sum values by name over all ranks; a rank may lack a name."""
        sums: dict[str, float] = {}
        for rank_values in self.all_gather(values):
            for name, value in rank_values.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def all_reduce_max(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return max(float(other) for other in self.all_gather(value))

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. They are sent as JSON: unpickling could execute code."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]), group=self.group)
        width = max(int(length) for length in lengths)
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: len(text)] = text
        gathered = [torch.zeros(width, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self.group)
        return [json.loads(bytes(part[: int(length)].tolist())) for part, length in zip(gathered, lengths, strict=True)]


SINGLE_RANK = RankGroup()
"""The only rank of a process without a process group."""
