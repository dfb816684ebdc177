"""Learners on Megatron Core: its model, gradient buffers and optimizer behind the learner protocols."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Unpack

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor, nn

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, PolicyObjectiveFn
from quintet.config.native.learners import OptimizerConfig
from quintet.policies.token_statistics import StatisticsOptions, TokenStatistics
from quintet.records import Batch
from quintet.training.megatron.core_package import emulate_cuda
from quintet.training.megatron.optimizer_state import MegatronOptimizerState, clip_grad_norm, optimizer_parts
from quintet.training.megatron.options import ddp_config, optimizer_config
from quintet.training.megatron.pipeline_runner import MegatronModel
from quintet.training.megatron.process_groups import with_process_groups
from quintet.training.megatron.weight_export import WeightGatherer, global_parameters, local_shard
from quintet.training.packing import MicroBatch, MicroBatchBudget, iter_micro_batches
from quintet.training.policy_update import PolicyUpdate, ValueUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAM_FIELDS = ("exp_avg", "exp_avg_sq")


class _GradientLearner:
    """Base of Megatron learners: a model with gradient buffers and optimizer."""

    def __init__(
        self,
        model: MegatronModel,
        config: OptimizerConfig,
        *,
        budget: MicroBatchBudget,
        inference_budget: MicroBatchBudget | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._budget = budget
        self._inference_budget = inference_budget or budget
        self.ranks = model.ranks
        self._steps = 0
        options, dtype = model.spec.options, model.spec.dtype
        with self.ranks.active(), emulate_cuda():
            ddp_options = ddp_config(options)
            if not model.ddp_chunks:
                model.ddp_chunks = [DistributedDataParallel(model.config, ddp_options, chunk) for chunk in model.chunks]
            ddp_chunks = model.ddp_chunks
            self._optimizer = get_megatron_optimizer(
                optimizer_config(config, options, dtype), ddp_chunks, use_gloo_process_groups=False
            )
        self._ddp_chunks = ddp_chunks
        model.forward_chunks = list(ddp_chunks)
        model.config.finalize_model_grads_func = _finalize_grads
        if dtype is torch.float16:
            model.config.grad_scale_func = self._optimizer.scale_loss
        if options.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in ddp_chunks]
            model.config.no_sync_func = no_sync if len(ddp_chunks) > 1 else no_sync[0]
        self._optimizer_state = MegatronOptimizerState(self._optimizer)
        model.last_updated_by = self
        self._gatherer = WeightGatherer(model.chunks, self.ranks)

    @with_process_groups
    def _copy_master_weights(self) -> None:
        """Copy the float32 weights of another optimizer that has updated the same model since."""
        other, self._model.last_updated_by = self._model.last_updated_by, self
        if other is self or other is None:
            return
        for _, parameter in global_parameters(self._model.chunks):
            self._optimizer_state.load_weights(parameter, other._optimizer_state.full_tensor(parameter))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full float32 tensors under Hugging Face names, on every rank; all ranks must read all of them."""
        self._copy_master_weights()
        return self._gatherer.gather(self._model.shape, self._optimizer_state.full_tensor)

    @with_process_groups
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load this rank's shards from full tensors under Hugging Face names.

        Raises:
            KeyError: a tensor is missing.
        """
        for name, parameter in global_parameters(self._model.chunks):
            self._optimizer_state.load_weights(parameter, local_shard(name, weights, self._model.shape))

    @with_process_groups
    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer's full tensors under Hugging Face names, as other backends do; all ranks call it."""
        state: dict[str, Tensor] = {}
        fields = ADAM_FIELDS if self._steps and self._config.kind == "adamw" else ()
        for field in fields:
            for name, tensor in self._gatherer.gather(self._model.shape, partial(self._full_state, field)):
                state[f"{name}.{field}"] = tensor.contiguous().clone()
                state[f"{name}.step"] = torch.tensor(float(self._steps))
        return state

    def _full_state(self, field: str, parameter: nn.Parameter) -> Tensor:
        return (
            self._optimizer_state.full_tensor(parameter, field)
            if parameter.requires_grad
            else torch.zeros_like(parameter)
        )

    @with_process_groups
    def load_optimizer_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the result of `optimizer_state_dict` of any backend."""
        if not state:
            return
        self._steps = int(next(value for key, value in state.items() if key.endswith(".step")))
        for name, parameter in global_parameters(self._model.chunks):
            if not parameter.requires_grad:
                continue  # other backends have no state of frozen parameters
            moments = {field: local_shard(name, _field(state, field), self._model.shape) for field in ADAM_FIELDS}
            self._optimizer_state.load_moments(parameter, moments, float(self._steps))

    def loss_scale_state(self) -> dict[str, float]:
        """Return the state of float16 loss scaling; empty for other dtypes."""
        state = {
            name: float(value)
            for part in optimizer_parts(self._optimizer)[:1]
            if getattr(part, "grad_scaler", None) is not None
            for name, value in part.grad_scaler.state_dict().items()
        }
        return state if self._model.spec.dtype is torch.float16 else {}

    def load_loss_scale_state(self, state: Mapping[str, float]) -> None:
        """Load the result of `loss_scale_state`, unless another backend has saved it: its scale follows other rules."""
        if "scale" not in state:
            return
        scale = torch.tensor([state["scale"]])
        with emulate_cuda():
            for part in optimizer_parts(self._optimizer):
                part.grad_scaler._scale = scale.to(part.grad_scaler._scale.device)
                part.grad_scaler._growth_tracker = int(state["growth_tracker"])
                part.grad_scaler._hysteresis_tracker = int(state["hysteresis_tracker"])

    @with_process_groups
    def _update(
        self,
        learning_rate: float,
        compute_loss: Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]],
        micro_batches: list[MicroBatch],
        should_skip: Callable[[Mapping[str, float]], bool] = lambda _: False,
        weight_decay: float | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step on the whole batch and return its metrics, sums over micro-batches. The step is not
        made if `should_skip(metrics)`; the default weight decay is the configured one."""
        self._copy_master_weights()
        for chunk in self._ddp_chunks:
            chunk.train()  # Megatron recomputes activations in training mode only; there is no dropout
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        results = self._model.run(micro_batches, compute_loss)
        sums: dict[str, float] = {}
        for _, metrics in results if self.ranks.reports_results else ():
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        sums = self.ranks.world.all_reduce_dict(sums)
        grad_norm = self._prepare_grads() if micro_batches else 0.0
        is_usable = math.isfinite(grad_norm) and grad_norm <= (self._config.skip_above_grad_norm or math.inf)
        if micro_batches and is_usable and not should_skip(sums):
            decay = self._config.weight_decay if weight_decay is None else weight_decay
            self._optimizer_step(learning_rate, decay, grad_norm)
        return {**sums, "grad_norm": grad_norm, "skipped": float(not is_usable), "lr": learning_rate}

    def _prepare_grads(self) -> float:
        """Reduce gradients and return their global norm."""
        with emulate_cuda():
            overflow = self._optimizer.prepare_grads()
            return math.inf if overflow else float(self._optimizer.get_grad_norm())

    def _optimizer_step(self, learning_rate: float, weight_decay: float, grad_norm: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
        with emulate_cuda():
            clip_grad_norm(self._optimizer, grad_norm)
            self._optimizer.step_with_ready_grads()
            for chunk in self._ddp_chunks if self._model.spec.options.overlap_param_gather else ():
                chunk.start_param_sync(force_sync=True)
        self._steps += 1


def _finalize_grads(chunks: list[DistributedDataParallel], _: Tensor | None = None, **kwargs: object) -> None:
    """Call Megatron's function without a number of tokens to divide by: the losses are already weighted."""
    finalize_model_grads(chunks, None, **kwargs)


def _field(state: Mapping[str, Tensor], field: str) -> dict[str, Tensor]:
    return {key.removesuffix(f".{field}"): value for key, value in state.items() if key.endswith(f".{field}")}


class MegatronScorer:
    """A policy that computes log-probs of given responses; see `quintet.training.scorer.PolicyScorer`."""

    def __init__(self, model: MegatronModel, *, budget: MicroBatchBudget, temperature: float = 1.0) -> None:
        """`temperature` divides the logits, as in sampling."""
        self.megatron_model = model
        self.dtype = model.spec.dtype
        self.budget = budget
        self.temperature = temperature

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model, without weights."""
        return self.megatron_model.hf_model

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        gatherer = WeightGatherer(self.megatron_model.chunks, self.megatron_model.ranks)
        return gatherer.gather(self.megatron_model.shape, lambda parameter: parameter.detach())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load this rank's shards from full tensors under Hugging Face names."""
        self.megatron_model.load_weights(weights)

    def compute_log_probs(self, batch: Batch) -> Tensor:
        return self._forward_only(batch, lambda statistics: statistics.logprobs)

    def compute_entropies(self, batch: Batch) -> Tensor:
        return self._forward_only(batch, lambda statistics: statistics.entropy)

    def compute_sum_squared_probs(self, batch: Batch) -> Tensor:
        return self._forward_only(batch, lambda statistics: statistics.sum_squared_probs, with_sum_squared_probs=True)

    def compute_divergence(self, batch: Batch, reference: MegatronScorer, *, swapped: bool = False) -> Tensor:
        return self._forward_only(batch, lambda statistics: statistics.divergence, reference, swapped=swapped)

    @torch.no_grad()
    def _forward_only(
        self,
        batch: Batch,
        select_result: Callable[[TokenStatistics], Tensor],
        reference: MegatronScorer | None = None,
        **options: Unpack[StatisticsOptions],
    ) -> Tensor:
        micro_batches = list(iter_micro_batches(batch, self.budget))
        reference_hidden = {} if reference is None else reference.megatron_model.hidden_states(micro_batches)

        def compute(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            other = None if reference is None else (reference.megatron_model, reference_hidden[id(micro)])
            statistics = self.megatron_model.token_statistics(micro.packed, hidden, self.temperature, other, **options)
            return hidden.new_zeros(()), select_result(statistics)

        return _scatter_results(
            batch, self.megatron_model, self.megatron_model.run(micro_batches, compute, backward=False)
        )


def _scatter_results(batch: Batch, model: MegatronModel, results: list[tuple[MicroBatch, Tensor]]) -> Tensor:
    """Return results at their response tokens, 0 elsewhere, [N] on all ranks."""
    out = torch.zeros(len(batch.tokens))
    for micro, value in results if model.ranks.reports_results else ():
        out[micro.index] = value.float().cpu()
    return model.ranks.world.all_reduce(out)


class MegatronActor(_GradientLearner):
    """Learner of the policy; see `quintet.training.learner.ActorLearner`."""

    def __init__(
        self,
        model: MegatronModel,
        config: OptimizerConfig,
        *,
        budget: MicroBatchBudget,
        inference_budget: MicroBatchBudget | None = None,
        temperature: float = 1.0,
    ) -> None:
        """`temperature` divides the logits, as in sampling."""
        super().__init__(model, config, budget=budget, inference_budget=inference_budget)
        self.scorer = MegatronScorer(model, budget=self._inference_budget, temperature=temperature)

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model, without weights."""
        return self._model.hf_model

    def with_optimizer(self, config: OptimizerConfig) -> MegatronActor:
        return MegatronActor(self._model, config, budget=self._budget, inference_budget=self._inference_budget)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: all weights are trained."""
        return iter(())

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `weights`: there are no adapters."""
        return self.weights()

    def adapter_scales(self) -> dict[str, float]:
        """Return nothing: there are no adapters."""
        return {}

    def update(
        self,
        batch: Batch,
        objective: PolicyObjectiveFn,
        aggregation: Aggregation | str,
        learning_rate: float,
        *,
        reference: MegatronScorer | None = None,
        seed: int = 0,
        weight_decay: float | None = None,
    ) -> dict[str, float]:
        micro_batches = list(iter_micro_batches(batch, self._budget))
        update = PolicyUpdate(
            batch,
            objective,
            aggregation,
            micro_batches,
            compute_log_probs=self.scorer.compute_log_probs,
            dtype=self.scorer.dtype,
            has_reference=reference is not None,
            seed=seed,
        )
        kl = update.full_divergence
        reference_hidden = reference.megatron_model.hidden_states(micro_batches) if kl and reference else {}

        def compute_loss(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            other = (reference.megatron_model, reference_hidden[id(micro)]) if kl and reference else None
            statistics = self._model.token_statistics(
                micro.packed, hidden, self.scorer.temperature, other, swapped=bool(kl and kl.swapped)
            )
            return update.loss(micro, statistics)

        metrics = self._update(learning_rate, compute_loss, micro_batches, update.should_skip_step, weight_decay)
        return update.final_metrics(metrics, self.ranks.world.all_reduce_max(update.largest_gap))


class MegatronCritic(_GradientLearner):
    """Learner of the critic; see `quintet.training.learner.CriticLearner`."""

    def compute_values(self, batch: Batch) -> Tensor:
        def compute(_: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return hidden.new_zeros(()), self._value(hidden)

        with torch.no_grad():
            micro_batches = list(iter_micro_batches(batch, self._inference_budget))
            return _scatter_results(batch, self._model, self._model.run(micro_batches, compute, backward=False))

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
        update = ValueUpdate(batch, objective, aggregation, lambda part: iter_micro_batches(part, self._budget), mask)

        def compute_loss(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return update.loss(micro, self._value(hidden))

        micro_batches = list(iter_micro_batches(update.batch, self._budget))
        return self._update(learning_rate, compute_loss, micro_batches, weight_decay=weight_decay)

    def _value(self, hidden: Tensor) -> Tensor:
        """Return the values, [M] on the CPU, of hidden states [M, hidden]."""
        values: Tensor = self._model.chunks[-1].value_head(hidden)
        return values.squeeze(-1).float().cpu()
