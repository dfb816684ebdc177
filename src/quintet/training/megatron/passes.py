"""A Megatron model on this process's ranks, and passes of packed micro-batches through its pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from quintet.config.native.learners import ParallelConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.policies.causal_lm import Packed, TokenMeasures
from quintet.training.megatron.conversion import Shape
from quintet.training.megatron.groups import Place
from quintet.training.megatron.model import PackedGPT, build_chunks
from quintet.training.megatron.options import transformer_config
from quintet.training.megatron.package import at_home, device
from quintet.training.megatron.vocabulary import measure_tokens
from quintet.training.packing import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Model", "Plan"]

T = TypeVar("T")
Loss = Callable[[MicroBatch, Tensor], tuple[Tensor, T]]
"""A pass's loss and what is to be told of it, from the hidden states at its sources, [M, hidden]."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a model is built from: it can be built once more."""

    hf: Any
    """Its Hugging Face configuration."""
    options: MegatronConfig
    parallel: ParallelConfig
    place: Place
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    freeze_router: bool = False
    generation: Any = None
    """How the model is to generate, by its own settings."""

    def model(self, *, critic: bool = False) -> Model:
        """Its weights aren't set."""
        return Model(self, critic=critic)


class Model:
    """This process's stages of a model."""

    def __init__(self, plan: Plan, *, critic: bool = False) -> None:
        self.plan = plan
        self.config = transformer_config(
            plan.hf,
            plan.options,
            plan.parallel,
            plan.dtype,
            recompute=plan.recompute,
            hosted=device().type == "cpu",
        )
        self.chunks: list[PackedGPT] = build_chunks(
            plan.hf, self.config, plan.options, critic=critic, freeze_router=plan.freeze_router
        )
        self.shape = Shape.of(plan.hf)
        self.called: list[nn.Module] = list(self.chunks)
        """What passes go through: the stages, or what a learner has wrapped them in."""
        self.buffers: list[Any] = []
        """Megatron's gradient buffers around the stages, where they are trained."""
        self.owner: Any = None
        """The learner that stepped on the weights last."""

    def run(self, micros: Sequence[MicroBatch], loss: Loss[T], *, backward: bool = True) -> list[tuple[MicroBatch, T]]:
        """Pass this rank's share of the micro-batches, which are the same on all ranks, through the pipeline as
        Megatron schedules it. What `loss` tells of each comes back where the last stage is. With `backward` gradients
        are computed and summed over ranks."""
        if not micros:
            return []
        mine = self._mine(micros)
        told: list[tuple[MicroBatch, T]] = []
        longest = max(len(micro.packed.tokens) for micro in micros)
        width = self._width(longest) if self._even else None
        step = partial(self._forward, loss, told, width)
        with at_home():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(mine) for _ in self.called],
                model=self.called,
                num_microbatches=len(mine),
                seq_length=width or self.chunks[0].row(longest),
                micro_batch_size=1,
                forward_only=not backward,
            )
        return told

    def _mine(self, micros: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        """Those of this rank, and whether each counts: all ranks have as many, some of them in vain."""
        data, stages = self.plan.place.data, self.plan.parallel.pipeline
        each = -(-len(micros) // data.size)
        if self.plan.parallel.virtual_pipeline > 1:
            each = -(-each // stages) * stages
        own = list(micros[data.rank :: data.size])
        return [(micro, True) for micro in own] + [(micros[0], False)] * (each - len(own))

    @property
    def _even(self) -> bool:
        """Whether all rows are filled up to one length: as it is asked for, where stages hold several parts and can't
        tell each other lengths, and where all ranks send all their tokens to all experts."""
        options, parallel = self.plan.options, self.plan.parallel
        everywhere = options.moe_token_dispatcher_type == "allgather" and parallel.expert > 1  # noqa: S105
        return not options.variable_seq_lengths or parallel.virtual_pipeline > 1 or everywhere

    def _width(self, longest: int) -> int:
        return self.chunks[0].row(max(longest, self.plan.options.seq_length or 0))

    def _forward(
        self,
        loss: Loss[T],
        told: list[tuple[MicroBatch, T]],
        width: int | None,
        micros: Iterator[tuple[MicroBatch, bool]],
        stage: nn.Module,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, None]]]:
        """A stage's forward pass as Megatron's schedules call it."""
        micro, counts = next(micros)

        def measure(hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            value, what = loss(micro, hidden)
            if counts:
                told.append((micro, what))
            return value * (float(counts) / self.plan.parallel.context), torch.ones((), dtype=torch.int), None

        return stage(micro.packed.to(device()), width), measure

    def hidden(self, micros: Sequence[MicroBatch]) -> dict[int, Tensor]:
        """Hidden states at the sources of this rank's micro-batches, under the micro-batch's `id`, where the last
        stage is; without gradients."""

        def keep(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return hidden.new_zeros(()), hidden

        with torch.no_grad():
            return {id(micro): hidden for micro, hidden in self.run(micros, keep, backward=False)}

    def measures(
        self,
        packed: Packed,
        hidden: Tensor,
        temperature: float,
        other: tuple[Model, Tensor] | None = None,
        *,
        swapped: bool = False,
        squared_mass: bool = False,
    ) -> TokenMeasures:
        """Log-probs, entropy and the rest from hidden states on the last stage; `other` is another model with its own
        hidden states there."""
        last = self.chunks[-1]
        return measure_tokens(
            hidden,
            packed.targets.to(hidden.device),
            last.head,
            last.own_tokens,
            temperature=temperature,
            other=None if other is None else (other[1], other[0].chunks[-1].head),
            swapped=swapped,
            squared_mass=squared_mass,
        )

    @cached_property
    def shell(self) -> PreTrainedModel:
        """What transformers makes of the configuration, without memory for weights."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            shell: PreTrainedModel = AutoModelForCausalLM.from_config(self.plan.hf, dtype=torch.float32)
        shell.generation_config = self.plan.generation
        return shell
