"""Learners of policy and critic: a model, its optimizer, and updates on packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from quintet import trace
from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, PolicyObjectiveFn
from quintet.config.native.learners import OptimizerConfig
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.lora import is_adapter_name
from quintet.policies.packed_batch import PackedBatch
from quintet.records import Batch
from quintet.training.learner_setup import LearnerSetup
from quintet.training.offload import Offload
from quintet.training.optim.optimizer import DTensorStep, build_optimizer, hidden_matrices
from quintet.training.packing import MicroBatch, iter_micro_batches
from quintet.training.parallel.process_group import Assignment
from quintet.training.parallel.strategy import ParallelStrategy, ReplicatedStrategy
from quintet.training.policy_update import PolicyUpdate, ValueUpdate
from quintet.training.protocols import DivergenceReference
from quintet.training.scorer import PolicyScorer, autocast, forward_only

if TYPE_CHECKING:
    from transformers import PreTrainedModel

M = TypeVar("M")
"""Micro-batch."""


class GradientLearner:
    """Base of learners: gradients accumulate over micro-batches and ranks, are clipped, and one optimizer step follows.
    A step with a gradient that is not finite, or above `skip_above_grad_norm`, is skipped and counted."""

    def __init__(self, strategy: ParallelStrategy, config: OptimizerConfig, setup: LearnerSetup) -> None:
        self.strategy = strategy
        self.loss_scale = setup.loss_scale
        self.setup = replace(setup, strategy=strategy, offload=setup.offload or Offload())
        self._offload = self.setup.offload or Offload()
        self._config = config
        self._ranks = setup.ranks
        self.optimizer = build_optimizer(config, strategy.parameters(), hidden_matrices(strategy.module))
        sharded_step = DTensorStep(self.optimizer) if DTensorStep.supports(self.optimizer) else None
        self._optimizer_step = sharded_step or self.optimizer.step
        self._offload.register_optimizer(self.optimizer, sharded_step.clear_cache if sharded_step else lambda: None)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        with self._offload.on_device():
            yield from self.strategy.full_weights()

    def on_device(self) -> AbstractContextManager[None]:
        """Keep weights and optimizer state on the device while inside; state that is created inside belongs there."""
        return self._offload.on_device(optimizer=True)

    def loss_scale_state(self) -> dict[str, float]:
        return self.loss_scale.state_dict() if self.loss_scale else {}

    def load_loss_scale_state(self, state: Mapping[str, float]) -> None:
        if self.loss_scale and "factor" in state:
            self.loss_scale.load_state_dict(state)

    def _update(
        self,
        assigned: Sequence[Assignment[M]],
        learning_rate: float,
        compute_loss: Callable[[M], tuple[Tensor, dict[str, Tensor]]],
        should_skip: Callable[[Mapping[str, float]], bool] = lambda _: False,
        weight_decay: float | None = None,
        reference: DivergenceReference | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step on the micro-batches of all ranks, of which `assigned` are this one's, and return its
        metrics, sums over micro-batches. The step is not made if `should_skip(metrics)`. Losses may call
        `reference.lazy_logits` once per pass."""
        with self._offload.on_device(optimizer=True), reference.on_device() if reference else nullcontext():
            sums = self._accumulate_gradients(assigned, compute_loss, reference)
            if self.loss_scale:
                self.loss_scale.unscale(self.strategy.parameters())
            grad_norm = self.strategy.clip_grad_norm(self._config.max_grad_norm)
            is_finite = bool(torch.isfinite(grad_norm))
            is_usable = is_finite and float(grad_norm) <= (self._config.skip_above_grad_norm or math.inf)
            if self.loss_scale:
                self.loss_scale.update(finite=is_finite)
            if is_usable and not should_skip(sums):
                decay = self._config.weight_decay if weight_decay is None else weight_decay
                self._set_rates(learning_rate, decay)
                with trace.span("optimizer_step"):
                    self._optimizer_step()
            self.optimizer.zero_grad(set_to_none=True)
        return {**sums, "grad_norm": float(grad_norm), "skipped": float(not is_usable), "lr": learning_rate}

    def _assign_micro_batches(self, batch: Batch) -> list[Assignment[MicroBatch]]:
        """Return this rank's micro-batches of a batch that all ranks have."""
        micro_batches = iter_micro_batches(batch, self.setup.budget)
        return list(self._ranks.assign(micro_batches, even=self.strategy.needs_equal_passes))

    def _set_rates(self, learning_rate: float, weight_decay: float) -> None:
        """Set learning rate and weight decay of the next optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = learning_rate, weight_decay

    def _accumulate_gradients(
        self,
        assigned: Sequence[Assignment[M]],
        compute_loss: Callable[[M], tuple[Tensor, dict[str, Tensor]]],
        reference: DivergenceReference | None,
    ) -> dict[str, float]:
        """Run forward and backward over the micro-batches of all ranks and return the metrics, summed over them."""
        sums: dict[str, float] = {}
        factor = self.strategy.loss_factor * (self.loss_scale.factor if self.loss_scale else 1.0)

        def scaled_loss(index: int) -> Tensor:
            assignment = assigned[index]
            loss, metrics = compute_loss(assignment.item)
            for name, value in metrics.items() if assignment.is_counted else ():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
            return loss * (factor * assignment.is_counted)

        passes: list[Any] = [getattr(assignment.item, "packed", assignment.item) for assignment in assigned]
        if reference is not None:
            reference.precompute_lazy_logits(passes)
        with trace.span("forward_backward", passes=len(passes)):
            self.strategy.forward_backward(passes, scaled_loss)
        totals = self._ranks.all_reduce_dict(self.strategy.broadcast_from_last_stage(sums))
        self.strategy.reduce_gradients()
        return totals


class ActorLearner(GradientLearner):
    """Learner of the policy."""

    def __init__(self, model: PreTrainedModel, config: OptimizerConfig, setup: LearnerSetup) -> None:
        super().__init__(setup.strategy or ReplicatedStrategy(PolicyModule(model), setup.ranks), config, setup)
        self.model = model
        self.scorer = PolicyScorer(model, self.setup)

    def with_optimizer(self, config: OptimizerConfig) -> ActorLearner:
        """Return a learner of the same policy with a fresh optimizer, which scores at temperature 1."""
        return ActorLearner(self.model, config, replace(self.setup, temperature=1.0))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`; adapters are merged."""
        return self.scorer.weights()

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters, full tensors under the model's parameter names; none if all weights are trained."""
        return ((name, tensor) for name, tensor in super().weights() if is_adapter_name(name))

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights but the adapters, full tensors under the model's parameter names."""
        return ((name, tensor) for name, tensor in super().weights() if not is_adapter_name(name))

    def adapter_scales(self) -> dict[str, float]:
        """Return the scale of B A by the name of the adapted layer."""
        return self.scorer.adapter_scales()

    def update(
        self,
        batch: Batch,
        objective: PolicyObjectiveFn,
        aggregation: Aggregation | str,
        learning_rate: float,
        *,
        reference: DivergenceReference | None = None,
        seed: int = 0,
        weight_decay: float | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step on a mini-batch, by default with the configured weight decay.

        `reference` is needed for a `full` divergence in the loss, and for distillation; `seed` seeds the random choice
        of `clip_cov`. Returns the objective's metrics, `grad_norm`, `lr`, `skipped` and the gap between the engine's
        and the learner's probabilities (`probs_diff_max`, `probs_diff_mean`), which is rounding error as long as no
        step was made since the tokens were sampled. If the objective has a `stop_ratio`, `actor/stopped_updates` is 1
        for an update that was skipped because of it.

        Raises:
            ValueError: there is no reference for the divergence.
        """
        update = PolicyUpdate(
            batch,
            objective,
            aggregation,
            iter_micro_batches(batch, self.setup.budget),
            compute_log_probs=self.scorer.compute_log_probs,
            dtype=self.scorer.dtype,
            has_reference=reference is not None,
            seed=seed,
        )
        divergence = update.divergence_arguments

        def compute_loss(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            scorer = self.scorer
            if divergence is not None:
                return update.loss(micro, scorer.token_statistics(micro.packed, reference, **divergence))
            return update.loss(micro, scorer.token_statistics(micro.packed))

        metrics = self._update(
            self._assign_micro_batches(batch),
            learning_rate,
            compute_loss,
            update.should_skip_step,
            weight_decay,
            None if divergence is None else reference,
        )
        largest_gap = self._ranks.all_reduce_max(self.strategy.broadcast_from_last_stage(update.largest_gap))
        return update.final_metrics(metrics, largest_gap)


class CriticLearner(GradientLearner):
    """Learner of the critic."""

    def __init__(self, model: ValueModel, config: OptimizerConfig, setup: LearnerSetup) -> None:
        super().__init__(setup.strategy or ReplicatedStrategy(model, setup.ranks), config, setup)
        self.model = model

    def compute_values(self, batch: Batch) -> Tensor:
        """Return the value before each response token, float32 [N]; 0 elsewhere."""
        with self._offload.on_device():
            return forward_only(batch, self.setup.forward_budget, self.strategy, self._ranks, self._values)

    def _values(self, packed: PackedBatch) -> Tensor:
        inputs = packed.to(self.strategy.device)
        with autocast(self.setup.dtype, inputs.tokens.device):
            values: Tensor = self.strategy.module(inputs).float().cpu()
        return values

    def update(
        self,
        batch: Batch,
        objective: CriticObjective,
        aggregation: Aggregation | str,
        learning_rate: float,
        mask: Tensor | None = None,
        *,
        weight_decay: float | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step on a mini-batch with `values` and `returns`, by default with the configured weight
        decay. `mask`, bool [N], selects the response tokens to train on (default: all).

        Raises:
            ValueError: the batch has no values or no returns.
        """
        update = ValueUpdate(
            batch, objective, aggregation, lambda part: iter_micro_batches(part, self.setup.budget), mask
        )

        def compute_loss(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return update.loss(micro, self._values(micro.packed))

        assigned = self._assign_micro_batches(update.batch)
        return self._update(assigned, learning_rate, compute_loss, weight_decay=weight_decay)
