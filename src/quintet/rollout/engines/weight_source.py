"""Where engines get the policy's weights from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


class WeightSource(Protocol):
    """Source of the policy's weights for engines. Each load reads the weights anew; a single engine reads at a time."""

    @property
    def module(self) -> nn.Module | None:
        """The learner's module if this process has all its weights: an engine that computes with it copies none."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return full tensors under Hugging Face names, to be iterated once."""

    def finish(self) -> None:
        """End a load that may not have read all tensors: other ranks wait until each tensor is gathered."""


class ModuleWeights:
    """See `WeightSource`: the weights of a module of this process."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.module.named_parameters()

    def finish(self) -> None:
        """See `WeightSource.finish`: nothing is gathered."""


class TensorWeights:
    """See `WeightSource`: tensors that this process has received or gathers; an iterator serves one load only."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], module: nn.Module | None = None) -> None:
        """The caller iterates what an engine does not read if other ranks wait for it. `module` is the learner's if it
        has the same weights."""
        self.module = module
        self._tensors = tensors

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self._tensors

    def finish(self) -> None:
        """See `WeightSource.finish`: the caller does that."""
