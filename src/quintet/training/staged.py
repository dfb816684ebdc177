"""Learners whose layers lie in stages of a pipeline, and whose weights are laid out as others' are within each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quintet.policies.causal_lm import Packed
from quintet.policies.stages import EMBEDDING, HEAD
from quintet.training.lay import Lay, own_name
from quintet.training.norms import NormPart
from quintet.training.pipeline import Pipeline

__all__ = ["Staged"]

T = TypeVar("T")


class Staged:
    """A `Lay` of the parts held here, and a pipeline through all of them."""

    even = True

    def __init__(self, stage: Lay, pipeline: Pipeline, parts: Callable[[], Sequence[NormPart]]) -> None:
        """`stage` is how the parts' weights lie over the data ranks, and `parts` what its gradients' norm is of."""
        self.module: Any = stage.module
        self.factor = stage.factor
        self._stage = stage
        self._pipeline = pipeline
        self._parts = parts

    @property
    def device(self) -> torch.device:
        """See `Lay.device`."""
        return self._stage.device

    def parameters(self) -> list[nn.Parameter]:
        """See `Lay.parameters`."""
        return self._stage.parameters()

    def accumulate(self, *, last: bool) -> AbstractContextManager[object]:
        """See `Lay.accumulate`."""
        return self._stage.accumulate(last=last)

    def finish(self) -> None:
        """See `Lay.finish`."""
        self._stage.finish()

    def clip(self, max_norm: float) -> Tensor:
        """See `Lay.clip`."""
        return self._pipeline.clip(max_norm, self._parts())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Lay.weights`: one stage's after the other's."""
        copied = self._pipeline.has_copy
        return self._pipeline.stream(one for one in self._stage.weights() if not (copied and one[0] == own_name(HEAD)))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Lay.load`."""
        self._stage.load(self._with_head(weights))

    def _with_head(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            yield name, tensor
            if self._pipeline.has_copy and name == own_name(EMBEDDING):
                yield own_name(HEAD), tensor

    def learn(self, passes: Sequence[Packed], loss_of: Callable[[int], Tensor]) -> None:
        """See `Lay.learn`."""
        self._pipeline.run(passes, loss_of, lambda last: self.accumulate(last=last))

    def measure(self, passes: Sequence[Packed], measure: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """See `Lay.measure`."""
        return iter(self._pipeline.measure(passes, measure))

    def agree(self, value: T) -> T:
        """See `Lay.agree`."""
        said: T = self._pipeline.ranks.gather(value)[-1]
        return said

    def ahead(self, passes: Sequence[Packed], compute: Callable[[int], T]) -> dict[int, T]:
        """See `Lay.ahead`."""
        return self._pipeline.ahead(passes, compute)
