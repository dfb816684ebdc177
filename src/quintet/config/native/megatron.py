"""Options of the Megatron learner, by the names that Megatron gives them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from quintet.config.native.section import Count, Section

__all__ = ["ConversionConfig", "MegatronConfig"]


class ConversionConfig(Section):
    """How a Hugging Face directory becomes Megatron's weights before the run."""

    model: str | None = None
    """Name of the model whose layers it has; null asks its `config.json`."""
    source: str | None = None
    """The Hugging Face directory; null takes `policy.path`."""
    target: str | None = None
    """Where the converted weights are stored; null stores none."""
    devices: Count | None = 0
    """Devices that convert; 0 converts on the CPU, null takes all."""
    device_ranks: Annotated[tuple[Count, ...] | None, Field(strict=False)] = None
    """Which devices; null takes the first."""
    processes: PositiveInt = 1
    """Processes that convert side by side."""
    tensor_parallel: PositiveInt | None = None
    """Split of the converted weights; null takes the learner's."""
    pipeline_parallel: PositiveInt | None = None
    """Split of the converted weights; null takes the learner's."""


class MegatronConfig(Section):
    """Options of the Megatron learner, by the names that Megatron gives them."""

    spec_name: Literal["decoder_gpt", "local_gpt", "te_gpt"] | None = None
    """Which implementation of layers; null takes the fastest that is installed. `te_gpt` needs Transformer Engine."""
    mcore_gpt: bool = True
    """Megatron Core's model; there is no other."""
    add_bias_linear: bool = False
    """Biases in linear layers; it must be so in the weights."""
    activation: str = "swiglu"
    """Non-linearity of the feed-forward layers; it must be that of the weights."""
    normalization: Literal["rmsnorm", "layernorm", "layernorm1p"] = "rmsnorm"
    """Which norm; it must be that of the weights."""
    position_embedding_type: Literal["rope", "mrope", "yarn", "learned_absolute", "none"] = "rope"
    """How positions are told; it must be so in the weights."""
    seq_length: PositiveInt | None = None
    """Tokens to which a pass is filled up at least where lengths aren't variable; null takes those of the longest."""
    encoder_seq_length: PositiveInt | None = None
    """The same of an encoder, which no model here has: only null is taken."""
    variable_seq_lengths: bool = True
    """Passes are as long as they are; without it all of a step are filled up to the longest, as they are where a stage
    has several parts."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Which activations are computed again: of whole layers, or of attention alone; null of none."""
    recompute_method: Literal["block", "uniform"] | None = None
    """Layers one by one up to `recompute_num_layers`, or in units of so many."""
    recompute_num_layers: PositiveInt | None = None
    """Layers whose activations are computed again."""
    moe_layer_recompute: bool = False
    """Activations of expert layers are computed again."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "alltoall_seq", "flex"] = "alltoall"  # noqa: S105
    """How tokens reach their experts; `flex` needs CUDA and DeepEP."""
    moe_grouped_gemm: bool = False
    """A device's experts are multiplied in one kernel; needs CUDA."""
    moe_shared_expert_overlap: bool = False
    """The shared expert computes while tokens travel; needs CUDA."""
    apply_rope_fusion: bool = False
    """Rotary embeddings in one kernel; needs CUDA and Transformer Engine."""
    bias_dropout_fusion: bool = False
    """Bias and dropout in one kernel."""
    bias_activation_fusion: bool = False
    """Bias and activation in one kernel."""
    gradient_accumulation_fusion: bool = False
    """Weight gradients are added up in the kernel that makes them; needs CUDA and Apex."""
    persist_layer_norm: bool = False
    """The persistent kernel of layer norms; needs CUDA and Apex."""
    attention_softmax_in_fp32: bool = False
    """Attention's softmax in float32."""
    batch_p2p_comm: bool = False
    """Pipeline stages send and receive in one call."""
    use_cpu_initialization: bool = False
    """Weights are made on the CPU."""
    use_distributed_optimizer: bool = False
    """The optimizer's moments are shared out over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Gradients are summed over ranks while others are still computed."""
    overlap_param_gather: bool = False
    """Weights are gathered while others are computed with."""
    overlap_param_gather_with_optimizer_step: bool = False
    """Weights are gathered while the optimizer steps; needs a virtual pipeline."""
    optimizer_enable_pin: bool = False
    """The offloaded optimizer's memory is pinned; needs CUDA."""
    use_checkpoint_opt_param_scheduler: bool = False
    """A resumed run takes the policy's schedules of learning rate and weight decay from the checkpoint rather than from
    the configuration."""
    bf16: bool = False
    """The optimizer's view of bfloat16 weights; follows `policy.dtype` in Megatron's own code."""
    fp16: bool = False
    """The same of float16 weights."""
    loss_scale_window: PositiveInt = 5
    """Steps without overflow after which float16's loss scale grows."""
    ddp_bucket_size: PositiveInt | None = None
    """Parameters of which gradients are summed together; null lets Megatron choose."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """How ranks talk that weren't started by `torchrun`; null takes what their devices can."""
    distributed_timeout_minutes: PositiveInt = 30
    """Silence after which a rank counts as lost."""
    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] | None = None
    """How tensor-parallel ranks find each other."""
    tp_comm_overlap_cfg: str | None = None
    """File that says how tensor-parallel communication overlaps computation; needs CUDA, Transformer Engine and passes
    of one length."""
    ckpt_format: Literal["torch", "torch_dist", "zarr", "torch_dcp"] | None = None
    """How Megatron stores its own checkpoints. Quintet's are safetensors by pieces whatever is given; `torch`, which is
    unpickled, and `zarr` are refused."""
    use_dist_ckpt: bool = False
    """Every rank writes its share of a checkpoint; without it the first writes all."""
    checkpoint: str | None = None
    """Megatron weights to start from; null starts from `policy.path`."""
    conversion: ConversionConfig = ConversionConfig()
    """How those of `policy.path` become Megatron's."""
