"""Log-probs, entropy and divergence of a policy, without gradients over whole batches or with them for one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from quintet.policies.causal_lm import PolicyModule
from quintet.policies.lora import adapter_scales, has_lora, merge_adapter_stream
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.token_statistics import LazyLogits, StatisticsOptions, TokenStatistics
from quintet.records import Batch
from quintet.training.learner_setup import LearnerSetup
from quintet.training.offload import Offload
from quintet.training.packing import MicroBatchBudget, iter_micro_batches
from quintet.training.parallel.process_group import RankGroup
from quintet.training.parallel.strategy import ParallelStrategy, ReplicatedStrategy, parameter_name
from quintet.training.protocols import DivergenceReference

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context of a dtype; float32 needs none."""
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype=dtype)


@torch.no_grad()
def forward_only(
    batch: Batch,
    budget: MicroBatchBudget,
    strategy: ParallelStrategy,
    ranks: RankGroup,
    compute: Callable[[PackedBatch], Tensor],
    reference: DivergenceReference | None = None,
) -> Tensor:
    """Return `compute` of all micro-batches at their response tokens, float32 [N], 0 elsewhere. `compute` may call
    `reference.lazy_logits` once per pass."""
    out = torch.zeros(len(batch.tokens))
    assigned = list(ranks.assign(iter_micro_batches(batch, budget), even=strategy.needs_equal_passes))
    passes = [assignment.item.packed for assignment in assigned]
    if reference is not None:
        reference.precompute_lazy_logits(passes)
    results = strategy.forward(passes, lambda index: compute(passes[index]))
    for assignment, result in zip(assigned, results, strict=True):
        if assignment.is_counted:
            out[assignment.item.index] = result.float()
    return ranks.all_reduce(out)


class PolicyScorer:
    """A policy that computes log-probs of given responses."""

    def __init__(self, model: PreTrainedModel, setup: LearnerSetup) -> None:
        self.model = model
        self.setup = setup
        self.strategy: ParallelStrategy = setup.strategy or ReplicatedStrategy(PolicyModule(model), setup.ranks)
        self.dtype = setup.dtype
        self.offload = setup.offload or Offload()
        self._lazy_logits: dict[int, LazyLogits] = {}

    def on_device(self) -> AbstractContextManager[None]:
        return self.offload.on_device()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names; adapters are merged."""
        scales = self.adapter_scales()
        with self.on_device():
            full = self.strategy.full_weights()
            yield from merge_adapter_stream(full, scales) if scales else full

    def adapter_scales(self) -> dict[str, float]:
        """Return the scale of B A by the name of the adapted layer; empty without adapters."""
        scales = adapter_scales(self.model) if has_lora(self.model) else {}
        return {parameter_name(name): scale for name, scale in scales.items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load full tensors under Hugging Face names."""
        with self.on_device():
            self.strategy.load_weights(weights.items())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full weights under the model's parameter names."""
        return dict(self.strategy.full_weights())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`."""
        self.strategy.load_weights(state.items())

    def token_statistics(
        self,
        packed: PackedBatch,
        other: DivergenceReference | None = None,
        **options: Unpack[StatisticsOptions],
    ) -> TokenStatistics:
        """Return log-probs, entropy and more at each predicted position, [M], on the CPU; see
        `compute_token_statistics`."""
        with self.on_device(), autocast(self.dtype, self.strategy.device):
            inputs = packed.to(self.strategy.device)
            logits = None if other is None else other.lazy_logits(packed)
            statistics = self.strategy.module(inputs, self.setup.temperature, logits, **options)
        return TokenStatistics(*(column.cpu() for column in statistics))

    @torch.no_grad()
    def lazy_logits(self, packed: PackedBatch) -> LazyLogits:
        precomputed = self._lazy_logits.pop(id(packed), None)
        if precomputed is not None:
            return precomputed
        with self.on_device():
            logits: LazyLogits = self.strategy.module(packed.to(self.strategy.device), return_lazy_logits=True)
        return logits

    def precompute_lazy_logits(self, passes: Sequence[PackedBatch]) -> None:
        logits = self.strategy.precompute(passes, lambda index: self.lazy_logits(passes[index]))
        # all passes have the same head: keep one copy of it
        self._lazy_logits = {
            id(passes[index]): LazyLogits(result.hidden_states, logits[0].head) for index, result in logits.items()
        }

    def compute_log_probs(self, batch: Batch) -> Tensor:
        """Return the log-prob of each response token, nats, float32 [N]; 0 outside the loss mask."""
        return self._forward_only(batch, lambda packed: self.token_statistics(packed).logprobs)

    def compute_entropies(self, batch: Batch) -> Tensor:
        """Return the entropy of the policy at each response token; nats, float32 [N], 0 outside the loss mask."""
        return self._forward_only(batch, lambda packed: self.token_statistics(packed).entropy)

    def compute_sum_squared_probs(self, batch: Batch) -> Tensor:
        """Return Σ π² over the vocabulary at each response token, float32 [N]; 0 outside the loss mask."""
        return self._forward_only(
            batch, lambda packed: self.token_statistics(packed, with_sum_squared_probs=True).sum_squared_probs
        )

    def compute_divergence(self, batch: Batch, reference: DivergenceReference, *, swapped: bool = False) -> Tensor:
        """Return KL(policy ‖ reference), or KL(reference ‖ policy) if `swapped`, over the whole vocabulary at each
        response token; nats, float32 [N], 0 outside the loss mask."""
        return self._forward_only(
            batch, lambda packed: self.token_statistics(packed, reference, swapped=swapped).divergence, reference
        )

    def _forward_only(
        self, batch: Batch, compute: Callable[[PackedBatch], Tensor], reference: DivergenceReference | None = None
    ) -> Tensor:
        with self.on_device(), reference.on_device() if reference else nullcontext():
            return forward_only(batch, self.setup.forward_budget, self.strategy, self.setup.ranks, compute, reference)
