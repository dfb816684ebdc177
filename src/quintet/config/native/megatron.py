"""Options of the Megatron learner, by the names that Megatron gives them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from quintet.config.capability import Capability, Waits
from quintet.config.native.section import Count, Section

__all__ = ["ConversionConfig", "MegatronConfig"]

Later = Waits(Capability.MEGATRON)


class ConversionConfig(Section):
    """How a Hugging Face directory becomes Megatron's weights before the run."""

    model: Annotated[str | None, Later] = None
    """Name of the model whose layers it has; null asks its `config.json`."""
    source: Annotated[str | None, Later] = None
    """The Hugging Face directory; null takes `policy.path`."""
    target: Annotated[str | None, Later] = None
    """Where the converted weights are stored; null stores none."""
    devices: Annotated[Count | None, Later] = 0
    """Devices that convert; 0 converts on the CPU, null takes all."""
    device_ranks: Annotated[tuple[Count, ...] | None, Field(strict=False), Later] = None
    """Which devices; null takes the first."""
    processes: Annotated[PositiveInt, Later] = 1
    """Processes that convert side by side."""
    tensor_parallel: Annotated[PositiveInt | None, Later] = None
    """Split of the converted weights; null takes the learner's."""
    pipeline_parallel: Annotated[PositiveInt | None, Later] = None
    """Split of the converted weights; null takes the learner's."""


class MegatronConfig(Section):
    """Options of the Megatron learner, by the names that Megatron gives them."""

    spec_name: Annotated[Literal["decoder_gpt", "local_gpt", "te_gpt"] | None, Later] = None
    """Which implementation of layers; null takes the fastest that is installed."""
    mcore_gpt: Annotated[bool, Later] = True
    """Megatron Core's model."""
    add_bias_linear: Annotated[bool, Later] = False
    """Biases in linear layers."""
    activation: Annotated[str, Later] = "swiglu"
    """Non-linearity of the feed-forward layers."""
    normalization: Annotated[Literal["rmsnorm", "layernorm", "layernorm1p"], Later] = "rmsnorm"
    """Which norm."""
    position_embedding_type: Annotated[Literal["rope", "mrope", "yarn", "learned_absolute", "none"], Later] = "rope"
    """How positions are told."""
    seq_length: Annotated[PositiveInt | None, Later] = None
    """Tokens to which sequences are filled up; null takes prompt and reply."""
    encoder_seq_length: Annotated[PositiveInt | None, Later] = None
    """The same of an encoder."""
    variable_seq_lengths: Annotated[bool, Waits(Capability.MEGATRON, (False,))] = True
    """Pipeline stages hand on sequences as long as they are."""
    recompute_granularity: Annotated[Literal["full", "selective"] | None, Later] = None
    """Which activations are computed again: of whole layers, or of attention alone; null of none."""
    recompute_method: Annotated[Literal["block", "uniform"] | None, Later] = None
    """Layers one by one up to `recompute_num_layers`, or in units of so many."""
    recompute_num_layers: Annotated[PositiveInt | None, Later] = None
    """Layers whose activations are computed again."""
    moe_layer_recompute: Annotated[bool, Later] = False
    """Activations of expert layers are computed again."""
    moe_token_dispatcher_type: Annotated[
        Literal["alltoall", "allgather", "alltoall_seq", "flex"],
        Waits(Capability.MEGATRON, ("allgather",)),
    ] = "alltoall"  # noqa: S105
    """How tokens reach their experts."""
    moe_grouped_gemm: Annotated[bool, Later] = False
    """A device's experts are multiplied in one kernel."""
    moe_shared_expert_overlap: Annotated[bool, Later] = False
    """The shared expert computes while tokens travel."""
    apply_rope_fusion: Annotated[bool, Later] = False
    """Rotary embeddings in one kernel."""
    bias_dropout_fusion: Annotated[bool, Later] = False
    """Bias and dropout in one kernel."""
    bias_activation_fusion: Annotated[bool, Later] = False
    """Bias and activation in one kernel."""
    gradient_accumulation_fusion: Annotated[bool, Later] = False
    """Weight gradients are added up in the kernel that makes them."""
    persist_layer_norm: Annotated[bool, Later] = False
    """The persistent kernel of layer norms."""
    attention_softmax_in_fp32: Annotated[bool, Later] = False
    """Attention's softmax in float32."""
    batch_p2p_comm: Annotated[bool, Later] = False
    """Pipeline stages send and receive in one call."""
    use_cpu_initialization: Annotated[bool, Later] = False
    """Weights are made on the CPU."""
    use_distributed_optimizer: Annotated[bool, Later] = False
    """The optimizer's moments are shared out over data-parallel ranks."""
    overlap_grad_reduce: Annotated[bool, Later] = False
    """Gradients are summed over ranks while others are still computed."""
    overlap_param_gather: Annotated[bool, Later] = False
    """Weights are gathered while others are computed with."""
    overlap_param_gather_with_optimizer_step: Annotated[bool, Later] = False
    """Weights are gathered while the optimizer steps."""
    optimizer_enable_pin: Annotated[bool, Later] = False
    """The offloaded optimizer's memory is pinned."""
    use_checkpoint_opt_param_scheduler: Annotated[bool, Later] = False
    """A resumed run takes its schedule from the checkpoint rather than from the configuration."""
    bf16: Annotated[bool, Later] = False
    """The optimizer's view of bfloat16 weights; follows `policy.dtype` in Megatron's own code."""
    fp16: Annotated[bool, Later] = False
    """The same of float16 weights."""
    loss_scale_window: Annotated[PositiveInt, Later] = 5
    """Steps without overflow after which float16's loss scale grows."""
    ddp_bucket_size: Annotated[PositiveInt | None, Later] = None
    """Parameters of which gradients are summed together; null lets Megatron choose."""
    distributed_backend: Annotated[Literal["nccl", "gloo"] | None, Later] = None
    """How ranks talk; null takes what their devices can."""
    distributed_timeout_minutes: Annotated[PositiveInt, Later] = 30
    """Silence after which a rank counts as lost."""
    tp_comm_bootstrap_backend: Annotated[Literal["nccl", "mpi", "gloo"] | None, Later] = None
    """How tensor-parallel ranks find each other."""
    tp_comm_overlap_cfg: Annotated[str | None, Later] = None
    """File that says how tensor-parallel communication overlaps computation."""
    ckpt_format: Annotated[Literal["torch", "torch_dist", "zarr", "torch_dcp"] | None, Later] = None
    """How Megatron stores its own checkpoints."""
    use_dist_ckpt: Annotated[bool, Later] = False
    """Megatron's distributed checkpoints."""
    checkpoint: Annotated[str | None, Later] = None
    """Megatron weights to start from; null starts from `policy.path`."""
    conversion: ConversionConfig = ConversionConfig()
    """How those of `policy.path` become Megatron's."""
