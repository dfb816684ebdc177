"""Options of `rollout.engine_options` that each engine supports, and the engines that run on this machine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quintet import hardware
from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.rollout import EngineConfig
from quintet.config.plan.process_layout import process_layout
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value

OPTIONS = "rollout.engine_options"
EXECUTOR = f"{OPTIONS}.executor"


@dataclass(frozen=True, slots=True)
class SupportedOptions:
    """Options that one engine supports."""

    names: frozenset[str]
    """Supported options."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why an option is not supported, appended to the message."""
    values: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    """For partly supported options: the supported values, and why there are no others."""
    substitutes: Mapping[str, str] = field(default_factory=dict)
    """What the engine does with an option that was written for another engine, where that differs."""
    package: str | None = None
    """Module of the package that the engine needs."""


@dataclass(frozen=True, slots=True)
class UnsupportedOption:
    """An option with a value that the engine does not support."""

    key: str
    engine: str
    reason: str
    other_engines: tuple[str, ...]
    """Engines that support it."""
    default: Any

    @property
    def hint(self) -> str:
        changes = (
            f"{self.key}={format_value(self.default)}",
            *(f"rollout.engine={name}" for name in self.other_engines),
        )
        return ", or ".join(changes)


_ALL_ENGINES = (
    *("memory_share", "dtype", "eager", "cuda_graph_max_batch", "torch_compile", "prompts_per_device"),
    *("sleep_between_steps", "offload", "load_format", "max_batched_tokens", "max_model_tokens", "chunked_prefill"),
    *("image_cache", "log_statistics", "detokenize", "print_responses", "validate_weights", "validate_weights_dir"),
)
"""Options that every engine supports."""
_SEPARATE_PACKAGES = ("tensor_parallel", "pipeline_parallel", "block_size", "attention_backend", "arguments")
"""Further options of vLLM and SGLang."""
_SGLANG_ONLY = ("deterministic", "image_cache", "server_url", "server_python", "server_weights_dir")

_SGLANG = frozenset((*_ALL_ENGINES, *_SEPARATE_PACKAGES, "torch_compile_max_batch", "log_every_steps", *_SGLANG_ONLY))
_SGLANG_REASONS = {"swap_space_gib": ": SGLang recomputes preempted requests"}

ENGINE_OPTIONS: Mapping[str, SupportedOptions] = {
    "hf": SupportedOptions(
        frozenset((*_ALL_ENGINES, "torch_compile_max_batch", "log_every_steps", "deterministic")),
        {
            **dict.fromkeys(("tensor_parallel", "pipeline_parallel"), ": it runs on one device"),
            "block_size": ": the blocks of its KV cache have 16 tokens",
            "swap_space_gib": ": it recomputes preempted requests",
            "attention_backend": ": it runs the model of transformers",
            "arguments": ": all its settings are options of their own",
        },
        {
            "dtype": (("float32", "bfloat16", "auto"), "it computes in float32 and bfloat16"),
            # formats without effect: the engine starts with the learner's weights
            "load_format": (
                ("auto", "hf", "pt", "safetensors", "dummy"),
                "it takes its weights from the learner, not from files",
            ),
        },
        {
            "memory_share": "blocks of the KV cache take memory when they are used; nothing is reserved",
            "torch_compile": "torch.compile of the layers of transformers",
            "sleep_between_steps": "it frees its KV cache; it has no other memory",
            "offload": "its weights move to host memory unless they are the learner's",
            "max_batched_tokens": "the limit is for prompts; one token of each running request is computed beside them",
            "chunked_prefill": "prompts are divided only if they exceed the prompt tokens of a pass",
            "deterministic": "for quintet serve; training is batch-invariant in any case",
            "log_statistics": "its own lines, every log_every_steps decode steps",
        },
    ),
    "vllm": SupportedOptions(
        frozenset((*_ALL_ENGINES, *_SEPARATE_PACKAGES, "swap_space_gib", "separate_process", "executor")),
        {
            "log_every_steps": ": vLLM logs at fixed times; log_statistics=true enables that",
            "torch_compile_max_batch": ": vLLM compiles for every batch",
        },
        package="vllm",
    ),
    "sglang": SupportedOptions(_SGLANG, _SGLANG_REASONS, package="sglang"),
    "sglang-server": SupportedOptions(_SGLANG, _SGLANG_REASONS),
}
"""Engines of other packages are not listed: they receive every option."""


def unsupported_options(experiment: Experiment) -> Iterator[UnsupportedOption]:
    """Yield the options that the run's engine does not support, in the order of the schema."""
    rollout = experiment.rollout
    if rollout.engine not in ENGINE_OPTIONS:
        return
    for name, info in EngineConfig.model_fields.items():
        value, default = getattr(rollout.engine_options, name), info.get_default(call_default_factory=True)
        if value == default:
            continue
        reason = _problem(rollout.engine, name, value)
        if reason is not None:
            others = tuple(other for other in ENGINE_OPTIONS if _problem(other, name, value) is None)
            yield UnsupportedOption(f"{OPTIONS}.{name}", rollout.engine, reason, others, default)


def _problem(engine: str, option: str, value: Any) -> str | None:
    supported = ENGINE_OPTIONS[engine]
    if option not in supported.names:
        return f"the engine {engine} has no such option{supported.reasons.get(option, '')}"
    values, reason = supported.values.get(option, ((value,), ""))
    return None if value in values else f"not with the engine {engine}: {reason}"


def engine_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for each option that the run's engine does not support."""
    engine = composed.describe("rollout.engine")
    for option in unsupported_options(composed.experiment):
        yield composed.problem(option.key, f"{option.reason}; {engine}", option.hint)


def executor_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield why the processes of a vLLM engine cannot be started through Ray, if the run asks for that."""
    config = composed.experiment
    if config.rollout.engine != "vllm" or config.rollout.engine_options.executor != "ray":
        return
    reason = None
    if several := process_layout(config).size > 1:
        reason = "Ray would give an engine other GPUs than those of its rank; only a run in one process can have it"
    elif not hardware.sees_gpu():
        reason = "vLLM starts no processes through Ray without GPUs, and this machine has none"
    elif not hardware.is_installed("ray"):
        reason = "needs the package ray, which is not installed here"
    if reason is not None:
        yield replace(composed.problem(EXECUTOR, reason, f"{EXECUTOR}=mp"), elsewhere=not several)


def runs_by_default(engine: str) -> bool:
    """Return whether an engine is suitable as a default on this machine: it needs no package, or its package and a GPU
    are present."""
    package = ENGINE_OPTIONS[engine].package if engine in ENGINE_OPTIONS else engine
    return package is None or (hardware.is_installed(package) and hardware.num_gpus() > 0)
