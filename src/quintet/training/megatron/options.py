"""A configuration in the terms of Megatron Core's own classes."""

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

from quintet.config.megatron import TAKES, Unable, at_odds, has_transformer_engine, unable, unknown_layers
from quintet.config.native.learners import OptimizerConfig, ParallelConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.errors import ConfigError

__all__ = ["Family", "ddp_config", "family", "optimizer_config", "refuse_unable", "transformer_config"]

ACTIVATIONS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "gelu": (F.gelu, False),
    "geglu": (F.gelu, True),
    "reglu": (F.relu, True),
    "swiglu": (F.silu, True),
    "squared-relu": (lambda x: F.relu(x).square(), False),
    "approx-gelu": (lambda x: F.gelu(x, approximate="tanh"), False),
}
"""Function and whether it is gated. `fast-` before a name means the fused form of the same function."""

GATED = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
"""What `hidden_act` of a gated Hugging Face model is called."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the layers of a Hugging Face architecture have."""

    name: str
    qkv_bias: bool = False
    linear_bias: bool = False
    qk_norm: bool = False
    experts: int = 0


def family(hf: Any) -> Family:
    """Which family a Hugging Face configuration belongs to.

    Raises:
        ConfigError: Megatron's GPT isn't built for it here.
    """
    kind = hf.model_type
    if unknown := unknown_layers(kind, _dense_layers(hf) if kind == "qwen3_moe" else 0):
        raise ConfigError(unknown, key="policy.path", value=kind, hint=TAKES)
    if kind == "qwen2":
        return Family(kind, qkv_bias=True)
    attention, mlp = bool(getattr(hf, "attention_bias", False)), bool(getattr(hf, "mlp_bias", False))
    if kind == "llama" and attention and mlp:
        return Family(kind, qkv_bias=True, linear_bias=True)
    if attention or mlp:
        raise ConfigError(
            f"{kind} with biases in some of its linear layers: Megatron has them in all or in none",
            key="policy.path",
            value=kind,
            hint="actor.backend=fsdp2",
        )
    experts = int(hf.num_experts) if kind == "qwen3_moe" else 0
    return Family(kind, qk_norm=kind.startswith("qwen3"), experts=experts)


def _dense_layers(hf: Any) -> int:
    """Layers of a mixture that have no experts, as transformers builds them."""
    every, named = hf.decoder_sparse_step, hf.mlp_only_layers or ()
    return sum(layer in named or (layer + 1) % every != 0 for layer in range(hf.num_hidden_layers))


def transformer_config(
    hf: Any,
    options: MegatronConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype = torch.float32,
    *,
    recompute: bool = False,
    hosted: bool = True,
) -> TransformerConfig:
    """Megatron's description of the model whose Hugging Face configuration is `hf`, without dropout; `recompute` is
    the plain `gradient_checkpointing`, for every layer where no granularity is given; `hosted` says that there is no
    GPU.

    Raises:
        ConfigError: options that aren't those of the weights, that contradict each other or that need a GPU.
    """
    kind = family(hf)
    refuse_unable(options, hosted=hosted)
    _refuse_first(at_odds(options, parallel, str(dtype).removeprefix("torch.")), options)
    _match(hf, kind, options)
    if hf.num_attention_heads % (parallel.tensor * parallel.context):
        raise ConfigError(
            f"{hf.num_attention_heads} heads can't be shared out over {parallel.tensor} × {parallel.context} ranks",
            key="actor.parallel.context",
            value=parallel.context,
            hint="take fewer",
        )
    function, gated = ACTIVATIONS[options.activation.removeprefix("fast-")]
    heads = int(hf.num_attention_heads)
    values: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "layernorm_zero_centered_gamma": options.normalization == "layernorm1p",
        "activation_func": function,
        "gated_linear_unit": gated,
        "add_bias_linear": options.add_bias_linear,
        "add_qkv_bias": kind.qkv_bias,
        "qk_layernorm": kind.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "use_cpu_initialization": options.use_cpu_initialization or hosted,
        "perform_initialization": False,
        "calculate_per_token_loss": True,  # gradients are summed over ranks: the loss has its weights already
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
    values |= _split(parallel) | _recomputed(options, hf.num_hidden_layers // parallel.pipeline, whole=recompute)
    values |= _experts(hf, options) if kind.experts else {}
    if options.tp_comm_bootstrap_backend is not None:
        values["tp_comm_bootstrap_backend"] = options.tp_comm_bootstrap_backend
    try:
        return TransformerConfig(**values)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"Megatron refuses these options: {error}", key="actor.megatron") from error


def _split(parallel: ParallelConfig) -> dict[str, Any]:
    virtual = parallel.virtual_pipeline
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "sequence_parallel": parallel.sequence and parallel.tensor > 1,
    }


def _recomputed(options: MegatronConfig, layers: int, *, whole: bool) -> dict[str, Any]:
    granularity, method, number = options.recompute_granularity, options.recompute_method, options.recompute_num_layers
    if granularity is None and whole and not options.moe_layer_recompute:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if granularity == "full":
        number = min(number or (1 if method == "uniform" else layers), layers)
        return {"recompute_granularity": granularity, "recompute_method": method, "recompute_num_layers": number}
    modules = (["core_attn"] if granularity else []) + (["moe"] if options.moe_layer_recompute else [])
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}


def _experts(hf: Any, options: MegatronConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32" if has_transformer_engine() else None,
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": options.moe_grouped_gemm,
        "moe_shared_expert_overlap": options.moe_shared_expert_overlap,
    }


def refuse_unable(options: MegatronConfig, *, hosted: bool) -> None:
    """Say at once what this machine can't run.

    Raises:
        ConfigError: on a machine without a GPU, an option that needs one; Transformer Engine's layers without it;
            a format of checkpoints that is read by unpickling.
    """
    _refuse_first(unable(options, hosted=hosted), options)


def _refuse_first(found: Iterator[Unable], options: MegatronConfig) -> None:
    for each in found:
        _refuse(each.option, getattr(options, each.option), each.why, each.hint)


def _refuse(name: str, value: Any, reason: str, hint: str) -> None:
    raise ConfigError(f"actor.megatron.{name}: {reason}", key=f"actor.megatron.{name}", value=value, hint=hint)


def _match(hf: Any, kind: Family, options: MegatronConfig) -> None:
    """Options that describe the weights must be those of the weights."""
    act = GATED.get(str(hf.hidden_act), str(hf.hidden_act))
    if options.activation.removeprefix("fast-") != act:
        _refuse("activation", options.activation, f"the weights were trained with {act}", f"take {act}")
    if options.normalization != "rmsnorm":
        _refuse("normalization", options.normalization, f"{kind.name} has RMSNorm", "take rmsnorm")
    if options.add_bias_linear != kind.linear_bias:
        has = "biases in all linear layers" if kind.linear_bias else "no such biases"
        _refuse("add_bias_linear", options.add_bias_linear, f"these weights have {has}", f"{kind.linear_bias}".lower())
    rope = str((getattr(hf, "rope_parameters", None) or {}).get("rope_type", "default"))
    if options.position_embedding_type not in ("rope", rope):
        reason = f"{kind.name} tells positions by rope ({rope})"
        _refuse("position_embedding_type", options.position_embedding_type, reason, "take rope")


def ddp_config(options: MegatronConfig) -> DistributedDataParallelConfig:
    """How gradients are gathered in buckets and summed, in float32, over data-parallel ranks."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.use_distributed_optimizer,
        bucket_size=options.ddp_bucket_size,
    )


def optimizer_config(
    own: OptimizerConfig, options: MegatronConfig, dtype: torch.dtype, *, offload: bool = False
) -> MegatronOptimizerConfig:
    """Megatron's optimizer; `offload` keeps its state in main memory, on a GPU.

    Raises:
        ConfigError: options that exclude each other, or that aren't of the policy's type.
    """
    _refuse_first(at_odds(options, ParallelConfig(), str(dtype).removeprefix("torch.")), options)
    if own.kind not in ("adamw", "sgd"):
        raise ConfigError("Megatron has adamw and sgd here", key="actor.optimizer.kind", value=own.kind)
    clip = 0.0 if math.isinf(own.max_grad_norm) else own.max_grad_norm
    return MegatronOptimizerConfig(
        optimizer="adam" if own.kind == "adamw" else own.kind,
        lr=own.learning_rate,
        min_lr=own.learning_rate * own.min_learning_rate_ratio,
        weight_decay=own.weight_decay,
        decoupled_weight_decay=True,
        adam_beta1=own.betas[0],
        adam_beta2=own.betas[1],
        adam_eps=own.epsilon,
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
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=1.0 if offload else 0.0,
        pin_cpu_grads=options.optimizer_enable_pin,
        pin_cpu_params=options.optimizer_enable_pin,
    )
