"""Megatron Core's configuration classes from quintet's configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig

from quintet.config.checks.megatron import (
    SUPPORTED_MODELS,
    UnsupportedMegatronOption,
    conflicting_megatron_options,
    has_transformer_engine,
    unsupported_architecture,
    unsupported_megatron_options,
)
from quintet.config.divisors import divisors
from quintet.config.native.learners import OptimizerConfig, ParallelConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.errors import ConfigError

ACTIVATIONS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "gelu": (F.gelu, False),
    "geglu": (F.gelu, True),
    "reglu": (F.relu, True),
    "swiglu": (F.silu, True),
    "squared-relu": (lambda x: F.relu(x).square(), False),
    "approx-gelu": (lambda x: F.gelu(x, approximate="tanh"), False),
}
"""Function, and whether it is gated. The prefix `fast-` selects the fused form."""

GATED_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
"""Megatron's name by `hidden_act` of a gated Hugging Face model."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Features of the layers of a Hugging Face architecture."""

    name: str
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0


def model_family(hf_config: Any) -> ModelFamily:
    """Return the family of a Hugging Face model configuration.

    Raises:
        ConfigError: the Megatron backend does not support the architecture.
    """
    kind = hf_config.model_type
    if unknown := unsupported_architecture(kind, _dense_layers(hf_config) if kind == "qwen3_moe" else 0):
        raise ConfigError(unknown, key="policy.path", value=kind, hint=f"set actor.backend=fsdp2; {SUPPORTED_MODELS}")
    if window := sliding_window(hf_config):
        raise ConfigError(
            f"policy.path: the Megatron learner has no sliding windows; this {kind} model has one of {window} tokens",
            key="policy.path",
            value=kind,
            hint="set actor.backend=fsdp2",
        )
    if kind == "qwen2":
        return ModelFamily(kind, qkv_bias=True)
    attention, mlp = bool(getattr(hf_config, "attention_bias", False)), bool(getattr(hf_config, "mlp_bias", False))
    if kind == "llama" and attention and mlp:
        return ModelFamily(kind, qkv_bias=True, linear_bias=True)
    if attention or mlp:
        raise ConfigError(
            f"policy.path: Megatron has biases in all linear layers or in none, but this {kind} model has them in some",
            key="policy.path",
            value=kind,
            hint="set actor.backend=fsdp2",
        )
    num_experts = int(hf_config.num_experts) if kind == "qwen3_moe" else 0
    return ModelFamily(kind, qk_norm=kind.startswith("qwen3"), num_experts=num_experts)


def sliding_window(hf_config: Any) -> int | None:
    """Return the window of a model some of whose layers attend within one, else None."""
    kinds = getattr(hf_config, "layer_types", None) or ()
    return hf_config.sliding_window if "sliding_attention" in kinds else None


def _dense_layers(hf_config: Any) -> int:
    """Return the number of layers without experts, as transformers builds them."""
    sparse_step, dense = hf_config.decoder_sparse_step, hf_config.mlp_only_layers or ()
    return sum(layer in dense or (layer + 1) % sparse_step != 0 for layer in range(hf_config.num_hidden_layers))


def transformer_config(
    hf_config: Any,
    options: MegatronConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype = torch.float32,
    *,
    recompute: bool = False,
    on_cpu: bool = True,
) -> TransformerConfig:
    """Return Megatron's configuration of the Hugging Face model `hf_config`, without dropout. `recompute` is
    `gradient_checkpointing`, for all layers unless a granularity is set; `on_cpu` is True without a GPU.

    Raises:
        ConfigError: options do not fit the weights, contradict each other or need a GPU.
    """
    family = model_family(hf_config)
    check_supported(options, on_cpu=on_cpu)
    _raise_first(conflicting_megatron_options(options, parallel, str(dtype).removeprefix("torch.")), options)
    _check_fits_weights(hf_config, family, options)
    if hf_config.num_attention_heads % (parallel.tensor * parallel.context):
        raise ConfigError(
            f"{hf_config.num_attention_heads} attention heads cannot be divided among tensor {parallel.tensor} × "
            f"context {parallel.context} ranks",
            key="actor.parallel.context",
            value=parallel.context,
            hint=f"their product must be one of {', '.join(map(str, divisors(hf_config.num_attention_heads)))}",
        )
    values = _model_values(hf_config, family, options) | _computation_values(options, parallel, dtype, on_cpu=on_cpu)
    values |= _parallel_values(parallel)
    values |= _recompute_values(options, hf_config.num_hidden_layers // parallel.pipeline, full=recompute)
    values |= _expert_values(hf_config, options) if family.num_experts else {}
    if options.tp_comm_bootstrap_backend is not None:
        values["tp_comm_bootstrap_backend"] = options.tp_comm_bootstrap_backend
    try:
        return TransformerConfig(**values)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"Megatron rejects the options of actor.megatron: {error}", key="actor.megatron") from error


def _model_values(hf_config: Any, family: ModelFamily, options: MegatronConfig) -> dict[str, Any]:
    function, gated = ACTIVATIONS[options.activation.removeprefix("fast-")]
    heads = int(hf_config.num_attention_heads)
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "layernorm_zero_centered_gamma": options.normalization == "layernorm1p",
        "activation_func": function,
        "gated_linear_unit": gated,
        "add_bias_linear": options.add_bias_linear,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
    }


def _computation_values(
    options: MegatronConfig, parallel: ParallelConfig, dtype: torch.dtype, *, on_cpu: bool
) -> dict[str, Any]:
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "use_cpu_initialization": options.use_cpu_initialization or on_cpu,
        "perform_initialization": False,
        "calculate_per_token_loss": True,  # gradients are summed over ranks: the losses are already weighted
        "variable_seq_lengths": options.variable_seq_lengths
        and parallel.pipeline > 1
        and parallel.virtual_pipeline == 1,
        "batch_p2p_comm": options.batch_p2p_comm,
        # `alltoall_seq` was the dispatcher of sequence-parallel models; today's `alltoall` does both
        "moe_token_dispatcher_type": options.moe_token_dispatcher_type.removesuffix("_seq"),
        "masked_softmax_fusion": False,
        "attention_softmax_in_fp32": options.attention_softmax_in_fp32,
        "apply_rope_fusion": options.apply_rope_fusion,
        "bias_dropout_fusion": options.bias_dropout_fusion,
        "bias_activation_fusion": options.bias_activation_fusion or options.activation.startswith("fast-"),
        "gradient_accumulation_fusion": options.gradient_accumulation_fusion,
        "persist_layer_norm": options.persist_layer_norm,
        "tp_comm_overlap": options.tp_comm_overlap_cfg is not None,
    }


def _parallel_values(parallel: ParallelConfig) -> dict[str, Any]:
    virtual = parallel.virtual_pipeline
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "sequence_parallel": parallel.sequence and parallel.tensor > 1,
    }


def _recompute_values(options: MegatronConfig, layers: int, *, full: bool) -> dict[str, Any]:
    granularity, method, number = options.recompute_granularity, options.recompute_method, options.recompute_num_layers
    if granularity is None and full and not options.moe_layer_recompute:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if granularity == "full":
        number = min(number or (1 if method == "uniform" else layers), layers)
        return {"recompute_granularity": granularity, "recompute_method": method, "recompute_num_layers": number}
    modules = (["core_attn"] if granularity else []) + (["moe"] if options.moe_layer_recompute else [])
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}


def _expert_values(hf_config: Any, options: MegatronConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32" if has_transformer_engine() else None,
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": options.moe_grouped_gemm,
        "moe_shared_expert_overlap": options.moe_shared_expert_overlap,
    }


def check_supported(options: MegatronConfig, *, on_cpu: bool) -> None:
    """Check that this machine supports the options.

    Raises:
        ConfigError: an option needs a GPU or Transformer Engine and there is none, or a checkpoint format that is read
            by unpickling.
    """
    _raise_first(unsupported_megatron_options(options, has_gpu=not on_cpu), options)


def _raise_first(problems: Iterator[UnsupportedMegatronOption], options: MegatronConfig) -> None:
    for problem in problems:
        _raise_option_error(problem.option, getattr(options, problem.option), problem.reason, problem.hint("actor"))


def _raise_option_error(name: str, value: Any, reason: str, hint: str) -> None:
    raise ConfigError(f"actor.megatron.{name}: {reason}", key=f"actor.megatron.{name}", value=value, hint=hint)


def _check_fits_weights(hf_config: Any, family: ModelFamily, options: MegatronConfig) -> None:
    """Check that options which describe the weights agree with them."""
    act = GATED_ACTIVATIONS.get(str(hf_config.hidden_act), str(hf_config.hidden_act))
    if options.activation.removeprefix("fast-") != act:
        _raise_option_error(
            "activation",
            options.activation,
            f"the weights were trained with {act}",
            f"set actor.megatron.activation={act}",
        )
    if options.normalization != "rmsnorm":
        hint = "set actor.megatron.normalization=rmsnorm"
        _raise_option_error("normalization", options.normalization, f"{family.name} uses RMSNorm", hint)
    if options.add_bias_linear != family.linear_bias:
        actual = "biases in all linear layers" if family.linear_bias else "no biases in linear layers"
        _raise_option_error(
            "add_bias_linear",
            options.add_bias_linear,
            f"the weights have {actual}",
            f"set actor.megatron.add_bias_linear={family.linear_bias}".lower(),
        )
    rope = str((getattr(hf_config, "rope_parameters", None) or {}).get("rope_type", "default"))
    if options.position_embedding_type not in ("rope", rope):
        reason = f"{family.name} encodes positions by rope ({rope})"
        hint = "set actor.megatron.position_embedding_type=rope"
        _raise_option_error("position_embedding_type", options.position_embedding_type, reason, hint)


def ddp_config(options: MegatronConfig) -> DistributedDataParallelConfig:
    """Return the configuration of gradient buckets and their reduction, in float32, over data-parallel ranks."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.use_distributed_optimizer,
        bucket_size=options.ddp_bucket_size,
    )


def optimizer_config(
    optimizer: OptimizerConfig, options: MegatronConfig, dtype: torch.dtype
) -> MegatronOptimizerConfig:
    """Return the configuration of Megatron's optimizer.

    Raises:
        ConfigError: options exclude each other or do not fit the policy's dtype.
    """
    _raise_first(conflicting_megatron_options(options, ParallelConfig(), str(dtype).removeprefix("torch.")), options)
    if optimizer.kind not in ("adamw", "sgd"):
        raise ConfigError(
            f"actor.optimizer.kind = {optimizer.kind}: the Megatron backend has adamw and sgd",
            key="actor.optimizer.kind",
            value=optimizer.kind,
        )
    clip = 0.0 if math.isinf(optimizer.max_grad_norm) else optimizer.max_grad_norm
    return MegatronOptimizerConfig(
        optimizer="adam" if optimizer.kind == "adamw" else optimizer.kind,
        lr=optimizer.learning_rate,
        min_lr=optimizer.learning_rate * optimizer.min_learning_rate_ratio,
        weight_decay=optimizer.weight_decay,
        decoupled_weight_decay=True,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.epsilon,
        sgd_momentum=0.0,
        clip_grad=clip,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        initial_loss_scale=2.0**16,
        loss_scale_window=options.loss_scale_window,
        use_distributed_optimizer=options.use_distributed_optimizer,
        overlap_param_gather=options.overlap_param_gather,
        overlap_param_gather_with_optimizer_step=options.overlap_param_gather_with_optimizer_step,
        pin_cpu_grads=options.optimizer_enable_pin,
        pin_cpu_params=options.optimizer_enable_pin,
    )
