"""Parallel strategies: placement of a learner's weights on its ranks, and the training step that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from quintet.config.native.learners import ShardingConfig
from quintet.policies.packed_batch import PackedBatch
from quintet.training.parallel.process_group import SINGLE_RANK, RankGroup

DTYPES_BY_NAME = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
VALUE_HEAD = "value_head"
"""Part of the names of the parameters of a value head in a policy."""
T = TypeVar("T")


class ParallelStrategy(Protocol):
    """Placement of a learner's weights on its ranks. All ranks call the methods in the same order."""

    module: Any
    """The module to call in a forward pass."""
    needs_equal_passes: bool
    """Whether all ranks must run the same number of passes, because they gather weights from each other."""
    loss_factor: float
    """Factor for losses: the number of ranks over which gradients are averaged, since their sum is needed."""

    @property
    def device(self) -> torch.device:
        """The device of forward passes."""

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's shards of the parameters, for the optimizer."""

    def accumulate_gradients(self, *, last: bool) -> AbstractContextManager[object]:
        """Return the context for forward and backward pass of one micro-batch; `last` is the last of the step."""

    def reduce_gradients(self) -> None:
        """Sum the gradients of the whole mini-batch over ranks, after all backward passes."""

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip gradients to a norm over all ranks and return the norm before clipping, a plain tensor []."""

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under the model's parameter names, one after the other."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load full tensors by the model's parameter names."""

    def forward_backward(self, passes: Sequence[Any], compute_loss: Callable[[int], Tensor]) -> None:
        """Run forward and backward over all passes of this rank. `compute_loss(index)` runs the forward pass and
        returns the loss; with pipeline stages it is called on the last stage only."""

    def forward(self, passes: Sequence[PackedBatch], compute: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """Yield `compute(index)` of each pass; with pipeline stages all of them receive the last stage's result."""

    def broadcast_from_last_stage(self, value: T) -> T:
        """Return the last pipeline stage's value on all stages; the value must be JSON."""

    def precompute(self, passes: Sequence[PackedBatch], compute: Callable[[int], T]) -> dict[int, T]:
        """Return `compute(index)` of each pass on the last pipeline stage, because stages cannot run a forward pass
        in the middle of another learner's. Empty without pipeline stages, which can."""


def parameter_name(name: str) -> str:
    """Return the model's name of a parameter, without the prefixes of wrapper modules."""
    for wrapping in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapping, "")
    return name.removeprefix("policy.")


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point buffers, which are created in float32."""
    if dtype is torch.float32:
        return
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


class UnpipelinedStrategy:
    """Base of each `ParallelStrategy` under which every rank runs all layers in each pass."""

    module: Any

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.module.parameters()).device
        return device

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def accumulate_gradients(self, *, last: bool) -> AbstractContextManager[object]:
        raise NotImplementedError

    def forward_backward(self, passes: Sequence[Any], compute_loss: Callable[[int], Tensor]) -> None:
        for index in range(len(passes)):
            with self.accumulate_gradients(last=index == len(passes) - 1):
                torch.autograd.backward(compute_loss(index))

    def forward(self, passes: Sequence[PackedBatch], compute: Callable[[int], Tensor]) -> Iterator[Tensor]:
        return (compute(index) for index in range(len(passes)))

    def broadcast_from_last_stage(self, value: T) -> T:
        return value

    def precompute(self, passes: Sequence[PackedBatch], compute: Callable[[int], T]) -> dict[int, T]:
        return {}


class ReplicatedStrategy(UnpipelinedStrategy):
    """Data parallelism with all weights on every rank; gradients are summed once per step."""

    needs_equal_passes, loss_factor = False, 1.0

    def __init__(self, module: nn.Module, ranks: RankGroup = SINGLE_RANK) -> None:
        self.module = module
        self._ranks = ranks

    @classmethod
    def from_config(
        cls, module: nn.Module, config: ShardingConfig, ranks: RankGroup = SINGLE_RANK
    ) -> ReplicatedStrategy:
        """Apply the configured dtypes: float64 to the weights; narrower ones only to matrix products, by autocast."""
        cast_buffers(module, DTYPES_BY_NAME[config.buffer_dtype])
        return cls(module.double() if config.parameter_dtype == "float64" else module, ranks)

    def accumulate_gradients(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def reduce_gradients(self) -> None:
        self._ranks.all_reduce_gradients(self.module.parameters())

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield parameter_name(name), parameter.detach()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        load_full_weights(self.module, weights)


@torch.no_grad()
def load_full_weights(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy full tensors into the plain parameters of these names.

    Raises:
        KeyError: the module has no such parameter.
    """
    parameters = {
        parameter_name(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    for name, tensor in weights:
        parameters[name].copy_(tensor)
