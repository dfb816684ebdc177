"""Which of Megatron's options can't be honoured, by whom they are asked of and on what machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from quintet.config.native.learners import ParallelConfig
from quintet.config.native.megatron import MegatronConfig

__all__ = ["TAKES", "Unable", "at_odds", "has_transformer_engine", "unable", "unknown_layers"]

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Architectures that the learner knows, as `model_type` of a `config.json` calls them."""
TAKES = f"it takes {', '.join(FAMILIES)}, with experts in all layers or in none; fsdp2 takes any other"

NEEDS = {
    "apply_rope_fusion": "Transformer Engine's rotary kernel",
    "persist_layer_norm": "Apex's persistent norm kernel",
    "gradient_accumulation_fusion": "Apex's kernel for weight gradients",
    "moe_grouped_gemm": "the grouped_gemm kernels",
    "moe_shared_expert_overlap": "CUDA streams",
    "optimizer_enable_pin": "memory pinned for CUDA",
    "tp_comm_overlap_cfg": "Transformer Engine's communication buffers",
}
"""Options that only a GPU can run, and what of it they need."""


@dataclass(frozen=True, slots=True)
class Unable:
    """An option of `MegatronConfig` whose value can't be honoured."""

    option: str
    why: str
    hint: str
    elsewhere: bool = False
    """Another machine could honour it."""


def has_transformer_engine() -> bool:
    """Whether NVIDIA's fused layers are installed."""
    return find_spec("transformer_engine") is not None


def unknown_layers(kind: str, dense_layers: int) -> str | None:
    """What of a model's layers Megatron's learner doesn't know; `dense_layers` are those without experts in a mixture
    of experts. null where it knows all."""
    if kind not in FAMILIES:
        return f"the Megatron learner doesn't know {kind!r}"
    if dense_layers:
        layers = "1 dense layer" if dense_layers == 1 else f"{dense_layers} dense layers"
        return f"{kind} with {layers} among sparse ones: the Megatron learner has experts in all of them"
    return None


def unable(options: MegatronConfig, *, hosted: bool) -> Iterator[Unable]:
    """What can't be honoured: where the machine is `hosted`, without a GPU, what needs one; Transformer Engine's layers
    without it; a format of checkpoints that is read by unpickling; what isn't there anywhere."""
    yield from _without_gpu(options) if hosted else ()
    if options.spec_name == "te_gpt" and not has_transformer_engine():
        yield Unable("spec_name", "transformer_engine isn't installed", "take local_gpt or decoder_gpt", elsewhere=True)
    if not options.mcore_gpt:
        yield Unable("mcore_gpt", "only Megatron Core's model is there", "leave it out")
    if options.encoder_seq_length is not None:
        yield Unable("encoder_seq_length", "the model has no encoder", "leave it out")
    if options.ckpt_format == "torch":
        yield Unable("ckpt_format", "its files are unpickled, and a pickle can run code", "leave it out")
    if options.ckpt_format == "zarr":
        yield Unable("ckpt_format", "Megatron Core has dropped it", "leave it out")


def _without_gpu(options: MegatronConfig) -> Iterator[Unable]:
    for name, kernel in NEEDS.items():
        if getattr(options, name):
            yield Unable(name, f"needs {kernel}, and this machine has no GPU", "leave it out", elsewhere=True)
    if options.distributed_backend == "nccl":
        yield Unable("distributed_backend", "NCCL joins GPUs, and this machine has none", "take gloo", elsewhere=True)
    if options.moe_token_dispatcher_type == "flex":  # noqa: S105
        yield Unable("moe_token_dispatcher_type", "needs DeepEP and GPUs", "take alltoall or allgather", elsewhere=True)


def at_odds(options: MegatronConfig, parallel: ParallelConfig, dtype: str) -> Iterator[Unable]:
    """What contradicts the split, the policy's type or another option; `auto` contradicts no type."""
    if options.batch_p2p_comm and parallel.virtual_pipeline > 1 and parallel.pipeline == 2:
        yield Unable("batch_p2p_comm", "two stages of several parts can't tell their messages apart", "leave it out")
    for flag, meant in (("bf16", "bfloat16"), ("fp16", "float16")):
        if getattr(options, flag) and dtype not in (meant, "auto"):
            yield Unable(flag, f"policy.dtype is {dtype}", "give both the same type")
    if options.overlap_param_gather and not (options.use_distributed_optimizer and options.overlap_grad_reduce):
        hint = "set use_distributed_optimizer and overlap_grad_reduce, too"
        yield Unable("overlap_param_gather", "only the distributed optimizer gathers weights", hint)
