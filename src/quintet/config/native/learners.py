"""Learners: optimizer, micro-batches, parallelism, sharding and memory."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.capabilities import Capability, Requires
from quintet.config.native.megatron import MegatronConfig
from quintet.config.native.section import Count, DecayRate, NonNegative, Section, Share

Precision = Literal["float32", "bfloat16", "float16"]
WidePrecision = Literal["float64", "float32", "bfloat16", "float16"]
ModelPrecision = Literal["float32", "bfloat16", "float16", "auto"]


FURTHER_BACKENDS = ("veomni", "torchtitan", "automodel", "mindspeed", "fsdp_turbo", "mlite")
"""Training backends of verl that this version does not have."""


class OptimizerConfig(Section):
    """Optimizer and learning rate schedule: linear warm-up, then decay."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """Optimizer; `sgd` has no momentum. `muon` orthogonalizes the updates of matrices other than embedding and head,
    scaled for AdamW's learning rates; other weights use AdamW."""
    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate. If it is not set, a policy with `policy.path` has 1e-06 in reinforcement learning, and 1e-05
    in `critic`, `warm_start` and `sft`; ten times as much with LoRA. A new policy has 0.001 in `sft`."""
    warmup_steps: Count = 5
    """Steps from `warmup_start` to `learning_rate`: training steps in reinforcement learning, whose updates within a
    step have the same rate, otherwise optimizer steps."""
    warmup_ratio: Share = 0.0
    """Warm-up as a share of all steps if `warmup_steps` is 0."""
    warmup_start: NonNegative = 0.0
    """Learning rate at the start of the warm-up."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_square_root"] = "linear"
    """Decay after the warm-up."""
    decay_steps: PositiveInt | None = None
    """Steps until the end of the decay; null uses all."""
    cycles: PositiveFloat = 0.5
    """Cycles of the cosine."""
    stable_decay: Literal["constant", "exponential", "cosine", "linear", "minus_sqrt"] = "exponential"
    """Final decay of `wsd`."""
    stable_decay_steps: PositiveInt | None = None
    """Steps of that decay; null uses a tenth of all."""
    min_learning_rate_ratio: Share = 0.1
    """Final learning rate as a share of `learning_rate`."""
    betas: Annotated[tuple[DecayRate, DecayRate], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    weight_decay_start: NonNegative | None = None
    """Weight decay at the first step; null uses `weight_decay`."""
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule from `weight_decay_start` to `weight_decay` over all steps; `constant` has `weight_decay` throughout."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global norm of gradients, to which they are clipped."""
    skip_above_grad_norm: PositiveFloat | None = None
    """Global norm of gradients, before clipping, above which an update is skipped, as one that is not finite is; null
    skips none."""


class BudgetConfig(Section):
    """Limits of one micro-batch on one device; if both are null, `training.micro_batch_tokens` applies."""

    sequences: PositiveInt | None = None
    """Maximum number of sequences; null sets no limit."""
    tokens: PositiveInt | None = None
    """Maximum number of tokens; null sets no limit."""


class ParallelConfig(Section):
    """Parallel degrees."""

    tensor: PositiveInt = 1
    """Tensor-parallel size; not with `fsdp`."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size; not with `fsdp`, and not with LoRA."""
    virtual_pipeline: PositiveInt = 1
    """Virtual pipeline stages per device."""
    context: PositiveInt = 1
    """Context-parallel size: number of devices that share a sequence; each device gathers the keys and values of the
    others."""
    expert: PositiveInt = 1
    """Expert-parallel size, over neighbouring data-parallel ranks; not with `fsdp`.
    `megatron.moe_token_dispatcher_type` sets how tokens reach their experts."""
    sequence: bool = False
    """Sequence parallelism: split norms and dropout of tensor-parallel layers along the sequence."""
    ulysses: PositiveInt = 1
    """Ulysses-parallel size: devices that each sequence is split over, with attention split by heads."""


class ShardingConfig(Section):
    """Sharding under FSDP and FSDP2."""

    group_size: PositiveInt | None = None
    """Devices per sharding group; null uses all, fewer than all is hybrid sharding."""
    policy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"] = "full_shard"
    """What is sharded: weights, gradients and optimizer (`full_shard`); gradients and optimizer (`shard_grad_op`);
    everything within a node (`hybrid_shard`); nothing (`no_shard`)."""
    min_parameters: Count = 0
    """Minimum parameters of a module to be a sharding unit; 0 shards by layer."""
    parameter_dtype: WidePrecision | None = None
    """Type of gathered weights and matrix products; null uses `policy.dtype`."""
    reduce_dtype: WidePrecision | None = "float32"
    """Type of gradient reduction; null uses the type of the weights."""
    buffer_dtype: Precision = "float32"
    """Type of buffers."""
    reshard_after_forward: bool | None = None
    """Reshard weights after the forward pass; null does so for all units but the root."""
    sync_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch, not once per optimizer step."""
    forward_prefetch: bool = False
    """Prefetch weights of the next layer in the forward pass."""
    backward_prefetch: Literal["pre", "post"] | None = None
    """Prefetch weights of the next layer in the backward pass, before (`pre`) or after (`post`) the gradients of the
    current one; null does not."""
    limit_all_gathers: bool = False
    """Gather weights of at most two layers at a time."""
    keep_original_parameters: bool = False
    """Give the optimizer the model's original parameters instead of flat ones."""
    grad_scaler: bool = False
    """Scale losses to avoid underflow of float16 gradients."""
    grad_scaler_start: PositiveFloat | None = None
    """Initial scale; null uses torch's default."""
    grad_scaler_growth_steps: PositiveInt | None = None
    """Steps without overflow before the scale grows; null uses torch's default."""
    autocast: Precision | None = None
    """Type of matrix products under torch's autocast; null disables autocast."""


class MemoryConfig(Section):
    """Offloading, compilation and other memory options."""

    offload_parameters: bool = False
    """Offload weights to host memory while other components compute. Has no effect on a CPU, or on weights shared with
    the embedded engine."""
    offload_optimizer: bool = False
    """Offload optimizer states to host memory while other components compute."""
    offload_gradients: bool = False
    """Offload gradients. Has no effect: gradients are freed after every optimizer step."""
    offload_activations: bool = False
    """Offload activations until the backward pass. Has no effect on a CPU."""
    sharded_offload: bool = False
    """Keep FSDP shards in host memory at all times and load them layer by layer."""
    pin: bool = False
    """Pin host memory of offloaded tensors for faster copies; needs CUDA."""
    liger: bool = False
    """Use fused kernels of Liger; needs the package `liger-kernel` and a GPU."""
    remove_padding: bool = True
    """Pack sequences without padding. Has no effect: sequences are always packed, and padding would only change the
    time."""
    torch_compile: bool = False
    """Compile log-probs, entropy and KL divergence with torch where no custom kernel exists, as on a CPU. Needs a C++
    compiler on a CPU, Triton on a GPU; otherwise they run uncompiled, with a warning. Not used by critics."""
    padding_side: Literal["left", "right"] = "right"
    """Side of padding. Has no effect: learners do not pad."""


class LearnerConfig(Section):
    """Options common to actor, critic and reference."""

    backend: Annotated[str, Requires(Capability.BACKENDS, unsupported=FURTHER_BACKENDS)] = "fsdp2"
    """Backend for several devices: `fsdp2`, `fsdp`, `megatron`, or one that another package registers."""
    parallel: ParallelConfig = ParallelConfig()
    """Parallel degrees."""
    sharding: ShardingConfig = ShardingConfig()
    """Sharding under FSDP."""
    memory: MemoryConfig = MemoryConfig()
    """Memory options."""
    megatron: MegatronConfig | None = None
    """Options of Megatron under its own names; null uses the defaults."""
    inference_budget: BudgetConfig = BudgetConfig()
    """Limits of forward-only micro-batches."""


class ActorConfig(LearnerConfig):
    """Training of the policy."""

    budget: BudgetConfig = BudgetConfig()
    """Limits of training micro-batches."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=6e-4, betas=(0.9, 0.99), max_grad_norm=0.4)
    """Optimizer and schedule."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    shuffle: bool = True
    """Shuffle episodes into mini-batches in each epoch."""
    shuffle_seed: Count | None = None
    """Seed of the shuffling; null uses `seed`."""
    balance_ranks: bool = True
    """Form micro-batches so that all data-parallel ranks have equally many of similar size. Affects the time, not the
    result."""


class CriticConfig(LearnerConfig):
    """Training of the critic, which starts from the weights of the policy."""

    budget: BudgetConfig = BudgetConfig()
    """Limits of training micro-batches."""
    path: str | None = None
    """Initial model directory; null uses that of the policy."""
    dtype: ModelPrecision | None = None
    """Type of matrix products; the optimizer keeps float32 weights. null uses `policy.dtype`, `auto` the type in the
    model's configuration."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-4)
    """Optimizer and schedule."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass; null uses the setting of the actor."""
    shares_policy: bool = False
    """Use a value head on the hidden states of the policy instead of a separate model."""
    value_clip: PositiveFloat | None = 0.5
    """Maximum distance between new and old values in the loss; null does not clip."""
    huber_delta: PositiveFloat | None = None
    """Error above which the loss of a value is linear instead of quadratic (Huber loss), in runs on simulators; null
    keeps it quadratic."""
    warmup_steps: Count = 0
    """Training steps in which only the critic is updated."""


class ReferenceConfig(LearnerConfig):
    """Reference policy, or teacher."""

    path: str | None = None
    """Model directory of another reference, or of a teacher; null uses the policy at the start of reinforcement
    learning."""
    dtype: ModelPrecision | None = None
    """Type of weights and matrix products; null keeps the type of the learner's weights and multiplies in
    `policy.dtype`, `auto` takes the type in the model's configuration."""
