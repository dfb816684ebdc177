"""Modules of the policy and the critic: one forward pass over packed tokens, head included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Unpack

from torch import Tensor, nn

from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.lora import merged_head_weight
from quintet.policies.output_head import head_logits
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.parallel.token_sharding import TokenSharding
from quintet.policies.token_statistics import (
    LazyLogits,
    StatisticsFn,
    StatisticsOptions,
    TokenStatistics,
    compute_lazy_logits,
    compute_token_statistics,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PolicyModule(nn.Module):
    """A policy whose forward pass includes the head and the token statistics.

    FSDP gathers weights around a forward pass; with the head inside, that includes weights tied to the embedding.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.policy = policy
        self.head_persists = True
        """Whether the head's weights stay in memory after the pass; else `LazyLogits` get a copy of them."""
        self.token_sharding: TokenSharding | None = None
        """Distribution of a pass's tokens over ranks; None if each rank computes its own passes."""
        self.activation_context: Callable[[], AbstractContextManager[object]] = nullcontext
        """Context of the forward pass, for example to offload the activations saved for the backward pass."""
        self.statistics_fn: StatisticsFn | None = None
        """Replaces the computation of statistics from logits, see `compute_token_statistics`."""

    def forward(
        self,
        packed: PackedBatch,
        temperature: float = 1.0,
        other: LazyLogits | None = None,
        *,
        return_lazy_logits: bool = False,
        **options: Unpack[StatisticsOptions],
    ) -> TokenStatistics | LazyLogits:
        """Return the token statistics (see `compute_token_statistics`), or with `return_lazy_logits` the `LazyLogits`
        that a divergence needs."""
        shard = self.token_sharding.shard(packed) if self.token_sharding else None
        local = shard.packed if shard else packed
        if return_lazy_logits:
            return self._compute_lazy_logits(local)
        with self.activation_context():
            options["statistics_fn"] = self.statistics_fn
            statistics = compute_token_statistics(self.policy, local, temperature, other, **options)
        return shard.gather_statistics(statistics) if shard else statistics

    def _compute_lazy_logits(self, packed: PackedBatch) -> LazyLogits:
        logits = compute_lazy_logits(self.policy, packed)
        if self.head_persists:
            return logits
        weight = merged_head_weight(self.policy.lm_head)
        return LazyLogits(logits.hidden_states, partial(head_logits, self.policy.lm_head, weight))


class ValueModel(nn.Module):
    """A critic: a decoder's body and a linear head that estimates the value before each predicted token."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.body = copy.deepcopy(policy.model)
        self.head = nn.Linear(policy.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.token_sharding: TokenSharding | None = None
        """Distribution of a pass's tokens over ranks; None if each rank computes its own passes."""
        self.activation_context: Callable[[], AbstractContextManager[object]] = nullcontext
        """Context of the forward pass, for example to offload the activations saved for the backward pass."""

    def forward(self, packed: PackedBatch) -> Tensor:
        """Return values [M] in units of reward."""
        shard = self.token_sharding.shard(packed) if self.token_sharding else None
        local = shard.packed if shard else packed
        with self.activation_context():
            hidden_states = compute_hidden_states(
                self.body, local.tokens, local.position_ids, local.layout, local.images
            )
        values = self.head(hidden_states.index_select(0, local.prediction_indices)).squeeze(-1).float().clone()
        return shard.gather(values) if shard else values
