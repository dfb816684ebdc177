"""Arguments of vLLM's `EngineArgs`: engine options under the names of the installed version.

An option that the version does not have is an error before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from quintet import hardware
from quintet.config.native.rollout import EngineConfig
from quintet.errors import ConfigError, did_you_mean
from quintet.package_files import read_yaml
from quintet.policies.vision.image_encoder import is_vision_language
from quintet.rollout.engines.engine import EngineSetup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "rollout.engine_options"
WORKER = "quintet.rollout.engines.vllm.worker_extension.QuintetWorker"
WORKER_WITH_IMAGES = "quintet.rollout.engines.vllm.image_inputs.QuintetWorker"
"""The same class in the module that every process with a worker imports to read images."""
DEFAULT_CPU_BLOCK_SIZE = 128
DEFAULT_CPU_MEMORY_SHARE = 0.5
"""Maximum share of the machine's memory for the KV cache on a CPU."""
CACHE_SLACK = 1.25
"""KV cache relative to that of the running requests, for prefixes of earlier prompts."""

TABLES: Final = read_yaml(__file__)
NAMES: Mapping[str, tuple[str, ...]] = {option: tuple(names) for option, names in TABLES["names"].items()}
KEY_BY_ARGUMENT: Mapping[str, str] = TABLES["keys"]
RESERVED, NOT_OVERRIDDEN = frozenset(TABLES["reserved"]), frozenset(TABLES["not_overridden"])


@dataclass(frozen=True, slots=True)
class Release:
    """The installed vLLM: version, names of its arguments, and whether it runs on a CPU."""

    version: str
    arguments: frozenset[str]
    cpu: bool


def environment(options: EngineConfig) -> dict[str, str]:
    """Return environment variables for vLLM; variables that are already set take precedence."""
    single_node = options.executor == "mp"
    return {
        # `multiprocess_mode` decides at start; on a CPU this variable would add another process
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # opt out of usage reports to the vLLM project
        "VLLM_NO_USAGE_STATS": "1",
        # its warnings are about settings that are intended here
        "VLLM_LOGGING_LEVEL": "INFO" if options.log_statistics else "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # binding threads to cores starves a learner on the same cores
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # the newer runner samples in fused kernels whose log-probs include top-k and top-p
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # forking a process with torch threads can hang
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    } | ({"VLLM_HOST_IP": "127.0.0.1"} if single_node else {})


def engine_arguments(setup: EngineSetup, release: Release) -> dict[str, Any]:
    """Build the arguments of vLLM's `EngineArgs`.

    Raises:
        ConfigError: the version does not support an option, or one of `arguments`.
    """
    options = setup.options
    return (
        _fixed_arguments(setup, release)
        | _memory_arguments(setup, release)
        | _compilation_arguments(options, release)
        | _option_arguments(options, release)
        | _extra_arguments(options.arguments, release)
    )


def has_dummy_weights(options: EngineConfig) -> bool:
    """Return whether the engine starts with random weights. verl's names are `dummy_dtensor`, `dummy_hf`, …"""
    return (options.load_format or "").startswith("dummy")


def _fixed_arguments(setup: EngineSetup, release: Release) -> dict[str, Any]:
    """Arguments from the setup, and those that exact tokens and log-probs require."""
    options, reads_images = setup.options, is_vision_language(setup.model.config)
    several = options.tensor_parallel * options.pipeline_parallel > 1
    optional = {
        # responses are token ids; without a tokenizer vLLM does not add an EOS token either
        "skip_tokenizer_init": not options.detokenize,
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "hf_overrides": _overrides(setup) or None,
        # pixel values are normalized already
        "mm_device_do_normalize": False if reads_images else None,
        # steps must not overlap, so that a weight sync knows which weights generated a token
        "async_scheduling": None if options.separate_process else False,
        "distributed_executor_backend": options.executor if several or options.executor != "mp" else None,
    }
    return {name: value for name, value in optional.items() if value is not None and name in release.arguments} | {
        "model": str(setup.directory),
        "trust_remote_code": setup.trust_remote_code,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "seed": setup.seed % 2**32,
        "max_model_len": min(setup.max_model_len, options.max_model_tokens or setup.max_model_len),
        "max_num_seqs": setup.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel,
        "pipeline_parallel_size": options.pipeline_parallel,
        "disable_log_stats": not options.log_statistics,
        "logprobs_mode": "raw_logprobs",
        "worker_extension_cls": WORKER_WITH_IMAGES if reads_images else WORKER,
    }


def _overrides(setup: EngineSetup) -> dict[str, Any]:
    """Values in which the learner's model configuration differs from its directory."""
    current = setup.model.config.to_dict()
    stored = type(setup.model.config).from_pretrained(setup.directory, local_files_only=True).to_dict()
    return {
        name: value
        for name, value in current.items()
        if name in stored and name not in NOT_OVERRIDDEN and stored[name] != value
    }


def _compilation_arguments(options: EngineConfig, release: Release) -> dict[str, Any]:
    """`torch_compile` without CUDA graphs needs a separate mode; with them vLLM compiles anyway."""
    if not options.torch_compile:
        return {"enforce_eager": options.eager}
    _argument_name("torch_compile", options.torch_compile, release)
    graphs = {"cudagraph_mode": "NONE"} if options.eager else {}
    return {"enforce_eager": False, "compilation_config": {"mode": 3, **graphs}}


def _option_arguments(options: EngineConfig, release: Release) -> dict[str, Any]:
    """Options that differ from their defaults."""
    arguments: dict[str, Any] = {}
    for option in NAMES.keys() - {"torch_compile"}:
        value = getattr(options, option)
        if value == EngineConfig.model_fields[option].default:
            continue
        name = _argument_name(option, value, release)
        arguments[name] = _convert(name, value)
    return arguments


def _argument_name(option: str, value: object, release: Release) -> str:
    """Name of the option's argument in this version."""
    if name := next((name for name in NAMES[option] if name in release.arguments), None):
        return name
    problem = f"vLLM {release.version} has no {NAMES[option][0]}" if NAMES[option] else "vLLM has no such option"
    raise ConfigError(
        f"{KEY}.{option} = {value}: {problem}", key=f"{KEY}.{option}", value=value, hint=f"remove {KEY}.{option}"
    )


def _convert(name: str, value: Any) -> Any:
    """The value as vLLM expects it under that name."""
    if name == "load_format":
        return _load_format(value)
    if name == "mm_processor_cache_gb":
        return 0
    if name == "disable_mm_preprocessor_cache":
        return True
    return value


def _load_format(name: str) -> str:
    """vLLM's load format for verl's names, which also describe how verl's learner transfers weights."""
    if name.startswith("dummy"):
        return "dummy"
    return "auto" if name in {"hf", "dtensor", "megatron"} else name


def _extra_arguments(arguments: Mapping[str, Any], release: Release) -> dict[str, Any]:
    """Arguments under vLLM's names, from `engine_options.arguments`."""
    for name, value in arguments.items():
        key = f"{KEY}.arguments.{name}"
        if name in KEY_BY_ARGUMENT:
            raise ConfigError(
                f"{key}: this is set by {KEY_BY_ARGUMENT[name]}",
                key=key,
                value=value,
                hint=f"set {KEY_BY_ARGUMENT[name]} instead",
            )
        if name in RESERVED:
            message = f"{key}: tokens and log-probs would not be exact"
            raise ConfigError(message, key=key, value=value, hint=f"remove {key}")
        if name not in release.arguments:
            hint = did_you_mean(name, release.arguments) or f"remove {key}"
            raise ConfigError(f"{key}: vLLM {release.version} has no such argument", key=key, value=value, hint=hint)
    return dict(arguments)


def _memory_arguments(setup: EngineSetup, release: Release) -> dict[str, Any]:
    """On a CPU, size the KV cache by its requests; vLLM's default there is nearly all of the memory. Sleep mode exists
    only on GPUs and requires another allocator."""
    options = setup.options
    if not release.cpu:
        use_sleep_mode = options.sleep_between_steps or options.offload
        return {"enable_sleep_mode": True} if use_sleep_mode and "enable_sleep_mode" in release.arguments else {}
    if "kv_cache_memory_bytes" not in release.arguments:
        return {}
    total = hardware.memory_bytes()
    share = options.memory_share or DEFAULT_CPU_MEMORY_SHARE
    return {"kv_cache_memory_bytes": min(_kv_cache_bytes(setup), int(share * total))}


def _kv_cache_bytes(setup: EngineSetup) -> int:
    """Size of the KV cache of all requests at maximum length, in blocks, plus slack."""
    block = setup.options.block_size or DEFAULT_CPU_BLOCK_SIZE
    blocks = (setup.max_num_seqs * CACHE_SLACK + 2) * -(-setup.max_model_len // block)
    return int(blocks * block * _token_bytes(setup.model, setup.dtype.itemsize))


def _token_bytes(model: PreTrainedModel, itemsize: int) -> int:
    """Size of the keys and values of one token."""
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * dim * itemsize)
