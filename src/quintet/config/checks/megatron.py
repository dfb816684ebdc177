"""Models and options that the Megatron learner does not support, also depending on the machine."""

from collections.abc import Iterator
from dataclasses import dataclass

from quintet import hardware
from quintet.config.native.learners import ParallelConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.config.schema import format_value

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Supported values of `model_type` in `config.json`."""
SUPPORTED_MODELS = f"supported: {', '.join(FAMILIES)}, with experts in all layers or in none"

GPU_OPTIONS = {
    "apply_rope_fusion": "Transformer Engine's rotary kernel",
    "persist_layer_norm": "Apex's persistent norm kernel",
    "gradient_accumulation_fusion": "Apex's kernel for weight gradients",
    "moe_grouped_gemm": "the grouped_gemm kernels",
    "moe_shared_expert_overlap": "CUDA streams",
    "optimizer_enable_pin": "memory pinned for CUDA",
    "tp_comm_overlap_cfg": "Transformer Engine's communication buffers",
}
"""Options that need a GPU, and why."""


@dataclass(frozen=True, slots=True)
class UnsupportedMegatronOption:
    """An option of `MegatronConfig` with an unsupported value."""

    option: str
    reason: str
    alternative: str = ""
    """Changes that help as well as the default of the option; `{section}` is the section of the learner's options."""
    value: object = None
    """Unsupported value; None stands for any that is set."""
    elsewhere: bool = False
    """Whether another machine could support it."""

    def hint(self, learner: str) -> str:
        """Return what to set for a learner, `actor` for example."""
        key, default = (
            f"{learner}.megatron.{self.option}",
            format_value(MegatronConfig.model_fields[self.option].default),
        )
        changes = (f"leave {key} out", f"{key}={default}", self.alternative.format(section=f"{learner}.megatron"))
        return ", or ".join(filter(None, changes))

    def applies_to(self, options: MegatronConfig) -> bool:
        value = getattr(options, self.option)
        return bool(value) if self.value is None else value == self.value


_Option = UnsupportedMegatronOption
DISTRIBUTED_FORMAT = "{section}.ckpt_format=torch_dist"
NEEDS_GPU = (
    *(
        _Option(name, f"needs {kernel}, and this machine has no GPU", elsewhere=True)
        for name, kernel in GPU_OPTIONS.items()
    ),
    _Option(
        "distributed_backend",
        "NCCL needs GPUs, and this machine has none",
        "{section}.distributed_backend=gloo",
        "nccl",
        elsewhere=True,
    ),
    _Option("moe_token_dispatcher_type", "needs DeepEP and GPUs", "", "flex", elsewhere=True),
)
NEEDS_TRANSFORMER_ENGINE = _Option(
    "spec_name", "transformer_engine is not installed", "{section}.spec_name=local_gpt", "te_gpt", elsewhere=True
)
NEVER_SUPPORTED = (
    _Option("mcore_gpt", "only Megatron Core's model is supported", value=False),
    _Option("encoder_seq_length", "the model has no encoder"),
    _Option("ckpt_format", "its files are unpickled, and a pickle can run code", DISTRIBUTED_FORMAT, "torch"),
    _Option("ckpt_format", "Megatron Core has dropped it", DISTRIBUTED_FORMAT, "zarr"),
)


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine, with NVIDIA's fused layers, is installed."""
    return hardware.is_installed("transformer_engine")


def unsupported_architecture(family: str, dense_layers: int) -> str | None:
    """Return why a model is unsupported, None if it is supported; `dense_layers` counts the layers without experts in a
    mixture of experts."""
    if family not in FAMILIES:
        return f"the Megatron learner does not support {family!r}"
    if dense_layers:
        layers = "1 dense layer" if dense_layers == 1 else f"{dense_layers} dense layers"
        return f"{family} with {layers} among sparse ones: the Megatron learner needs experts in all layers"
    return None


def unsupported_megatron_options(options: MegatronConfig, *, has_gpu: bool) -> Iterator[UnsupportedMegatronOption]:
    """Yield options that need a GPU or a package that is missing, and options that are never supported."""
    for option in (*(() if has_gpu else NEEDS_GPU), NEEDS_TRANSFORMER_ENGINE, *NEVER_SUPPORTED):
        if option.applies_to(options) and not (option is NEEDS_TRANSFORMER_ENGINE and has_transformer_engine()):
            yield option


def conflicting_megatron_options(
    options: MegatronConfig, parallel: ParallelConfig, dtype: str
) -> Iterator[UnsupportedMegatronOption]:
    """Yield options that contradict the parallel degrees, the policy's type (`auto` fits any) or another option."""
    if options.batch_p2p_comm and parallel.virtual_pipeline > 1 and parallel.pipeline == 2:
        reason = "with virtual stages, messages between two pipeline stages cannot be told apart"
        yield UnsupportedMegatronOption("batch_p2p_comm", reason)
    for flag, flag_dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if getattr(options, flag) and dtype not in (flag_dtype, "auto"):
            yield UnsupportedMegatronOption(flag, f"policy.dtype is {dtype}", f"policy.dtype={flag_dtype}")
    if options.overlap_param_gather and not (options.use_distributed_optimizer and options.overlap_grad_reduce):
        needed = "{section}.use_distributed_optimizer=true {section}.overlap_grad_reduce=true"
        reason = "only the distributed optimizer gathers weights, and only with overlapping gradient reduction"
        yield UnsupportedMegatronOption("overlap_param_gather", reason, needed)
