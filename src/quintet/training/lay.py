"""How a learner's weights lie over its ranks, and what an optimizer step has to do because of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from quintet.config.native.learners import ShardingConfig
from quintet.policies.causal_lm import Packed
from quintet.training.ranks import Ranks

__all__ = ["TYPES", "Lay", "OnePass", "Whole", "cast_buffers", "own_name", "take_weights"]

TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ALONE = Ranks()
T = TypeVar("T")


class Lay(Protocol):
    """How a learner's weights lie over its ranks. Methods are called by all of them in the same order."""

    module: Any
    """What a pass calls."""
    even: bool
    """All ranks have to make as many passes, since they fetch weights from each other."""
    factor: float
    """Losses are multiplied by it, since gradients are averaged over so many ranks where a sum is wanted."""

    @property
    def device(self) -> torch.device:
        """Where passes are computed."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer steps on: this rank's part."""
        ...

    def accumulate(self, *, last: bool) -> AbstractContextManager[object]:
        """Around the forward and backward pass of a micro-batch."""
        ...

    def finish(self) -> None:
        """After the backward passes: gradients are those of the whole mini-batch."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Scale gradients down to that norm over all ranks; gives the norm before, a plain tensor []."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under the model's own names, one after the other."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Full tensors under the model's own names take the place of what is there."""
        ...

    def learn(self, passes: Sequence[Packed], loss_of: Callable[[int], Tensor]) -> None:
        """All passes of this rank's data forward and backward. `loss_of(number)` makes the forward pass and gives what
        the backward pass begins with; of ranks that share out layers, it is called on the last alone."""
        ...

    def measure(self, passes: Sequence[Packed], measure: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """What `measure(number)` gives for each pass, one after the other; ranks that share out layers all get it."""
        ...

    def agree(self, value: T) -> T:
        """Of ranks that share out layers, what the one that had the losses says; JSON's types."""
        ...

    def ahead(self, passes: Sequence[Packed], compute: Callable[[int], T]) -> dict[int, T]:
        """What `compute(number)` gives for each pass, of ranks that share out layers on the last alone: they can't
        make a pass in the midst of another learner's. Empty where that can be done."""
        ...


def own_name(name: str) -> str:
    """The model's own name of a parameter, without what was wrapped around it."""
    for wrapping in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapping, "")
    return name.removeprefix("policy.")


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Give buffers with fractions another type than the float32 in which they come."""
    if dtype is torch.float32:
        return
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


class OnePass:
    """Every rank makes whole passes, through all layers."""

    module: Any

    @property
    def device(self) -> torch.device:
        """See `Lay.device`."""
        found: torch.device = next(self.module.parameters()).device
        return found

    def accumulate(self, *, last: bool) -> AbstractContextManager[object]:
        """See `Lay.accumulate`."""
        raise NotImplementedError

    def learn(self, passes: Sequence[Packed], loss_of: Callable[[int], Tensor]) -> None:
        """See `Lay.learn`."""
        for number in range(len(passes)):
            with self.accumulate(last=number == len(passes) - 1):
                torch.autograd.backward(loss_of(number))

    def measure(self, passes: Sequence[Packed], measure: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """See `Lay.measure`."""
        return (measure(number) for number in range(len(passes)))

    def agree(self, value: T) -> T:
        """See `Lay.agree`."""
        return value

    def ahead(self, passes: Sequence[Packed], compute: Callable[[int], T]) -> dict[int, T]:
        """See `Lay.ahead`."""
        return {}


class Whole(OnePass):
    """Every rank has all weights; gradients are summed once a step."""

    even, factor = False, 1.0

    def __init__(self, module: nn.Module, ranks: Ranks = ALONE) -> None:
        self.module = module
        self._ranks = ranks

    @classmethod
    def of(cls, module: nn.Module, config: ShardingConfig, ranks: Ranks = ALONE) -> Whole:
        """With the types that the configuration names: float64 holds for the weights themselves, narrower ones for
        matrix products, which autocast sees to."""
        cast_buffers(module, TYPES[config.buffer_dtype])
        return cls(module.double() if config.parameter_dtype == "float64" else module, ranks)

    def parameters(self) -> list[nn.Parameter]:
        """See `Lay.parameters`."""
        return list(self.module.parameters())

    def accumulate(self, *, last: bool) -> AbstractContextManager[object]:
        """See `Lay.accumulate`."""
        return nullcontext()

    def finish(self) -> None:
        """See `Lay.finish`."""
        self._ranks.sum_gradients(self.module.parameters())

    def clip(self, max_norm: float) -> Tensor:
        """See `Lay.clip`."""
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Lay.weights`."""
        for name, parameter in self.module.named_parameters():
            yield own_name(name), parameter.detach()

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Lay.load`."""
        take_weights(self.module, weights)


@torch.no_grad()
def take_weights(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy full tensors into the plain parameters of those names.

    Raises:
        KeyError: there is no such parameter.
    """
    own = {own_name(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}
    for name, tensor in weights:
        own[name].copy_(tensor)
