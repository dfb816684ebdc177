"""Learners on Megatron Core: its model, gradient buffers and optimizer behind the interface of the plain ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from safetensors.torch import save_file
from torch import Tensor, nn

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, PolicyLearning
from quintet.config.native import OptimizerConfig
from quintet.policies.file_names import in_files
from quintet.records import Batch
from quintet.training.megatron.moments import Moments, chained, clip
from quintet.training.megatron.options import ddp_config, optimizer_config
from quintet.training.megatron.package import at_home
from quintet.training.megatron.passes import Model
from quintet.training.megatron.weights import Directory, numbered_parameters, own_part, put_weights
from quintet.training.packing import Budget, MicroBatch, micro_batches
from quintet.training.update import PolicyUpdate, ValueUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MegatronActor", "MegatronCritic", "MegatronScorer"]

ADAM = ("exp_avg", "exp_avg_sq")


def _never(metrics: Mapping[str, float]) -> bool:
    return False


class _Trained:
    """A model with Megatron's gradient buffers and optimizer."""

    lay = None
    """None of torch's: Megatron lays the weights itself."""

    def __init__(
        self, model: Model, config: OptimizerConfig, *, budget: Budget, inference_budget: Budget | None = None
    ) -> None:
        self._model = model
        self._config = config
        self._budget = budget
        self._inference_budget = inference_budget or budget
        self._place = model.plan.place
        self._steps = 0
        options, dtype = model.plan.options, model.plan.dtype
        with at_home():
            shared = ddp_config(options)
            if not model.buffers:
                model.buffers = [DistributedDataParallel(model.config, shared, chunk) for chunk in model.chunks]
            parts = model.buffers
            self._optimizer = get_megatron_optimizer(
                optimizer_config(config, options, dtype), parts, use_gloo_process_groups=False
            )
        self._ddp = parts
        model.called = list(parts)
        model.config.finalize_model_grads_func = _finalize
        if dtype is torch.float16:
            model.config.grad_scale_func = self._optimizer.scale_loss
        if options.overlap_grad_reduce:
            unsynced = [part.no_sync for part in parts]
            model.config.no_sync_func = unsynced if len(parts) > 1 else unsynced[0]
        self._moments = Moments(self._optimizer)
        model.owner = self
        self._directory = Directory(model.chunks, self._place.world)

    def _take_over(self) -> None:
        """Where another optimizer has stepped on the same weights since, its float32 copies are this one's."""
        other, self._model.owner = self._model.owner, self
        if other is self or other is None:
            return
        for _, parameter in numbered_parameters(self._model.chunks):
            self._moments.put_weights(parameter, other._moments.whole(parameter))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full float32 tensors under Hugging Face names, on every rank; all ranks call it and go through it."""
        self._take_over()
        return self._directory.gathered(self._model.shape, self._moments.whole)

    def load_weights(self, given: Mapping[str, Tensor]) -> None:
        """Put full tensors under Hugging Face names into this rank's part.

        Raises:
            KeyError: one is missing.
        """
        for name, parameter in numbered_parameters(self._model.chunks):
            self._moments.put_weights(parameter, own_part(name, given, self._model.shape))

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors, whole and under Hugging Face names, as the plain learner's; all ranks call it."""
        state: dict[str, Tensor] = {}
        fields = ADAM if self._steps and self._config.kind == "adamw" else ()
        for field in fields:
            for name, whole in self._directory.gathered(self._model.shape, partial(self._moment, field)):
                state[f"{name}.{field}"] = whole.contiguous().clone()
                state[f"{name}.step"] = torch.tensor(float(self._steps))
        return state

    def _moment(self, field: str, parameter: nn.Parameter) -> Tensor:
        return self._moments.whole(parameter, field) if parameter.requires_grad else torch.zeros_like(parameter)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave, here or in another learner."""
        if not state:
            return
        self._steps = int(next(value for key, value in state.items() if key.endswith(".step")))
        for name, parameter in numbered_parameters(self._model.chunks):
            if not parameter.requires_grad:
                continue  # other backends keep nothing of what is frozen
            moments = {field: own_part(name, _field(state, field), self._model.shape) for field in ADAM}
            self._moments.put_moments(parameter, moments, float(self._steps))

    def loss_scale(self) -> dict[str, float]:
        """By what float16 losses are multiplied, and how long it has held; empty for other types."""
        found = {
            name: float(value)
            for part in chained(self._optimizer)[:1]
            if getattr(part, "grad_scaler", None) is not None
            for name, value in part.grad_scaler.state_dict().items()
        }
        return found if self._model.plan.dtype is torch.float16 else {}

    def load_loss_scale(self, state: Mapping[str, float]) -> None:
        """Put back what `loss_scale` gave."""
        scale = torch.tensor([state["scale"]])
        with at_home():
            for part in chained(self._optimizer):
                part.grad_scaler._scale = scale.to(part.grad_scaler._scale.device)
                part.grad_scaler._growth_tracker = int(state["growth_tracker"])
                part.grad_scaler._hysteresis_tracker = int(state["hysteresis_tracker"])

    def save_pretrained(self, directory: Path) -> None:
        """Write configuration and weights as transformers reads them; all ranks call it, the first one writes."""
        weights = {name: tensor.contiguous().clone() for name, tensor in in_files(self._model.shell, self.weights())}
        if self._place.world.rank:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._model.plan.hf.save_pretrained(directory)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    def _step(
        self,
        rate: float,
        loss_of: Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]],
        micros: list[MicroBatch],
        refused: Callable[[Mapping[str, float]], bool] = _never,
        decay: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step on the whole batch, unless it is `refused` by its metrics, which are sums over
        micro-batches; `decay` is its weight decay, the configured one without."""
        self._take_over()
        for part in self._ddp:
            part.train()  # activations are computed again in training alone; there is no dropout
            part.zero_grad_buffer()
        self._optimizer.zero_grad()
        told = self._model.run(micros, loss_of)
        sums: dict[str, float] = {}
        for _, metrics in told if self._place.speaks else ():
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        sums = self._place.world.sum_values(sums)
        norm, finite = self._ready() if micros else (0.0, True)
        if micros and finite and not refused(sums):
            self._advance(rate, self._config.weight_decay if decay is None else decay, norm)
        return {**sums, "grad_norm": norm, "skipped": float(not finite), "lr": rate}

    def _ready(self) -> tuple[float, bool]:
        """The norm of the whole gradient, and whether it is a number."""
        with at_home():
            overflow = self._optimizer.prepare_grads()
            norm = math.inf if overflow else float(self._optimizer.get_grad_norm())
        return norm, math.isfinite(norm)

    def _advance(self, rate: float, decay: float, norm: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = decay * group.get("wd_mult", 1.0)
        with at_home():
            clip(self._optimizer, norm)
            self._optimizer.step_with_ready_grads()
            for part in self._ddp if self._model.plan.options.overlap_param_gather else ():
                part.start_param_sync(force_sync=True)
        self._steps += 1


def _finalize(parts: list[DistributedDataParallel], _: Tensor | None = None, **given: object) -> None:
    """Megatron's own, without dividing by a number of tokens: a pass's loss has its weights already."""
    finalize_model_grads(parts, None, **given)


def _field(state: Mapping[str, Tensor], field: str) -> dict[str, Tensor]:
    return {key.removesuffix(f".{field}"): value for key, value in state.items() if key.endswith(f".{field}")}


class MegatronScorer:
    """A policy that says how likely it is to write what somebody wrote; see `quintet.training.learner.Scorer`."""

    def __init__(self, model: Model, *, budget: Budget, temperature: float = 1.0) -> None:
        """`temperature` divides the logits, as while sampling."""
        self.held = model
        self.dtype = model.plan.dtype
        self.budget = budget
        self.temperature = temperature

    @property
    def model(self) -> PreTrainedModel:
        """What transformers calls it, without weights."""
        return self.held.shell

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`."""
        directory = Directory(self.held.chunks, self.held.plan.place.world)
        return directory.gathered(self.held.shape, lambda parameter: parameter.detach())

    def load_weights(self, given: Mapping[str, Tensor]) -> None:
        """Put full tensors under Hugging Face names into this rank's part."""
        put_weights(self.held.chunks, given, self.held.shape)

    def frozen(self, budget: Budget) -> MegatronScorer:
        """The policy as it is now, which stays as it is."""
        copy = self.held.plan.model()
        with torch.no_grad():
            for own, other in zip(copy.chunks, self.held.chunks, strict=True):
                for mine, theirs in zip(own.parameters(), other.parameters(), strict=True):
                    mine.copy_(theirs)
                    mine.requires_grad_(requires_grad=False)
        return MegatronScorer(copy, budget=budget, temperature=self.temperature)

    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of each own token, nats, float32 [N]; 0 outside the loss mask."""
        return self._over(batch, "logprobs")

    def squared_mass(self, batch: Batch) -> Tensor:
        """Σ π² over the vocabulary at the place of each own token, float32 [N]; 0 outside the loss mask."""
        return self._over(batch, "squared_mass")

    def divergence(self, batch: Batch, reference: MegatronScorer, *, swapped: bool = False) -> Tensor:
        """KL(policy ‖ reference) over the whole vocabulary at the place of each own token, or with `swapped` the other
        way round; nats, float32 [N], 0 outside the loss mask."""
        return self._over(batch, "divergence", reference, swapped=swapped)

    @torch.no_grad()
    def _over(
        self, batch: Batch, name: str, reference: MegatronScorer | None = None, *, swapped: bool = False
    ) -> Tensor:
        micros = list(micro_batches(batch, self.budget))
        theirs = {} if reference is None else reference.held.hidden(micros)

        def measure(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            other = None if reference is None else (reference.held, theirs[id(micro)])
            measures = self.held.measures(
                micro.packed, hidden, self.temperature, other, swapped=swapped, squared_mass=name == "squared_mass"
            )
            return hidden.new_zeros(()), getattr(measures, name)

        return _spread(batch, self.held, self.held.run(micros, measure, backward=False))


def _spread(batch: Batch, model: Model, told: list[tuple[MicroBatch, Tensor]]) -> Tensor:
    """[N] on all ranks: what was measured at the own tokens, 0 elsewhere."""
    out = torch.zeros(len(batch.tokens))
    for micro, value in told if model.plan.place.speaks else ():
        out[micro.index] = value.float().cpu()
    return model.plan.place.world.sum(out)


class MegatronActor(_Trained):
    """Trains the policy; see `quintet.training.learner.ActorLearner`."""

    def __init__(
        self,
        model: Model,
        config: OptimizerConfig,
        *,
        budget: Budget,
        inference_budget: Budget | None = None,
        temperature: float = 1.0,
    ) -> None:
        """`temperature` divides the logits, as while sampling."""
        super().__init__(model, config, budget=budget, inference_budget=inference_budget)
        self.scorer = MegatronScorer(model, budget=self._inference_budget, temperature=temperature)

    @property
    def model(self) -> PreTrainedModel:
        """What transformers calls it, without weights."""
        return self._model.shell

    def under(self, config: OptimizerConfig) -> MegatronActor:
        """The same policy under a fresh optimizer, scored as it is, whatever temperature play has."""
        return MegatronActor(self._model, config, budget=self._budget, inference_budget=self._inference_budget)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """None: all weights are trained."""
        return iter(())

    def update(
        self,
        batch: Batch,
        objective: PolicyLearning,
        aggregation: Aggregation | str,
        rate: float,
        *,
        reference: MegatronScorer | None = None,
        seed: int = 0,
        decay: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch; see `ActorLearner.update`.

        Raises:
            ValueError: the divergence is to be `full` and there is no reference.
        """
        micros = list(micro_batches(batch, self._budget))
        update = PolicyUpdate(
            batch,
            objective,
            aggregation,
            micros,
            logprobs=self.scorer.logprobs,
            dtype=self.scorer.dtype,
            referred=reference is not None,
            seed=seed,
        )
        full = update.full
        theirs = reference.held.hidden(micros) if full and reference else {}

        def loss_of(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            other = (reference.held, theirs[id(micro)]) if full and reference else None
            measures = self._model.measures(
                micro.packed, hidden, self.scorer.temperature, other, swapped=bool(full and full.swapped)
            )
            return update.loss(micro, measures)

        metrics = self._step(rate, loss_of, micros, update.stops, decay)
        return update.told(metrics, self._place.world.largest(update.largest_gap))


class MegatronCritic(_Trained):
    """Trains the critic; see `quintet.training.learner.CriticLearner`."""

    def values(self, batch: Batch) -> Tensor:
        """The estimate before each own token, float32 [N]; 0 elsewhere."""

        def measure(_: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return hidden.new_zeros(()), self._value(hidden)

        with torch.no_grad():
            micros = list(micro_batches(batch, self._inference_budget))
            return _spread(batch, self._model, self._model.run(micros, measure, backward=False))

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
        """One optimizer step on a mini-batch that has `values` and `returns`; see `CriticLearner.update`.

        Raises:
            ValueError: the batch has no values or no returns.
        """
        update = ValueUpdate(batch, objective, aggregation, lambda own: micro_batches(own, self._budget), mask)

        def loss_of(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return update.loss(micro, self._value(hidden))

        return self._step(rate, loss_of, list(micro_batches(update.batch, self._budget)), decay=decay)

    def _value(self, hidden: Tensor) -> Tensor:
        """Hidden states [M, hidden] to values [M]."""
        values: Tensor = self._model.chunks[-1].value_head(hidden)
        return values.squeeze(-1).float()
