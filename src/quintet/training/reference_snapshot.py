"""The reference policy while only adapters are trained: shared base weights and a snapshot of the adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn

from quintet.policies.lora import has_adapters, is_adapter_name, merged_head_weight
from quintet.policies.output_head import head_logits
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.token_statistics import LazyLogits, StatisticsOptions, TokenStatistics
from quintet.training.offload import reshard
from quintet.training.packing import MicroBatchBudget
from quintet.training.protocols import DivergenceReference
from quintet.training.scorer import PolicyScorer


class ReferenceSnapshot(PolicyScorer):
    """A policy with the learner's own base weights and a snapshot of its adapters, which replace the trained ones
    during a forward pass."""

    def __init__(self, policy: PolicyScorer, budget: MicroBatchBudget) -> None:
        """Take a snapshot of the current policy."""
        super().__init__(
            policy.model,
            replace(
                policy.setup, budget=budget, inference_budget=None, strategy=policy.strategy, offload=policy.offload
            ),
        )
        # the modules of FSDP1 have no parameters while they are gathered
        reshard(policy.strategy.module)
        self._trained = [parameter for parameter in policy.strategy.parameters() if parameter.requires_grad]
        self._snapshot = _copies(self._trained)

    def token_statistics(
        self,
        packed: PackedBatch,
        other: DivergenceReference | None = None,
        **options: Unpack[StatisticsOptions],
    ) -> TokenStatistics:
        """See `PolicyScorer.token_statistics`; without gradients."""
        with self.on_device(), torch.no_grad(), self._swapped_in():
            return super().token_statistics(packed, other, **options)

    def lazy_logits(self, packed: PackedBatch) -> LazyLogits:
        """See `PolicyScorer.lazy_logits`; a head with adapters is copied."""
        with self.on_device(), self._swapped_in():
            logits = super().lazy_logits(packed)
            head = self.model.lm_head
            if has_adapters(head):
                return LazyLogits(logits.hidden_states, partial(head_logits, head, merged_head_weight(head)))
            return logits

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `PolicyScorer.weights`; with the adapters of the snapshot."""
        with self.on_device(), self._swapped_in():
            yield from super().weights()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the adapters."""
        with self.on_device(), self._swapped_in():
            return {name: tensor.clone() for name, tensor in self.strategy.full_weights() if is_adapter_name(name)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        with self.on_device(), self._swapped_in():
            super().load_state_dict(state)
            self._snapshot = _copies(self._trained)

    @contextmanager
    def _swapped_in(self) -> Iterator[None]:
        """Replace the trained adapters inside. FSDP keeps the gathered weights of some units after a forward pass,
        which changes of the shards would not reach."""
        current = _copies(self._trained)
        reshard(self.strategy.module)
        _copy_into(self._trained, self._snapshot)
        try:
            yield
        finally:
            reshard(self.strategy.module)
            _copy_into(self._trained, current)


def _copies(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def _copy_into(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
