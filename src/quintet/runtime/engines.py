"""Setup of engines from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quintet.config.native.experiment import Experiment
from quintet.rollout.engines.engine import EngineSetup
from quintet.rollout.engines.grammars import GrammarCompiler
from quintet.rollout.engines.hf.memory import max_seqs_in_memory
from quintet.runtime.dtypes import stored_dtype, with_dtypes
from quintet.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
) -> EngineSetup:
    """Return the setup of an engine for the model at `policy`, with a context of `max_model_len` tokens.

    Args:
        max_concurrent: Maximum number of concurrent requests (default: `rollout.max_concurrent`).
        is_learner_model: Whether `model` is the learner's, whose weights the engine must not change.

    Raises:
        ConfigError: the KV cache of one request does not fit into the engine's share of the memory.
    """
    options = config.rollout.engine_options
    dtype = engine_dtype(config, policy)
    max_requests = config.rollout.max_concurrent if max_concurrent is None else max_concurrent

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    return EngineSetup(
        directory=policy,
        model=model,
        dtype=dtype,
        max_num_seqs=max_seqs_in_memory(model, max_model_len, max_requests, options.memory_share, dtype),
        max_model_len=max_model_len,
        detokenize=decode,
        options=options,
        seed=derive_seed(config.seed, "engine"),
        trust_remote_code=config.policy.trust_remote_code,
        grammars=GrammarCompiler(tokenizer, model.config.get_text_config().vocab_size),
        is_learner_model=is_learner_model,
    )
