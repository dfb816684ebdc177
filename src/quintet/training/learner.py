"""Learners: a model, its optimizer, and updates on packed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, PolicyLearning
from quintet.config.native import OptimizerConfig
from quintet.policies.adapters import has_lora, is_adapter, merge_stream, scales
from quintet.policies.causal_lm import Packed, PolicyModule, TokenMeasures, ValueModel, View
from quintet.records import Batch
from quintet.training.lay import Lay, Whole, own_name
from quintet.training.local_step import LocalStep
from quintet.training.offload import Offload
from quintet.training.optimizer import hidden_matrices, make_optimizer
from quintet.training.packing import Budget, MicroBatch, micro_batches
from quintet.training.ranks import Ranks
from quintet.training.scaling import LossScale
from quintet.training.update import PolicyUpdate, ValueUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ActorLearner", "CriticLearner", "Learner", "Scorer", "Viewed"]

ALONE = Ranks()


class Learner(Protocol):
    """What the loop knows of a learner, wherever its ranks run."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names."""
        ...


class Viewed(Protocol):
    """A policy from which another's divergence is measured, wherever its ranks run."""

    def view(self, packed: Packed) -> View:
        """What the measure needs of it."""
        ...

    def expect(self, passes: Sequence[Packed]) -> None:
        """Those very passes will be viewed, each once."""
        ...

    def at_hand(self) -> AbstractContextManager[None]:
        """Has its weights where they compute, for several views."""
        ...


def _precision(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype=dtype)


def _never(metrics: Mapping[str, float]) -> bool:
    return False


class _Learning:
    """Gradients added up over micro-batches and ranks, clipped, one optimizer step. A step whose gradient isn't
    finite is skipped and counted."""

    def __init__(
        self,
        lay: Lay,
        config: OptimizerConfig,
        *,
        budget: Budget,
        inference_budget: Budget | None = None,
        dtype: torch.dtype = torch.float32,
        ranks: Ranks = ALONE,
        scale: LossScale | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`budget` holds for passes with gradients, `inference_budget` for those without; the former for both
        where it is alone. `ranks` share the passes among them, and `lay` is how weights lie over them; `scale` is for
        float16. `offload` says where weights and moments are between calls."""
        self.lay = lay
        self.scale = scale
        self._offload = offload or Offload()
        self._config = config
        self._budget = budget
        self._inference_budget = inference_budget or budget
        self._dtype = dtype
        self._ranks = ranks
        self.optimizer = make_optimizer(config, lay.parameters(), hidden_matrices(lay.module))
        by_parts = LocalStep(self.optimizer) if LocalStep.suits(self.optimizer) else None
        self._make_step = by_parts or self.optimizer.step
        self._offload.watch(self.optimizer, by_parts.forget if by_parts else lambda: None)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`."""
        with self._offload.at_hand():
            yield from self.lay.weights()

    def at_hand(self) -> AbstractContextManager[None]:
        """Has weights and moments where they compute: moments that come up inside belong there."""
        return self._offload.at_hand(optimizer=True)

    def _step(
        self,
        batch: Batch,
        rate: float,
        loss_of: Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]],
        refused: Callable[[Mapping[str, float]], bool] = _never,
        decay: float | None = None,
        reference: Viewed | None = None,
    ) -> dict[str, float]:
        """One optimizer step on the whole batch, unless it is `refused` by its metrics, which are sums over
        micro-batches. `decay` is its weight decay, the configured one without. Losses may view the `reference` once a
        pass."""
        decay = self._config.weight_decay if decay is None else decay
        with self._offload.at_hand(optimizer=True), reference.at_hand() if reference else nullcontext():
            return self._stepped(batch, rate, loss_of, refused, decay, reference)

    def _stepped(
        self,
        batch: Batch,
        rate: float,
        loss_of: Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]],
        refused: Callable[[Mapping[str, float]], bool],
        decay: float,
        reference: Viewed | None,
    ) -> dict[str, float]:
        sums: dict[str, float] = {}
        factor = self.lay.factor * (self.scale.factor if self.scale else 1.0)
        dealt = list(self._ranks.deal(micro_batches(batch, self._budget), even=self.lay.even))

        def backward_from(number: int) -> Tensor:
            loss, metrics = loss_of(dealt[number].part)
            for name, value in metrics.items() if dealt[number].counts else ():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
            return loss * (factor * dealt[number].counts)

        passes = [one.part.packed for one in dealt]
        if reference is not None:
            reference.expect(passes)
        self.lay.learn(passes, backward_from)
        sums = self._ranks.sum_values(self.lay.agree(sums))
        self.lay.finish()
        if self.scale:
            self.scale.undo(self.lay.parameters())
        norm = self.lay.clip(self._config.max_grad_norm)
        finite = bool(torch.isfinite(norm))
        if self.scale:
            self.scale.update(finite=finite)
        if finite and not refused(sums):
            for group in self.optimizer.param_groups:
                group["lr"], group["weight_decay"] = rate, decay
            self._make_step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**sums, "grad_norm": float(norm), "skipped": float(not finite), "lr": rate}


@torch.no_grad()
def _measured(
    batch: Batch,
    budget: Budget,
    lay: Lay,
    ranks: Ranks,
    measure: Callable[[Packed], Tensor],
    reference: Viewed | None = None,
) -> Tensor:
    """Float32 [N]: what is measured at the own tokens, 0 elsewhere; measures may view the `reference` once a pass."""
    out = torch.zeros(len(batch.tokens))
    dealt = list(ranks.deal(micro_batches(batch, budget), even=lay.even))
    packed = [one.part.packed for one in dealt]
    if reference is not None:
        reference.expect(packed)
    for micro, found in zip(dealt, lay.measure(packed, lambda number: measure(packed[number])), strict=True):
        if micro.counts:
            out[micro.part.index] = found.float()
    return ranks.sum(out)


class Scorer:
    """A policy that says how likely it is to write what somebody wrote."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        budget: Budget,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
        ranks: Ranks = ALONE,
        lay: Lay | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`temperature` divides the logits, as while sampling; `ranks` share the passes among them, and `lay` is how
        the model's weights lie over them: whole in each where none is given. `offload` says where they are between
        calls."""
        self.model = model
        self.lay: Lay = lay or Whole(PolicyModule(model), ranks)
        self._budget = budget
        self.dtype = dtype
        self._temperature = temperature
        self._ranks = ranks
        self._views: dict[int, View] = {}
        self._offload = offload or Offload()

    def at_hand(self) -> AbstractContextManager[None]:
        """See `Viewed.at_hand`."""
        return self._offload.at_hand()

    def state(self) -> dict[str, Tensor]:
        """What it judges by, full tensors under the model's own names."""
        return dict(self.lay.weights())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave."""
        self.lay.load(state.items())

    def measures(
        self, packed: Packed, other: Viewed | None = None, *, swapped: bool = False, squared_mass: bool = False
    ) -> TokenMeasures:
        """Log-probs, entropy and the rest at each predicted place, [M], on the CPU; see `token_measures`."""
        with self.at_hand(), _precision(self.dtype, self.lay.device):
            there = packed.to(self.lay.device)
            theirs = None if other is None else other.view(packed)
            found = self.lay.module(there, self._temperature, theirs, swapped=swapped, squared_mass=squared_mass)
        return TokenMeasures(*(column.cpu() for column in found))

    @torch.no_grad()
    def view(self, packed: Packed) -> View:
        """See `Viewed.view`."""
        known = self._views.pop(id(packed), None)
        if known is not None:
            return known
        with self.at_hand():
            found: View = self.lay.module(packed.to(self.lay.device), view_only=True)
        return found

    def expect(self, passes: Sequence[Packed]) -> None:
        """See `Viewed.expect`."""
        found = self.lay.ahead(passes, lambda number: self.view(passes[number]))
        # the head is the same for all of them, so one copy does
        self._views = {id(passes[number]): View(one.hidden, found[0].head) for number, one in found.items()}

    def statistics(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy at its place, nats, both float32 [M]."""
        measures = self.measures(packed)
        return measures.logprobs, measures.entropy

    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of each own token, nats, float32 [N]; 0 outside the loss mask."""
        return self._over(batch, lambda packed: self.measures(packed).logprobs)

    def squared_mass(self, batch: Batch) -> Tensor:
        """Σ π² over the vocabulary at the place of each own token, float32 [N]; 0 outside the loss mask."""
        return self._over(batch, lambda packed: self.measures(packed, squared_mass=True).squared_mass)

    def divergence(self, batch: Batch, reference: Viewed, *, swapped: bool = False) -> Tensor:
        """KL(policy ‖ reference) over the whole vocabulary at the place of each own token, or with `swapped` the other
        way round; nats, float32 [N], 0 outside the loss mask."""
        return self._over(batch, lambda packed: self.measures(packed, reference, swapped=swapped).divergence, reference)

    def _over(self, batch: Batch, measure: Callable[[Packed], Tensor], reference: Viewed | None = None) -> Tensor:
        with self.at_hand(), reference.at_hand() if reference else nullcontext():
            return _measured(batch, self._budget, self.lay, self._ranks, measure, reference)


class ActorLearner(_Learning):
    """Trains the policy."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: OptimizerConfig,
        *,
        budget: Budget,
        inference_budget: Budget | None = None,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
        ranks: Ranks = ALONE,
        lay: Lay | None = None,
        scale: LossScale | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`temperature` divides the logits, as while sampling; `lay` is how the model's weights lie over the `ranks`:
        whole in each where none is given. Losses are multiplied by `scale` where there is one; `offload` says where
        weights and moments are between calls."""
        lay = lay or Whole(PolicyModule(model), ranks)
        super().__init__(
            lay,
            config,
            budget=budget,
            inference_budget=inference_budget,
            dtype=dtype,
            ranks=ranks,
            scale=scale,
            offload=offload,
        )
        self.model = model
        self._scales = {own_name(name): scale for name, scale in scales(model).items()} if has_lora(model) else {}
        self.scorer = Scorer(
            model,
            budget=self._inference_budget,
            dtype=dtype,
            temperature=temperature,
            ranks=ranks,
            lay=lay,
            offload=self._offload,
        )

    def under(self, config: OptimizerConfig) -> ActorLearner:
        """The same policy under a fresh optimizer, scored as it is, whatever temperature play has."""
        return ActorLearner(
            self.model,
            config,
            budget=self._budget,
            inference_budget=self._inference_budget,
            dtype=self._dtype,
            ranks=self._ranks,
            lay=self.lay,
            scale=self.scale,
            offload=self._offload,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`; with adapters in them."""
        return merge_stream(super().weights(), self._scales) if self._scales else super().weights()

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters by themselves, full tensors under the model's own names; none where all weights are trained."""
        return ((name, tensor) for name, tensor in super().weights() if is_adapter(name))

    def update(
        self,
        batch: Batch,
        objective: PolicyLearning,
        aggregation: Aggregation | str,
        rate: float,
        *,
        reference: Viewed | None = None,
        seed: int = 0,
        decay: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch, with the configured weight decay where no `decay` is given.

        `reference` is needed for a `full` divergence in the loss; `seed` decides what `clip_cov` draws. Besides the
        objective's own metrics gives `grad_norm`, `lr`, `skipped` and the gap between the engine's and the
        learner's probabilities (`probs_diff_max`, `probs_diff_mean`), which is rounding alone as long as no step was
        made since the tokens were sampled. Where the objective has a `stop_ratio`, `actor/stopped_updates` is 1 if
        the update wasn't made because of it.

        Raises:
            ValueError: the divergence is to be `full` and there is no reference.
        """
        update = PolicyUpdate(
            batch,
            objective,
            aggregation,
            micro_batches(batch, self._budget),
            logprobs=self.scorer.logprobs,
            dtype=self.scorer.dtype,
            referred=reference is not None,
            seed=seed,
        )
        full = update.full

        def loss_of(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            packed, scorer = micro.packed, self.scorer
            measures = scorer.measures(packed, reference, swapped=full.swapped) if full else scorer.measures(packed)
            return update.loss(micro, measures)

        metrics = self._step(batch, rate, loss_of, update.stops, decay, reference if full else None)
        return update.told(metrics, self._ranks.largest(self.lay.agree(update.largest_gap)))


class CriticLearner(_Learning):
    """Trains the critic."""

    def __init__(
        self,
        model: ValueModel,
        config: OptimizerConfig,
        *,
        budget: Budget,
        inference_budget: Budget | None = None,
        dtype: torch.dtype = torch.float32,
        ranks: Ranks = ALONE,
        lay: Lay | None = None,
        scale: LossScale | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`lay` is how the model's weights lie over the `ranks`: whole in each where none is given. Losses are
        multiplied by `scale` where there is one; `offload` says where weights and moments are between calls."""
        lay = lay or Whole(model, ranks)
        super().__init__(
            lay,
            config,
            budget=budget,
            inference_budget=inference_budget,
            dtype=dtype,
            ranks=ranks,
            scale=scale,
            offload=offload,
        )
        self.model = model

    def values(self, batch: Batch) -> Tensor:
        """The estimate before each own token, float32 [N]; 0 elsewhere."""
        with self._offload.at_hand():
            return _measured(batch, self._inference_budget, self.lay, self._ranks, self._values)

    def _values(self, packed: Packed) -> Tensor:
        there = packed.to(self.lay.device)
        with _precision(self._dtype, there.tokens.device):
            values: Tensor = self.lay.module(there).float().cpu()
        return values

    def update(
        self,
        batch: Batch,
        objective: CriticObjective,
        aggregation: Aggregation | str,
        rate: float,
        mask: Tensor | None = None,
        *,
        decay: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch that has `values` and `returns`; `mask` bool [N] are the own tokens whose
        values are learnt, None all of them; `decay` as for the actor.

        Raises:
            ValueError: the batch has no values or no returns.
        """
        update = ValueUpdate(batch, objective, aggregation, lambda own: micro_batches(own, self._budget), mask)

        def loss_of(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return update.loss(micro, self._values(micro.packed))

        return self._step(update.batch, rate, loss_of, decay=decay)
