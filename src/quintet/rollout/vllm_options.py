"""What vLLM is started with: our options under the names that the installed version has for them.

The names are those of its `EngineArgs`. An option that a version no longer has is refused by name, before anything is
loaded.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quintet.config.native import EngineConfig
from quintet.errors import ConfigError, nearest
from quintet.rollout.engine import EngineSetup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["KEY", "Release", "engine_arguments", "environment", "first_weights_are_dummies"]

KEY = "rollout.engine_options"
WORKER = "quintet.rollout.vllm_worker.QuintetWorker"
CPU_BLOCK = 128
"""Tokens of a block of the cache on a CPU, where nothing else is asked for."""
CPU_SHARE = 0.5
"""Share of the machine's memory that the cache takes on a CPU at most, where nothing else is asked for."""
SPARE = 1.25
"""Cache for what is kept of answered prompts, on top of what the running requests need."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "memory_share": ("gpu_memory_utilization",),
    "cuda_graph_max_batch": ("max_cudagraph_capture_size",),
    "max_batched_tokens": ("max_num_batched_tokens",),
    "chunked_prefill": ("enable_chunked_prefill",),
    "block_size": ("block_size",),
    "swap_space_gib": ("swap_space",),
    "attention_backend": ("attention_backend",),
    "load_format": ("load_format",),
    "image_cache": ("mm_processor_cache_gb", "disable_mm_preprocessor_cache"),
    "torch_compile": ("compilation_config",),
    "torch_compile_max_batch": (),
    "log_every_steps": (),
}
"""Options that stand for an argument of vLLM's, and its names, newest first."""

TAKEN: Mapping[str, str] = {
    "model": "policy.path",
    "tokenizer": "policy.tokenizer",
    "trust_remote_code": "policy.trust_remote_code",
    "seed": "seed",
    "dtype": f"{KEY}.dtype",
    "max_model_len": f"{KEY}.max_model_tokens",
    "max_num_seqs": "rollout.max_concurrent",
    "skip_tokenizer_init": f"{KEY}.detokenize",
    "disable_log_stats": f"{KEY}.log_statistics",
}
"""Arguments of vLLM's that follow from a key of ours."""
OURS = frozenset({"worker_extension_cls", "worker_cls", "logprobs_mode", "speculative_config", "data_parallel_size"})
"""Arguments that tokens and log-probs hang on."""
NOT_OVERRIDDEN = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"})
"""Values of a model's configuration that say how it was stored."""


@dataclass(frozen=True, slots=True)
class Release:
    """The installed vLLM: its version, the names of its arguments, whether it runs on a CPU."""

    version: str
    arguments: frozenset[str]
    cpu: bool


def environment(options: EngineConfig) -> dict[str, str]:
    """Environment variables that vLLM reads; one that is set already stays."""
    alone = options.executor == "mp"
    return {
        # whether it gets a process is said as it starts; on a CPU this would give that process another one
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM reports its use to a server of its makers unless told not to
        "VLLM_NO_USAGE_STATS": "1",
        # its warnings are about what is chosen here on purpose
        "VLLM_LOGGING_LEVEL": "INFO" if options.log_statistics else "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # binding each thread to a core of its own starves the learner that shares them
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # the newer runner draws in fused kernels that give log-probs of what top-k and top-p left over
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # a fork of a process whose torch has threads hangs
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    } | ({"VLLM_HOST_IP": "127.0.0.1"} if alone else {})


def engine_arguments(setup: EngineSetup, release: Release) -> dict[str, Any]:
    """Keywords for vLLM's `EngineArgs`.

    Raises:
        ConfigError: an option, or one of `arguments`, has no counterpart in that version.
    """
    options = setup.options
    return (
        _own_arguments(setup, release)
        | _memory(setup, release)
        | _compilation(options, release)
        | _asked_for(options, release)
        | _further(options.arguments, release)
    )


def first_weights_are_dummies(options: EngineConfig) -> bool:
    """The engine starts with random weights and waits for the learner's. verl says `dummy_dtensor`, `dummy_hf`, …"""
    return (options.load_format or "").startswith("dummy")


def _own_arguments(setup: EngineSetup, release: Release) -> dict[str, Any]:
    """What follows from the setup, and what exact tokens and log-probs need."""
    options = setup.options
    several = options.tensor_parallel * options.pipeline_parallel > 1
    wished = {
        # answers come as tokens; without a tokenizer vLLM also has no end-of-sequence token of its own opinion
        "skip_tokenizer_init": not options.detokenize,
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "hf_overrides": _overrides(setup) or None,
        # one step's tokens must be there before the next begins, or an update can't say which it wrote
        "async_scheduling": None if options.own_process else False,
        "distributed_executor_backend": options.executor if several or options.executor != "mp" else None,
    }
    return {name: value for name, value in wished.items() if value is not None and name in release.arguments} | {
        "model": str(setup.directory),
        "trust_remote_code": setup.trust_remote_code,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "seed": setup.seed % 2**32,
        "max_model_len": min(setup.context, options.max_model_tokens or setup.context),
        "max_num_seqs": setup.slots,
        "tensor_parallel_size": options.tensor_parallel,
        "pipeline_parallel_size": options.pipeline_parallel,
        "disable_log_stats": not options.log_statistics,
        "logprobs_mode": "raw_logprobs",
        "worker_extension_cls": WORKER,
    }


def _overrides(setup: EngineSetup) -> dict[str, Any]:
    """Values in which the learner's model differs from what its directory says."""
    now = setup.model.config.to_dict()
    stored = type(setup.model.config).from_pretrained(setup.directory, local_files_only=True).to_dict()
    return {
        name: value
        for name, value in now.items()
        if name in stored and name not in NOT_OVERRIDDEN and stored[name] != value
    }


def _compilation(options: EngineConfig, release: Release) -> dict[str, Any]:
    """`torch_compile` without CUDA graphs is a mode of its own; with them vLLM compiles anyway."""
    if not options.torch_compile:
        return {"enforce_eager": options.eager}
    _refuse_missing("torch_compile", options.torch_compile, release)
    graphs = {"cudagraph_mode": "NONE"} if options.eager else {}
    return {"enforce_eager": False, "compilation_config": {"mode": 3, **graphs}}


def _asked_for(options: EngineConfig, release: Release) -> dict[str, Any]:
    """Options that aren't at their defaults."""
    given: dict[str, Any] = {}
    for option in NAMES.keys() - {"torch_compile"}:
        value = getattr(options, option)
        if value == EngineConfig.model_fields[option].default:
            continue
        name = _refuse_missing(option, value, release)
        given[name] = _converted(name, value)
    return given


def _refuse_missing(option: str, value: object, release: Release) -> str:
    """The name that this version has for the option."""
    if name := next((name for name in NAMES[option] if name in release.arguments), None):
        return name
    gone = f"vLLM {release.version} has no {NAMES[option][0]}" if NAMES[option] else "vLLM has no such option"
    raise ConfigError(
        f"{KEY}.{option} = {value}: {gone}", key=f"{KEY}.{option}", value=value, hint=f"leave {KEY}.{option} out"
    )


def _converted(name: str, value: Any) -> Any:
    """The value as vLLM takes it under that name."""
    if name == "load_format":
        return _load_format(value)
    if name == "mm_processor_cache_gb":
        return 0
    if name == "disable_mm_preprocessor_cache":
        return True
    return value


def _load_format(given: str) -> str:
    """verl's names say how its own learner hands weights over; what is meant is where the first ones come from."""
    if given.startswith("dummy"):
        return "dummy"
    return "auto" if given in {"hf", "dtensor", "megatron"} else given


def _further(arguments: Mapping[str, Any], release: Release) -> dict[str, Any]:
    """`arguments`, each of which must be one of vLLM's that isn't decided elsewhere."""
    for name, value in arguments.items():
        key = f"{KEY}.arguments.{name}"
        if name in TAKEN:
            raise ConfigError(f"{key} is decided by {TAKEN[name]}", key=key, value=value, hint=f"set {TAKEN[name]}")
        if name in OURS:
            raise ConfigError(
                f"{key}: tokens and log-probs wouldn't be exact", key=key, value=value, hint="leave it out"
            )
        if name not in release.arguments:
            close = nearest(name, release.arguments)
            hint = f"did you mean {close!r}?" if close else "see vLLM's EngineArgs"
            raise ConfigError(f"{key}: vLLM {release.version} has no such argument", key=key, value=value, hint=hint)
    return dict(arguments)


def _memory(setup: EngineSetup, release: Release) -> dict[str, Any]:
    """On a CPU the cache gets what its requests can need; vLLM's own default there is nearly all of the memory.
    Sleep is there on GPUs only, and costs an allocator of its own."""
    options = setup.options
    if not release.cpu:
        sleeps = options.sleep_between_steps or options.offload
        return {"enable_sleep_mode": True} if sleeps and "enable_sleep_mode" in release.arguments else {}
    if "kv_cache_memory_bytes" not in release.arguments:
        return {}
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share = options.memory_share or CPU_SHARE
    return {"kv_cache_memory_bytes": min(_cache_bytes(setup), int(share * machine))}


def _cache_bytes(setup: EngineSetup) -> int:
    """Keys and values of all requests at their longest, in whole blocks, and some to spare."""
    block = setup.options.block_size or CPU_BLOCK
    blocks = (setup.slots * SPARE + 2) * -(-setup.context // block)
    return int(blocks * block * _token_bytes(setup.model, setup.dtype.itemsize))


def _token_bytes(model: PreTrainedModel, itemsize: int) -> int:
    """Keys and values of one token."""
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * dim * itemsize)


def known_arguments(fields: Collection[str]) -> frozenset[str]:
    """Names of vLLM's arguments from the fields of its `EngineArgs`."""
    return frozenset(name for name in fields if not name.startswith("_"))
