"""Pipeline parallelism combined with another strategy for the weights within each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quintet.policies.packed_batch import PackedBatch
from quintet.policies.parallel.pipeline_stages import EMBEDDING_NAME, HEAD_NAME
from quintet.training.optim.grad_norm import GradNormGroup
from quintet.training.parallel.pipeline import Pipeline
from quintet.training.parallel.strategy import ParallelStrategy, parameter_name

T = TypeVar("T")


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
