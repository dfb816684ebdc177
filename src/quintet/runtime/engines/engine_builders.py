"""Setup of engines from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quintet.config.native.experiment import Experiment
from quintet.config.native.rollout import EngineConfig
from quintet.config.plan.placement import place_components
from quintet.config.plan.process_layout import process_layout
from quintet.errors import ConfigError
from quintet.policies.lora import add_lora, merge_adapters
from quintet.policies.model_loading import load_model, load_policy_tokenizer
from quintet.rollout.engines.engine import ENGINES, Engine, EngineSetup
from quintet.rollout.engines.grammars import GrammarCompiler
from quintet.rollout.engines.hf.cache_memory import max_cache_blocks
from quintet.rollout.sampling_params import max_concurrent_requests, max_model_len
from quintet.runtime.device import move_to_engine_device
from quintet.runtime.dtypes import stored_dtype, with_dtypes
from quintet.runtime.groups import PolicyGroup
from quintet.seeds import derive_seed
from quintet.training.parallel.process_group import RankGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARE_OF_ALL_ENGINES = 0.9
"""Of the memory of a device with several engines, if `memory_share` is not set."""
DTYPES_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def policy_dtype(config: Experiment) -> torch.dtype:
    """Return the dtype of the policy in training and generation."""
    return DTYPES_BY_NAME[with_dtypes(config).policy.dtype]


def engine_dtype(config: Experiment, policy: Path) -> torch.dtype:
    """Return the engine's dtype (default: the policy's). `auto` is the dtype of the initial model, at `policy.path` or,
    for a preset, at `policy`; a checkpoint is stored in the learner's dtype.

    Raises:
        ConfigError: no engine supports the dtype.
        MachineError: the initial model was removed.
    """
    name: str | None = config.rollout.engine_options.dtype
    if name is None:
        return policy_dtype(config)
    if name == "auto":
        name = stored_dtype(config.policy.path or policy, "rollout.engine_options.dtype")
    return DTYPES_BY_NAME[name]


def engine_setup(
    config: Experiment,
    policy: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    max_model_len: int,
    *,
    max_concurrent: int | None = None,
    is_learner_model: bool = True,
    is_interactive: bool = False,
) -> EngineSetup:
    """Return the setup of an engine for the model at `policy`, with a context of `max_model_len` tokens.

    Args:
        max_concurrent: Maximum number of concurrent requests (default: `rollout.max_concurrent`).
        is_learner_model: Whether `model` is the learner's, whose weights the engine must not change.
        is_interactive: Whether clients wait for each token.

    Raises:
        ConfigError: the KV cache of one request does not fit into the engine's share of the memory.
    """
    options = _shared_device_options(config)
    dtype = engine_dtype(config, policy)
    max_requests = config.rollout.max_concurrent if max_concurrent is None else max_concurrent

    cache_blocks = None
    if config.rollout.engine == "hf":
        cache_blocks = max_cache_blocks(model, max_model_len, max_requests, options.memory_share, dtype)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    return EngineSetup(
        directory=policy,
        model=model,
        dtype=dtype,
        max_num_seqs=max_requests,
        max_model_len=max_model_len,
        detokenize=decode,
        options=options,
        seed=derive_seed(config.seed, "engine"),
        trust_remote_code=config.policy.trust_remote_code,
        grammars=GrammarCompiler(tokenizer, model.config.get_text_config().vocab_size),
        is_learner_model=is_learner_model,
        is_interactive=is_interactive,
        max_cache_blocks=cache_blocks,
    )


def _shared_device_options(config: Experiment) -> EngineConfig:
    """Return the engine's options, with an equal share of the device if several engines on it have no `memory_share`:
    vLLM and SGLang would each take most of the memory."""
    options, rollout = config.rollout.engine_options, place_components(config).of("rollout")
    count = rollout.processes_per_device if rollout else 1
    if count < 2 or options.memory_share is not None or config.rollout.engine == "hf":
        return options
    return options.model_copy(update={"memory_share": SHARE_OF_ALL_ENGINES / count})


def load_checked_tokenizer(config: Experiment, policy: Path, vocabulary: int) -> Any:
    """Load the configured tokenizer.

    Raises:
        ConfigError: it has more tokens than the model's vocabulary of that size.
    """
    tokenizer = load_policy_tokenizer(config.policy, policy)
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"policy.tokenizer = {config.policy.tokenizer!r} has {len(tokenizer)} tokens, the model only {vocabulary}",
            key="policy.tokenizer",
            value=config.policy.tokenizer,
            hint="use the model's own tokenizer: policy.tokenizer=null",
        )
    return tokenizer


def engine_builder(
    config: Experiment, policy: Path, learners: PolicyGroup | None = None, tokenizer: Any = None
) -> Callable[[], Engine]:
    """Return a function that builds this process's engine of a training run, with the initial model at `policy`: on the
    model of its `learners`, or on a copy if it has none or their weights are sharded. The default `tokenizer` is
    loaded.

    Raises:
        ConfigError: the engine is unknown, the tokenizer does not fit the model, or the KV cache of one request does
            not fit into the memory.
    """
    shared = learners if learners is not None and learners.has_full_weights else None
    model = load_engine_model(config, policy) if shared is None else shared.actor.model
    if tokenizer is None:
        tokenizer = load_checked_tokenizer(config, policy, model.config.get_text_config().vocab_size)
    setup = engine_setup(
        config,
        policy,
        model,
        tokenizer,
        max_model_len(config),
        max_concurrent=max_concurrent_requests(config),
        is_learner_model=shared is not None,
    )
    build_engine = ENGINES.get(config.rollout.engine).load()
    return lambda: build_engine(setup)


def load_engine_model(config: Experiment, policy: Path) -> PreTrainedModel:
    """Load a model for an engine that has weights of its own.

    Raises:
        MachineError: the directory contains no model.
    """
    trusted, overrides = config.policy.trust_remote_code, config.policy.overrides
    is_computed = config.rollout.engine == "hf"
    model = load_model(policy, trust_remote_code=trusted, overrides=overrides, is_computed=is_computed)
    return move_to_engine_device(model, config)


def load_merged_model(config: Experiment, policy: Path) -> PreTrainedModel:
    """Load a model that is not trained, with the adapters at `policy.lora.path` merged into it.

    Raises:
        MachineError: the directory contains no model.
    """
    model = load_model(
        policy,
        trust_remote_code=config.policy.trust_remote_code,
        overrides=config.policy.overrides,
        is_computed=config.rollout.engine == "hf",
    )
    if config.policy.lora is not None and config.policy.lora.path is not None:
        add_lora(model, config.policy.lora)
        merge_adapters(model)
    return move_to_engine_device(model, config)


def ranks_per_engine(config: Experiment) -> int | None:
    """Return the number of ranks whose devices an engine uses; the first of them has the engine. None if only rank 0
    generates: with a server of its own, or engines that would be on several nodes."""
    options = config.rollout.engine_options
    devices = options.tensor_parallel * options.pipeline_parallel
    is_on_one_node = config.placement.nodes == 1 or config.placement.devices_per_node % devices == 0
    return devices if config.rollout.engine != "sglang-server" and is_on_one_node else None


def has_engine(config: Experiment, ranks: RankGroup) -> bool:
    """Return whether a rank with learners has an engine: the first of the ranks whose devices it uses."""
    size, layout = ranks_per_engine(config) or ranks.size, process_layout(config)
    is_first = ranks.rank % size == 0 and ranks.rank + size <= ranks.size
    return is_first and layout.has_engine(layout.learner_ranks[ranks.rank])


def standalone_engine_ranks(config: Experiment) -> tuple[int, ...]:
    """Return the ranks without learners that have an engine: the first of the ranks whose devices it uses."""
    return process_layout(config).standalone.get("rollout", ())[:: ranks_per_engine(config) or 1]
