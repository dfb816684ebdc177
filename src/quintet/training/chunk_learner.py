"""Learner of an action policy: sampling, log-probs, and updates on chunk steps.

Each rank has chunk steps of its own robots, and only small numbers and gradients go between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quintet.algorithms.chunks.objective import ChunkObjective
from quintet.config.native.learners import OptimizerConfig
from quintet.embodied_records import ActionSample, ActionSampling, ActionStatistics, ChunkBatch
from quintet.policies.lora import adapter_scales, has_lora, merge_adapter_stream
from quintet.policies.vla.action_module import ActionModule
from quintet.training.checkpoint.shards import ShardReader
from quintet.training.checkpoint.state_dict import has_flat_parameters, load_model_state_dict, model_state_dict
from quintet.training.learner import GradientLearner, M
from quintet.training.learner_setup import LearnerSetup
from quintet.training.offload import reshard
from quintet.training.parallel.process_group import Assignment
from quintet.training.parallel.strategy import VALUE_HEAD, ParallelStrategy, ReplicatedStrategy, parameter_name
from quintet.training.scorer import autocast


@dataclass(frozen=True, slots=True)
class ChunkRates:
    """Learning rates and weight decay of an update."""

    policy: float
    value_head: float
    weight_decay: float
    trains_policy: bool = True
    """False while only the value head is trained."""
    trains_values: bool = True
    """False for behavior cloning."""


class ChunkLearner(GradientLearner):
    """Learner of an action policy and its value head."""

    def __init__(self, module: ActionModule, config: OptimizerConfig, setup: LearnerSetup) -> None:
        super().__init__(setup.strategy or ReplicatedStrategy(module, setup.ranks), config, setup)
        self._module = module
        self.policy = module.policy
        self.reference: ReferenceWeights | None = None
        """The policy at an earlier time, from which the KL divergence is measured."""
        self._rates = ChunkRates(config.learning_rate, config.learning_rate, config.weight_decay)
        _group_value_head(self.optimizer, self.strategy.module)

    @property
    def model(self) -> nn.Module:
        """The policy, which `transformers` can save."""
        return self.policy  # type: ignore[return-value]

    def with_optimizer(self, config: OptimizerConfig) -> ChunkLearner:
        """Return a learner of the same policy with a fresh optimizer."""
        return ChunkLearner(self._module, config, self.setup)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`; adapters are merged."""
        scales = adapter_scales(self.model) if has_lora(self.model) else {}
        scales = {parameter_name(name): scale for name, scale in scales.items()}
        return merge_adapter_stream(super().weights(), scales) if scales else super().weights()

    @torch.no_grad()
    def sample(self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, sampling: ActionSampling) -> ActionSample:
        """Sample actions for B robots on the CPU; see `ActionPolicy.sample`."""
        device = self.strategy.device
        with self._offload.on_device(), autocast(self.setup.dtype, device):
            sample: ActionSample = self.strategy.module(
                _to_device(inputs, device), sampling, uniforms=None if uniforms is None else uniforms.to(device)
            )
        values = None if sample.values is None else sample.values.float().cpu()
        return ActionSample(sample.actions.cpu(), sample.logprobs.float().cpu(), values)

    @torch.no_grad()
    def compute_log_probs(self, batch: ChunkBatch, sampling: ActionSampling) -> Tensor:
        """Return the log-probs of a flattened batch's actions, float32 [N, C, D]."""
        with self._offload.on_device():
            indices = self._split_rows(batch.num_chunks)
            parts = [self._statistics(batch.select(index), sampling).logprobs.float().cpu() for index in indices]
            for _ in range(self._num_passes(len(indices)) - len(indices)):
                self._statistics(batch.select(torch.zeros(1, dtype=torch.long)), sampling)
        return torch.cat(parts)

    def snapshot_reference(self) -> None:
        """Make the current policy the reference."""
        with self._offload.on_device():
            self.reference = ReferenceWeights(self.strategy)

    def compute_reference_log_probs(self, batch: ChunkBatch, sampling: ActionSampling) -> Tensor:
        """Return the log-probs of a flattened batch's actions under the reference, float32 [N, C, D].

        Raises:
            ValueError: there is no reference.
        """
        if self.reference is None:
            raise ValueError("the policy has no reference")
        with self._offload.on_device(), self.reference.in_place():
            return self.compute_log_probs(batch, sampling)

    def update(
        self,
        batch: ChunkBatch,
        objective: ChunkObjective,
        sampling: ActionSampling,
        rates: ChunkRates,
        repeated: ChunkBatch | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step on a mini-batch, of which `batch` has this rank's chunk steps, flattened. Returns the
        objective's metrics, `grad_norm`, `lr` and `skipped`; `actor/stopped_updates` is 1 if the step was not made
        because of `algorithm.loss.stop_ratio`. `repeated` is any chunk step, for passes that do not count.

        `objective.normalizer` is of the mini-batch of all ranks, so that results do not depend on their number.
        """
        self._rates = rates
        normalizer = objective.normalizer(batch, self._sum_over_ranks)
        metrics = self._update(
            self._assign(batch, repeated),
            rates.policy,
            lambda part: objective.loss(self._statistics(part, sampling), part, normalizer),
            objective.skips_update,
            rates.weight_decay,
        )
        if objective.algorithm.stop_ratio is not None:
            metrics["actor/stopped_updates"] = float(objective.skips_update(metrics))
        return metrics

    def clone(self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor, rates: ChunkRates) -> dict[str, float]:
        """Make one optimizer step of behavior cloning: raise the mean log-prob of demonstrated actions, [N, C, D], of
        the policy. `mask`, bool [N, C], selects the actions."""
        self._rates = replace(rates, trains_values=False)
        total = self._sum_over_ranks(mask.sum().double()) * actions.shape[-1]
        examples = _Examples(inputs, actions, mask)

        def loss(part: _Examples) -> tuple[Tensor, dict[str, Tensor]]:
            statistics = self._run(part.inputs, part.actions, ActionSampling())
            selected = part.mask.unsqueeze(-1).to(statistics.logprobs.device)
            mean = (statistics.logprobs * selected).sum() / float(total)
            return -mean, {"sft/loss": -mean}

        parts = [examples.select(index) for index in self._split_rows(len(actions))]
        assigned = self._assigned(parts, examples.select(torch.zeros(1, dtype=torch.long)))
        return self._update(assigned, rates.policy, loss, weight_decay=rates.weight_decay)

    def _set_rates(self, learning_rate: float, weight_decay: float) -> None:
        rates = self._rates
        for group in self.optimizer.param_groups:
            is_value_head = group.get("name") == VALUE_HEAD
            group["lr"] = rates.value_head if is_value_head else learning_rate
            group["weight_decay"] = weight_decay
            if not (rates.trains_values if is_value_head else rates.trains_policy):
                # without a gradient there is no weight decay either; FSDP1 gives zeros to weights without gradients
                for parameter in group["params"]:
                    parameter.grad = None

    def _statistics(self, batch: ChunkBatch, sampling: ActionSampling) -> ActionStatistics:
        return self._run(batch.inputs, batch.actions, sampling)

    def _run(self, inputs: Mapping[str, Tensor], actions: Tensor, sampling: ActionSampling) -> ActionStatistics:
        device = self.strategy.device
        with autocast(self.setup.dtype, device):
            statistics: ActionStatistics = self.strategy.module(
                _to_device(inputs, device), sampling, actions.to(device)
            )
        values = None if statistics.values is None else statistics.values.float()
        return ActionStatistics(statistics.logprobs.float(), statistics.entropies.float(), values)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return self._ranks.all_reduce(value.clone())

    def _split_rows(self, rows: int) -> list[Tensor]:
        """Return the row indices of each pass."""
        size = self.setup.budget.max_sequences or max(rows, 1)
        return list(torch.split(torch.arange(rows), size)) if rows else []

    def _assign(self, batch: ChunkBatch, repeated: ChunkBatch | None) -> list[Assignment[ChunkBatch]]:
        """Return the passes over this rank's chunk steps that are trained. With sharded weights all ranks make the same
        number of passes; those of a rank that has fewer do not count."""
        trained = batch.loss_mask.flatten(1).any(1).nonzero().squeeze(1)
        parts = [batch.select(trained[index]) for index in self._split_rows(len(trained))]
        return self._assigned(parts, repeated or batch.select(torch.zeros(min(1, batch.num_chunks), dtype=torch.long)))

    def _assigned(self, parts: Sequence[M], repeated: M) -> list[Assignment[M]]:
        """Return the passes over this rank's `parts`, and passes over `repeated` that do not count."""
        count = self._num_passes(len(parts))
        padded = [*parts, *[repeated] * (count - len(parts))]
        return [
            Assignment(part, is_counted=index < len(parts), last=index == count - 1)
            for index, part in enumerate(padded)
        ]

    def _num_passes(self, count: int) -> int:
        """Return the number of passes of this rank: with sharded weights the largest of all ranks."""
        return int(self._ranks.all_reduce_max(float(count))) if self.strategy.needs_equal_passes else count


@dataclass(frozen=True, slots=True)
class _Examples:
    """Demonstrated chunks."""

    inputs: Mapping[str, Tensor]
    actions: Tensor
    mask: Tensor

    def select(self, indices: Tensor) -> _Examples:
        inputs = {name: tensor[indices] for name, tensor in self.inputs.items()}
        return _Examples(inputs, self.actions[indices], self.mask[indices])


def _to_device(inputs: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}


def _group_value_head(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Move the value head's parameters to a parameter group with a learning rate of its own."""
    heads = {id(parameter) for name, parameter in module.named_parameters() if VALUE_HEAD in name}
    (group,) = optimizer.param_groups
    selected = [parameter for parameter in group["params"] if id(parameter) in heads]
    if not selected:
        return
    options = {name: value for name, value in group.items() if name != "params"}
    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in heads]
    optimizer.add_param_group({**options, "params": selected, "name": VALUE_HEAD})


class ReferenceWeights:
    """A copy of the trained weights of a module, which takes their place for a while. Frozen weights are shared: of a
    policy with LoRA it has the adapters alone."""

    def __init__(self, strategy: ParallelStrategy) -> None:
        """Copy the current weights."""
        self._module = strategy.module
        # the modules of FSDP1 have no parameters while they are gathered
        reshard(self._module)
        self._parameters = [parameter for parameter in strategy.parameters() if parameter.requires_grad]
        self._copies = self._current()

    def _current(self) -> list[Tensor]:
        reshard(self._module)
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def _set(self, weights: list[Tensor]) -> None:
        reshard(self._module)
        for parameter, tensor in zip(self._parameters, weights, strict=True):
            parameter.copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the weights of the module by the copy within the context."""
        trained = self._current()
        self._set(self._copies)
        try:
            yield
        finally:
            self._set(trained)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the weights by name, for a checkpoint. All ranks call it."""
        with self.in_place():
            return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load_state_dict(self, shards: ShardReader) -> None:
        """Load the result of `state_dict`, saved by any number of ranks.

        Raises:
            MachineError: the weights belong to another model.
        """
        with self.in_place():
            if has_flat_parameters(self._module):
                load_model_state_dict(self._module, shards)
            else:
                shards.load_into(self._tensors())
            self._copies = self._current()

    def _tensors(self) -> Mapping[str, Tensor]:
        """Return the module's trained weights by name, of FSDP1 all weights."""
        tensors = model_state_dict(self._module)
        if has_flat_parameters(self._module):
            return tensors
        trained = {parameter_name(name) for name, weight in self._module.named_parameters() if weight.requires_grad}
        return {name: tensor for name, tensor in tensors.items() if name in trained}
