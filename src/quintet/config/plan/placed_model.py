"""Model of a component on its devices, and what a learner trains: the input of estimates of memory and time."""

from dataclasses import dataclass, replace
from typing import Any

from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.policy import LoraConfig
from quintet.config.plan.batches import RankWorkload, rank_workload, warm_start_workload
from quintet.config.plan.model_shapes import ModelShape
from quintet.config.plan.parallelism import Parallelism
from quintet.config.plan.placement import Component, learner_section

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """Model of a component on its devices."""

    config: Experiment
    component: Component
    shape: ModelShape
    device_bytes: int | None = None
    """Memory of one device, for `memory_share` of an engine; None if unknown."""
    max_requests: int | None = None
    """Maximum requests of the engines at a time; None if only `rollout.max_concurrent` limits them."""

    @property
    def learner(self) -> Any:
        """Section of a learner."""
        return getattr(self.config, learner_section(self.component.name))

    @property
    def lora(self) -> LoraConfig | None:
        """Adapters that a learner trains, None if it trains all weights."""
        if self.component.name == "critic":
            return None
        stage = self.config.sft_only
        return self.config.policy.lora if stage is None else stage.lora

    @property
    def optimizer(self) -> OptimizerConfig:
        """Optimizer of a learner."""
        stage = self.config.sft_only
        optimizer: OptimizerConfig = self.learner.optimizer if stage is None else stage.optimizer
        return optimizer

    @property
    def requests(self) -> int:
        """Maximum requests of one engine at a time."""
        rollout = self.config.rollout
        slots = rollout.max_concurrent
        if rollout.engine_options.prompts_per_device is not None:
            slots = min(slots, rollout.engine_options.prompts_per_device * self.config.samples_per_prompt)
        if self.max_requests is None or rollout.engine != "hf":
            return slots
        return min(slots, -(-self.max_requests // self.component.copies))

    @property
    def parallelism(self) -> Parallelism:
        return self.component.parallelism

    @property
    def fsdp_shards(self) -> int:
        """Number of devices that FSDP shards the model over."""
        policy, devices = self.learner.sharding.policy, self.component.num_processes
        if policy == "no_shard":
            return 1
        node = self.config.placement.devices_per_node if policy == "hybrid_shard" else devices
        # ranks of a group hold the same slices of layers and the same pipeline stage
        group = self.parallelism.group
        return min(devices, group * self.parallelism.weight_split if group else node)

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer, without the experts on other devices."""
        experts, layer = self.shape.experts, self.shape.largest_layer
        return layer - self.remote_experts // (self.shape.layers - experts.dense_layers) if experts else layer

    @property
    def gathered(self) -> int:
        """Parameters that FSDP gathers at a time: two layers, embedding and head."""
        return 2 * self.largest_layer + self.shape.embedding + self.shape.head

    @property
    def remote_experts(self) -> int:
        """Parameters of the experts that expert parallelism keeps on other devices."""
        return self.shape.routed - self.shape.routed // self.parallelism.expert

    @property
    def reduction_width(self) -> int:
        """Bytes per gradient when ranks reduce it."""
        sharding = self.learner.sharding
        is_megatron = self.learner.backend == "megatron"
        return 4 if is_megatron else self.width(sharding.reduce_dtype or sharding.parameter_dtype)

    def width(self, *types: str | None) -> int:
        """Return the bytes per number of the first type that is set, otherwise the policy's; `auto` is the model's."""
        dtype = next((dtype for dtype in types if dtype is not None), self.config.policy.dtype)
        return BYTES.get(self.shape.dtype if dtype == "auto" else dtype, 4)

    def local_tokens(self, tokens: int) -> int:
        """Return the tokens that one of the devices that share a sequence computes."""
        return -(-tokens // (self.parallelism.context * self.parallelism.ulysses))

    def local_parameters(self, parameters: int) -> int:
        """Return the parameters that one device computes with.

        Tensor and pipeline parallelism split the model, expert parallelism its experts. The first pipeline stage is the
        largest: it has the embedding.
        """
        shape, pipeline = self.shape, self.parallelism.pipeline
        layers = parameters - shape.routed - shape.embedding - shape.head
        routed = shape.routed // (self.parallelism.expert * pipeline)
        ends = shape.embedding + (shape.head if pipeline == 1 else 0)
        return (layers // pipeline + routed + ends) // self.parallelism.tensor


def lora_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    """Return the parameters of LoRA: rank × (inputs + outputs) per adapted layer. Experts have no adapters."""
    dense = shape.experts.dense_layers if shape.experts else shape.layers
    linears = [(shape.layers, shape.attention_linears), (dense, shape.mlp_linears)]
    all_linear = "all-linear" in lora.target_modules
    return sum(
        count * lora.rank * (inputs + outputs)
        for count, named in linears
        for name, (inputs, outputs) in named.items()
        if all_linear or name in lora.target_modules
    )


def learner_parameters(placed: PlacedModel) -> tuple[int, int]:
    """Return the parameters of a learner's model without adapters, and those that are trained."""
    shape = placed.shape
    parameters = shape.body + shape.hidden + 1 if placed.component.name == "critic" else shape.parameters
    return parameters, parameters if placed.lora is None else lora_parameters(shape, placed.lora)


def learner_work(placed: PlacedModel) -> RankWorkload:
    """Return the work of a rank in an update, with the larger micro-batches of training and warm start."""
    name, ranks = placed.component.name, placed.component.copies
    work = rank_workload(placed.config, name, ranks)
    warm_start = warm_start_workload(placed.config, ranks) if name == "actor" else None
    if warm_start is None:
        return work
    return replace(
        work,
        **{
            part: max(getattr(work, part), getattr(warm_start, part))
            for part in ("tokens_per_micro_batch", "predicted_tokens_per_micro_batch", "micro_batches")
        },
    )
