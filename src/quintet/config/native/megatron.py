"""Options of the Megatron learner."""

from typing import Literal

from pydantic import PositiveInt

from quintet.config.native.section import Count, ListOf, Section


class ConversionConfig(Section):
    """Conversion of a Hugging Face directory to Megatron weights before the run."""

    model: str | None = None
    """Name of the architecture; null uses that of `config.json`."""
    source: str | None = None
    """Hugging Face directory; null uses `policy.path`."""
    target: str | None = None
    """Directory of the converted weights; null does not store them."""
    devices: Count | None = 0
    """Number of devices for the conversion; 0 converts on the CPU, null uses all."""
    device_ranks: ListOf[Count] | None = None
    """Device numbers; null uses the first ones."""
    processes: PositiveInt = 1
    """Number of conversion processes."""
    tensor_parallel: PositiveInt | None = None
    """Tensor-parallel size of the converted weights; null uses that of the learner."""
    pipeline_parallel: PositiveInt | None = None
    """Pipeline-parallel size of the converted weights; null uses that of the learner."""


class MegatronConfig(Section):
    """Options of the Megatron learner under their Megatron names."""

    spec_name: Literal["decoder_gpt", "local_gpt", "te_gpt"] | None = None
    """Implementation of layers; null uses the fastest installed. `te_gpt` needs Transformer Engine."""
    mcore_gpt: bool = True
    """Use Megatron Core's model; the only supported value is true."""
    add_bias_linear: bool = False
    """Biases in linear layers; must match the weights."""
    activation: str = "swiglu"
    """Activation function of the MLP; must match the weights."""
    normalization: Literal["rmsnorm", "layernorm", "layernorm1p"] = "rmsnorm"
    """Normalization; must match the weights."""
    position_embedding_type: Literal["rope", "mrope", "yarn", "learned_absolute", "none"] = "rope"
    """Position embedding; must match the weights."""
    seq_length: PositiveInt | None = None
    """Minimum tokens that a pass is padded to if lengths are not variable; null uses the longest sequence."""
    encoder_seq_length: PositiveInt | None = None
    """Sequence length of an encoder. No supported model has one: only null is accepted."""
    variable_seq_lengths: bool = True
    """Passes of variable length; otherwise all passes of a step are padded to the longest, as always with a virtual
    pipeline."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations of whole layers (`full`) or of attention (`selective`); null recomputes none."""
    recompute_method: Literal["block", "uniform"] | None = None
    """Recompute the first `recompute_num_layers` layers (`block`), or all layers in units of that size (`uniform`)."""
    recompute_num_layers: PositiveInt | None = None
    """Number of layers, see `recompute_method`."""
    moe_layer_recompute: bool = False
    """Recompute activations of expert layers."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "alltoall_seq", "flex"] = "alltoall"  # noqa: S105
    """Token dispatcher of experts; `flex` needs CUDA and DeepEP."""
    moe_grouped_gemm: bool = False
    """Multiply all experts of a device in one kernel; needs CUDA."""
    moe_shared_expert_overlap: bool = False
    """Overlap the shared expert with token dispatch; needs CUDA."""
    apply_rope_fusion: bool = False
    """Fused rotary embeddings; needs CUDA and Transformer Engine."""
    bias_dropout_fusion: bool = False
    """Fused bias and dropout."""
    bias_activation_fusion: bool = False
    """Fused bias and activation."""
    gradient_accumulation_fusion: bool = False
    """Accumulate weight gradients in the kernel that computes them; needs CUDA and Apex."""
    persist_layer_norm: bool = False
    """Persistent layer norm kernel; needs CUDA and Apex."""
    attention_softmax_in_fp32: bool = False
    """Softmax of attention in float32."""
    batch_p2p_comm: bool = False
    """Batch sends and receives of pipeline stages."""
    use_cpu_initialization: bool = False
    """Initialize weights on the CPU."""
    use_distributed_optimizer: bool = False
    """Shard optimizer states over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap gathering of weights with the forward pass."""
    overlap_param_gather_with_optimizer_step: bool = False
    """Overlap gathering of weights with the optimizer step; needs a virtual pipeline."""
    optimizer_enable_pin: bool = False
    """Pin memory of the offloaded optimizer; needs CUDA."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Resume the schedules of learning rate and weight decay from the checkpoint, not from the configuration."""
    bf16: bool = False
    """Train in bfloat16; must agree with `policy.dtype`."""
    fp16: bool = False
    """Train in float16; must agree with `policy.dtype`."""
    loss_scale_window: PositiveInt = 5
    """Steps without overflow before the float16 loss scale grows."""
    ddp_bucket_size: PositiveInt | None = None
    """Parameters per bucket of gradient reduction; null leaves it to Megatron."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication backend of ranks that were not started by `torchrun`; null chooses by device."""
    distributed_timeout_minutes: PositiveInt = 30
    """Timeout of communication, minutes."""
    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] | None = None
    """Backend for the bootstrap of tensor-parallel communication buffers."""
    tp_comm_overlap_cfg: str | None = None
    """File with settings for the overlap of tensor-parallel communication; needs CUDA, Transformer Engine and passes of
    fixed length."""
    ckpt_format: Literal["torch", "torch_dist", "zarr", "torch_dcp"] | None = None
    """Checkpoint format of Megatron. Has no effect on Quintet's checkpoints, which are sharded safetensors; `torch`,
    which is unpickled, and `zarr` are refused."""
    use_dist_ckpt: bool = False
    """Let every rank write its shard of a checkpoint; otherwise rank 0 writes everything."""
    checkpoint: str | None = None
    """Initial Megatron weights; null starts from `policy.path`."""
    conversion: ConversionConfig = ConversionConfig()
    """Conversion of `policy.path` to Megatron weights."""
