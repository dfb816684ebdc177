"""How policy and critic learn: optimizer, micro-batches, and how one learner lies on several devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.capability import Capability, Waits
from quintet.config.native.megatron import MegatronConfig
from quintet.config.native.section import Count, DecayRate, NonNegative, Section, Share

__all__ = [
    "ActorConfig",
    "BudgetConfig",
    "CriticConfig",
    "LearnerConfig",
    "MemoryConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ReferenceConfig",
    "ShardingConfig",
]

Backend = Literal["fsdp", "fsdp2", "megatron"]
Precision = Literal["float32", "bfloat16", "float16"]
WidePrecision = Literal["float64", "float32", "bfloat16", "float16"]
OwnPrecision = Literal["float32", "bfloat16", "float16", "auto"]


class OptimizerConfig(Section):
    """AdamW, linear warm-up, then constant, linear or cosine decay."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """Which optimizer; `sgd` is plain gradient descent, without momentum. `muon` orthogonalises the steps of the
    matrices between embedding and head, scaled so that AdamW's learning rates hold; the rest has AdamW."""
    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Steps from `warmup_start` to `learning_rate`: of reinforcement learning, whose optimizer steps within one all
    have the same rate, else optimizer steps."""
    warmup_ratio: Share = 0.0
    """The same as a share of all steps, where `warmup_steps` is 0."""
    warmup_start: NonNegative = 0.0
    """Learning rate with which the warm-up begins."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_square_root"] = "linear"
    """Decay after the warm-up."""
    decay_steps: PositiveInt | None = None
    """Steps until the decay ends; null takes all."""
    cycles: PositiveFloat = 0.5
    """Waves of the cosine."""
    stable_decay: Literal["constant", "exponential", "cosine", "linear", "minus_sqrt"] = "exponential"
    """How `wsd` decays at its end."""
    stable_decay_steps: PositiveInt | None = None
    """Steps of that decay; null takes a tenth of all."""
    min_learning_rate_ratio: Share = 0.1
    """Share of `learning_rate` left at the end."""
    betas: Annotated[tuple[DecayRate, DecayRate], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's term for stability."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's decoupled weight decay."""
    weight_decay_start: NonNegative | None = None
    """Weight decay at the first step; null has `weight_decay` throughout."""
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it goes from there to `weight_decay`, over all steps; `constant` has that throughout."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""


class BudgetConfig(Section):
    """What one forward pass on one device may hold; where both are null, `training.micro_batch_tokens` holds."""

    sequences: PositiveInt | None = None
    """At most so many sequences; null for no limit of that kind."""
    tokens: PositiveInt | None = None
    """At most so many tokens; null for no limit of that kind."""


class ParallelConfig(Section):
    """How many devices share one model, and what they share out."""

    tensor: PositiveInt = 1
    """Devices among which each layer is split; not with `fsdp`."""
    pipeline: PositiveInt = 1
    """Groups of devices among which the layers are shared out; not with `fsdp`, and not with adapters."""
    virtual_pipeline: PositiveInt = 1
    """Parts of the layers that each of those groups holds."""
    context: PositiveInt = 1
    """Devices among which each sequence is split; each gathers the keys and values of all."""
    expert: PositiveInt = 1
    """Devices among which the experts are shared out, neighbours of those that see different tokens; not with `fsdp`.
    How tokens reach them is `megatron.moe_token_dispatcher_type`."""
    sequence: bool = False
    """Norms and dropout of tensor-parallel layers are split along the sequence."""
    ulysses: PositiveInt = 1
    """Devices among which each sequence is split, by heads."""


class ShardingConfig(Section):
    """FSDP and FSDP2: who holds which part of the weights, and when they are fetched."""

    group_size: PositiveInt | None = None
    """Devices that share one copy of the weights; null takes all, fewer than all give hybrid sharding."""
    policy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"] = "full_shard"
    """What is shared out: weights, gradients and optimizer; the latter two; or nothing."""
    min_parameters: Count = 0
    """Modules with at least so many parameters are units of their own; 0 takes the model's layers."""
    parameter_dtype: WidePrecision | None = None
    """Type in which weights are gathered and multiplied; null takes `policy.dtype`."""
    reduce_dtype: WidePrecision | None = "float32"
    """Type in which gradients are summed; null takes that of the weights."""
    buffer_dtype: Precision = "float32"
    """Type of buffers."""
    reshard_after_forward: bool | None = None
    """Weights are given back after the forward pass; null does so everywhere but at the root."""
    sync_every_micro_batch: bool = False
    """Gradients are summed over devices after each micro-batch rather than once at the end."""
    forward_prefetch: bool = False
    """The next layer's weights are fetched while this one computes, going forward …"""
    backward_prefetch: Literal["pre", "post"] | None = None
    """… and going back, before or after this one's gradients."""
    limit_all_gathers: bool = False
    """No more than two layers' weights are under way."""
    keep_original_parameters: bool = False
    """The optimizer sees the model's own parameters rather than flat ones."""
    grad_scaler: bool = False
    """Losses are scaled up so that float16 gradients don't vanish."""
    grad_scaler_start: PositiveFloat | None = None
    """The first such factor; null takes torch's."""
    grad_scaler_growth_steps: PositiveInt | None = None
    """Steps without overflow after which it grows; null takes torch's."""
    autocast: Precision | None = None
    """Type of matrix products under torch's autocast; null leaves them to `policy.dtype`."""


class MemoryConfig(Section):
    """What is moved away or computed again to save memory."""

    offload_parameters: bool = False
    """Weights move from the GPU to main memory while others compute. On a CPU they are there already; and where the
    embedded engine plays with the same weights, they stay."""
    offload_optimizer: bool = False
    """The optimizer's moments do."""
    offload_gradients: bool = False
    """Gradients do: they are given back after every optimizer step, with or without it."""
    offload_activations: bool = False
    """Activations do, until the backward pass wants them; on a CPU they are there already."""
    sharded_offload: bool = False
    """FSDP keeps its shards in main memory at all times and fetches what it computes with."""
    pin: bool = False
    """Main memory for what is moved is pinned, which copies faster and can't be swapped out; needs CUDA."""
    liger: bool = False
    """Liger's fused kernels, which need the package `liger-kernel` and a GPU."""
    remove_padding: bool = True
    """Sequences are computed end to end. They are so without it, too: filling them up to the longest would change
    the time and not the result."""
    torch_compile: bool = False
    """Log-probs, entropy and divergences are compiled by torch where no kernel of our own computes them, as on a CPU.
    That needs a C++ compiler there and Triton on a GPU: without one they are computed as they are, and the log says so.
    A critic has none."""
    padding_side: Literal["left", "right"] = "right"
    """Where sequences are filled up, where something fills them up: no learner here does."""


class LearnerConfig(Section):
    """What actor, critic and reference have in common: where their weights lie and what one pass may hold."""

    backend: Backend = "fsdp2"
    """What spreads the learner over several devices; on one device nothing is spread."""
    parallel: ParallelConfig = ParallelConfig()
    """How many devices share one model."""
    sharding: ShardingConfig = ShardingConfig()
    """How FSDP shares it out."""
    memory: MemoryConfig = MemoryConfig()
    """What saves memory."""
    megatron: MegatronConfig | None = None
    """Options of Megatron by its own names; null leaves them all as they are."""
    inference_budget: BudgetConfig = BudgetConfig()
    """What a pass without gradients may hold."""


class ActorConfig(LearnerConfig):
    """How the policy learns."""

    budget: BudgetConfig = BudgetConfig()
    """What a pass with gradients may hold."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=6e-4, betas=(0.9, 0.99), max_grad_norm=0.4)
    """Steps and schedule."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    shuffle: bool = True
    """Games are dealt anew into mini-batches at each pass."""
    shuffle_seed: Count | None = None
    """Of that shuffling; null takes the run's."""
    balance_ranks: bool = False
    """Passes are cut so that all data-parallel ranks have as many of them, of about as many tokens. Changes the time
    and not the result."""


class CriticConfig(LearnerConfig):
    """The value model of `gae` and `bi_level_gae`; it starts from the policy's own weights."""

    budget: BudgetConfig = BudgetConfig()
    """What a pass with gradients may hold."""
    path: str | None = None
    """Model directory that the critic starts from; null takes the policy's."""
    dtype: OwnPrecision | None = None
    """Type of its matrix products; its optimizer keeps float32 weights. null takes `policy.dtype`, `auto` the one that
    its own configuration names."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-4)
    """Steps and schedule."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass; null does as the actor does."""
    shares_policy: Annotated[bool, Waits(Capability.EMBODIED)] = False
    """Values come from a head on the policy's own hidden states rather than from a model of their own."""
    value_clip: PositiveFloat | None = 0.5
    """New values stay within this distance of the old ones in the loss; null doesn't clip."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which only the critic learns."""


class ReferenceConfig(LearnerConfig):
    """Where the reference of `algorithm.kl` lies."""

    path: str | None = None
    """Model directory of a reference, or a teacher, that isn't the policy itself; null takes the policy as
    reinforcement learning finds it."""
    dtype: OwnPrecision | None = None
    """Type of its weights and of its matrix products; null keeps the weights as the learner has them and multiplies in
    `policy.dtype`, `auto` takes the type that its own configuration names."""
