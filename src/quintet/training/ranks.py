"""Learners in several processes that hold the same weights: each takes its share of a mini-batch's passes.

Every process is given the whole mini-batch and calls the same methods in the same order. What is summed over them is
equal in all of them, bit for bit, so that their weights stay the same.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Dealt", "Ranks"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dealt(Generic[T]):
    """A part that a process has to do."""

    part: T
    counts: bool
    """False where it is done for company alone."""
    last: bool
    """None follows it."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Number `rank` of `size` processes; alone by default, without any process group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """Through which they talk; None is everybody's."""

    @classmethod
    def join(cls, rank: int, size: int, meeting: Path, timeout_seconds: float = 600.0) -> Ranks:
        """Meet the others over gloo, at a file that all of them can write and that wasn't used before. They talk over
        loopback unless `GLOO_SOCKET_IFNAME` names another interface. End with `leave`."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        return cls(rank, size)

    def leave(self) -> None:
        """Part from the others."""
        if self.size > 1:
            dist.destroy_process_group()

    def share(self, parts: Iterable[T]) -> Iterator[T]:
        """Of parts that are the same in all processes, those of this one: dealt round robin."""
        return islice(parts, self.rank, None, self.size)

    def deal(self, parts: Iterable[T], *, even: bool) -> Iterator[Dealt[T]]:
        """The same one by one. Where `even`, all processes get as many: one that would have fewer is given the last
        part of all once more, which doesn't count."""
        every = list(parts)
        own = every[self.rank :: self.size]
        filled = even and len(own) < -(-len(every) // self.size)
        for number, part in enumerate(own):
            yield Dealt(part, counts=True, last=number == len(own) - 1 and not filled)
        if filled:
            yield Dealt(every[-1], counts=False, last=True)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients become their sums over all processes; those that none has stay None."""
        if self.size == 1:
            return
        held = [parameter for parameter in parameters if parameter.requires_grad]
        present = self.sum(torch.tensor([float(parameter.grad is not None) for parameter in held]))
        known = [parameter for parameter, owners in zip(held, present.tolist(), strict=True) if owners]
        if not known:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in known]
        flat = self.sum(torch.cat([grad.flatten() for grad in grads]))
        for parameter, part in zip(known, torch.split(flat, [p.numel() for p in known]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def sum_values(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over all processes by name; not all of them need know a name."""
        sums: dict[str, float] = {}
        for given in self.gather(values):
            for name, value in given.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def largest(self, value: float) -> float:
        """The largest value of all processes."""
        return max(float(given) for given in self.gather(value))

    def gather(self, value: Any) -> list[Any]:
        """What each process gave, in their order; as JSON, so that nothing is executed on the way."""
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
