"""Learners: a model, its optimizer, and updates on packed batches, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from quintet.algorithms.aggregation import token_weights
from quintet.algorithms.objective import CriticObjective, PolicyLearning, PolicyTargets, ValueTargets
from quintet.config.native import OptimizerConfig
from quintet.policies.causal_lm import Packed, ValueModel, token_statistics
from quintet.records import Batch
from quintet.training.optimizer import make_optimizer
from quintet.training.packing import Budget, MicroBatch, micro_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ActorLearner", "CriticLearner", "Learner", "Scorer"]


class Learner(Protocol):
    """What the loop knows of a learner, wherever its ranks run."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors."""
        ...

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""
        ...


def _precision(dtype: torch.dtype) -> AbstractContextManager[object]:
    return nullcontext() if dtype is torch.float32 else torch.autocast("cpu", dtype=dtype)


class _Plain:
    """Gradients added up over micro-batches, clipped, one AdamW step. A step whose gradient isn't
    finite is skipped and counted."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        *,
        budget: Budget,
        inference_budget: Budget | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`budget` holds for passes with gradients, `inference_budget` for those without; the former for both
        where it is alone."""
        self.model = model
        self._config = config
        self._budget = budget
        self._inference_budget = inference_budget or budget
        self._dtype = dtype
        self.optimizer = make_optimizer(config, model.parameters())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def state(self) -> dict[str, Tensor]:
        """See `Learner.state`; keys are `<parameter>.<field>`."""
        return {
            f"{name}.{field}": value
            for name, parameter in self.model.named_parameters()
            for field, value in self.optimizer.state[parameter].items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """See `Learner.load_state`."""
        for name, parameter in self.model.named_parameters():
            fields = {
                key.removeprefix(f"{name}."): value for key, value in state.items() if key.rpartition(".")[0] == name
            }
            if fields:
                self.optimizer.state[parameter] = {key: value.clone() for key, value in fields.items()}

    def _step(
        self, batch: Batch, rate: float, loss_of: Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
    ) -> dict[str, float]:
        """One optimizer step on the whole batch; metrics are sums over micro-batches."""
        sums: dict[str, float] = {}
        for micro in micro_batches(batch, self._budget):
            loss, metrics = loss_of(micro)
            torch.autograd.backward(loss)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        finite = bool(torch.isfinite(norm))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**sums, "grad_norm": float(norm), "skipped": float(not finite), "lr": rate}


class Scorer:
    """A policy that says how likely it is to write what somebody wrote."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        budget: Budget,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
    ) -> None:
        """`temperature` divides the logits, as while sampling."""
        self.model = model
        self._budget = budget
        self._dtype = dtype
        self._temperature = temperature

    def frozen(self, budget: Budget) -> Scorer:
        """The policy as it is now, which stays as it is."""
        model = copy.deepcopy(self.model).requires_grad_(requires_grad=False)
        return Scorer(model, budget=budget, dtype=self._dtype, temperature=self._temperature)

    def statistics(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy at its place, nats, both float32 [M]."""
        with _precision(self._dtype):
            return token_statistics(self.model, packed, self._temperature)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of each own token, nats, float32 [N]; 0 outside the loss mask."""
        out = torch.zeros(len(batch.tokens))
        for micro in micro_batches(batch, self._budget):
            out[micro.index], _ = self.statistics(micro.packed)
        return out


class ActorLearner(_Plain):
    """Trains the policy."""

    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        config: OptimizerConfig,
        *,
        budget: Budget,
        inference_budget: Budget | None = None,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
    ) -> None:
        """`temperature` divides the logits, as while sampling."""
        super().__init__(model, config, budget=budget, inference_budget=inference_budget, dtype=dtype)
        self.scorer = Scorer(model, budget=self._inference_budget, dtype=dtype, temperature=temperature)

    def update(self, batch: Batch, objective: PolicyLearning, aggregation: str, rate: float) -> dict[str, float]:
        """One optimizer step on a mini-batch.

        Besides the objective's own metrics gives `grad_norm`, `lr`, `skipped` and the gap between the
        engine's and the learner's probabilities (`probs_diff_max`, `probs_diff_mean`), which is
        rounding alone as long as no step was made since the tokens were sampled.
        """
        weights = token_weights(aggregation, batch.loss_mask, batch.token_trajectory)
        advantages = torch.zeros_like(batch.logprobs) if batch.advantages is None else batch.advantages
        gaps: list[Tensor] = []

        def loss_of(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, entropy = self.scorer.statistics(micro.packed)
            i = micro.index
            gaps.append((logprobs.detach().exp() - batch.logprobs[i].exp()).abs())
            reference = None if batch.ref_logprobs is None else batch.ref_logprobs[i]
            return objective(logprobs, entropy, PolicyTargets(weights[i], batch.logprobs[i], advantages[i], reference))

        metrics = self._step(batch, rate, loss_of)
        gap = torch.cat(gaps)
        return {**metrics, "probs_diff_max": float(gap.max()), "probs_diff_mean": float(gap.mean())}


class CriticLearner(_Plain):
    """Trains the critic."""

    model: ValueModel

    def values(self, batch: Batch) -> Tensor:
        """The estimate before each own token, float32 [N]; 0 elsewhere."""
        out = torch.zeros(len(batch.tokens))
        with torch.no_grad(), _precision(self._dtype):
            for micro in micro_batches(batch, self._inference_budget):
                out[micro.index] = self.model(micro.packed).float()
        return out

    def update(self, batch: Batch, objective: CriticObjective, aggregation: str, rate: float) -> dict[str, float]:
        """One optimizer step on a mini-batch that has `values` and `returns`."""
        if batch.values is None or batch.returns is None:
            raise ValueError("the critic learns from a batch with values and returns")
        weights = token_weights(aggregation, batch.loss_mask, batch.token_trajectory)
        old, returns = batch.values, batch.returns

        def loss_of(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            i = micro.index
            with _precision(self._dtype):
                values = self.model(micro.packed).float()
            return objective(values, ValueTargets(weights[i], old[i], returns[i]))

        return self._step(batch, rate, loss_of)
