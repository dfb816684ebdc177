"""This process's stages of a Megatron model, and passes of packed micro-batches through its pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from quintet.config.native.learners import ParallelConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.parallel.vocab_parallel import VocabShard
from quintet.policies.token_statistics import (
    LazyLogits,
    StatisticsOptions,
    TokenStatistics,
    statistics_from_hidden_states,
)
from quintet.training.megatron.conversion import ModelDims
from quintet.training.megatron.core_package import compute_device, emulate_cuda
from quintet.training.megatron.model import PackedGPT, build_chunks
from quintet.training.megatron.options import transformer_config
from quintet.training.megatron.process_groups import MegatronRanks, with_process_groups
from quintet.training.megatron.weight_export import load_hf_weights, load_weight_stream
from quintet.training.packing import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
LossFn = Callable[[MicroBatch, Tensor], tuple[Tensor, T]]
"""Function of a micro-batch and its hidden states, [M, hidden], that returns the loss and a further result."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Configuration from which a Megatron model is built."""

    hf_config: Any
    options: MegatronConfig
    parallel: ParallelConfig
    ranks: MegatronRanks
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    freeze_router: bool = False
    generation_config: Any = None

    def build_model(self, *, critic: bool = False) -> MegatronModel:
        """Build the model without initialising its weights."""
        return MegatronModel(self, critic=critic)


class MegatronModel:
    """This process's stages of a model."""

    def __init__(self, spec: ModelSpec, *, critic: bool = False) -> None:
        self.spec = spec
        self.ranks = spec.ranks
        self.config = transformer_config(
            spec.hf_config,
            spec.options,
            spec.parallel,
            spec.dtype,
            recompute=spec.recompute,
            on_cpu=compute_device().type == "cpu",
        )
        with self.ranks.active():
            self.chunks: list[PackedGPT] = build_chunks(
                spec.hf_config, self.config, spec.options, critic=critic, freeze_router=spec.freeze_router
            )
        self.shape = ModelDims.from_hf_config(spec.hf_config)
        self.forward_chunks: list[nn.Module] = list(self.chunks)
        """Modules to call in passes: the stages, or a learner's wrappers of them."""
        self.ddp_chunks: list[Any] = []
        """The stages with Megatron's gradient buffers, if they are trained."""
        self.last_updated_by: Any = None
        """The learner that made the last optimizer step."""

    @with_process_groups
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load this rank's shards from full tensors under Hugging Face names; see `load_hf_weights`."""
        load_hf_weights(self.chunks, weights, self.shape)

    @with_process_groups
    def load_weight_stream(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load this rank's shards from the weights of another learner; see `load_weight_stream`."""
        load_weight_stream(self.chunks, weights, self.shape)

    @with_process_groups
    def run(
        self, micro_batches: Sequence[MicroBatch], loss: LossFn[T], *, backward: bool = True
    ) -> list[tuple[MicroBatch, T]]:
        """Run this rank's share of the micro-batches through Megatron's pipeline schedule; all ranks pass the same
        micro-batches. The last stage returns the result of `loss` for each. With `backward`, gradients are computed and
        summed over ranks."""
        if not micro_batches:
            return []
        local = self._local_share(micro_batches)
        results: list[tuple[MicroBatch, T]] = []
        longest = max(len(micro.packed.tokens) for micro in micro_batches)
        width = self._padded_length(longest) if self._needs_equal_lengths else None
        step = partial(self._forward, loss, results, width)
        with emulate_cuda():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(local) for _ in self.forward_chunks],
                model=self.forward_chunks,
                num_microbatches=len(local),
                seq_length=width or self.chunks[0].padded_length(longest),
                micro_batch_size=1,
                forward_only=not backward,
            )
        return results

    def _local_share(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        """Return this rank's micro-batches and whether each is counted: repeated ones, which even out the ranks, are
        not."""
        data, stages = self.ranks.data, self.spec.parallel.pipeline
        count = -(-len(micro_batches) // data.size)
        if self.spec.parallel.virtual_pipeline > 1:
            count = -(-count // stages) * stages
        local = list(micro_batches[data.rank :: data.size])
        return [(micro, True) for micro in local] + [(micro_batches[0], False)] * (count - len(local))

    @property
    def _needs_equal_lengths(self) -> bool:
        """Whether all micro-batches are padded to one length: if configured, with virtual stages, which cannot exchange
        lengths, and if all ranks send all tokens to all experts."""
        options, parallel = self.spec.options, self.spec.parallel
        uses_allgather = options.moe_token_dispatcher_type == "allgather" and parallel.expert > 1  # noqa: S105
        return not options.variable_seq_lengths or parallel.virtual_pipeline > 1 or uses_allgather

    def _padded_length(self, longest: int) -> int:
        return self.chunks[0].padded_length(max(longest, self.spec.options.seq_length or 0))

    def _forward(
        self,
        loss: LossFn[T],
        results: list[tuple[MicroBatch, T]],
        width: int | None,
        micro_batches: Iterator[tuple[MicroBatch, bool]],
        stage: nn.Module,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, None]]]:
        """Run a stage's forward pass, called by Megatron's schedules."""
        micro, is_counted = next(micro_batches)

        def compute_loss(hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            value, result = loss(micro, hidden)
            if is_counted:
                results.append((micro, result))
            return value * (float(is_counted) / self.spec.parallel.context), torch.ones((), dtype=torch.int), None

        return stage(micro.packed.to(compute_device()), width), compute_loss

    def hidden_states(self, micro_batches: Sequence[MicroBatch]) -> dict[int, Tensor]:
        """Return hidden states at predicting positions by the micro-batch's `id`, on the last stage, without
        gradients."""

        states: dict[int, Tensor] = {}

        def keep(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, None]:
            states[id(micro)] = hidden  # of a repeated micro-batch, too
            return hidden.new_zeros(()), None

        with torch.no_grad():
            self.run(micro_batches, keep, backward=False)
        return states

    def token_statistics(
        self,
        packed: PackedBatch,
        hidden: Tensor,
        temperature: float,
        other: tuple[MegatronModel, Tensor] | None = None,
        **options: Unpack[StatisticsOptions],
    ) -> TokenStatistics:
        """Return log-probs, entropy and more on the CPU, from hidden states on the last stage; `other` is another model
        and its hidden states."""
        statistics = statistics_from_hidden_states(
            self._lazy_logits(hidden),
            packed.targets.to(hidden.device),
            temperature,
            None if other is None else other[0]._lazy_logits(other[1]),
            vocabulary=len(self.chunks[-1].local_vocab),
            **options,
        )
        return TokenStatistics(*(column.cpu() for column in statistics))

    def _lazy_logits(self, hidden: Tensor) -> LazyLogits:
        """Return hidden states with the head of the last stage, of which each tensor-parallel rank has some columns."""
        last, group = self.chunks[-1], parallel_state.get_tensor_model_parallel_group()
        return LazyLogits(hidden, lambda part: VocabShard(last.head(part), group, last.local_vocab.start))

    @cached_property
    def hf_model(self) -> PreTrainedModel:
        """The transformers model on the meta device, without weights."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.spec.hf_config, dtype=torch.float32)
        model.generation_config = self.spec.generation_config
        return model
