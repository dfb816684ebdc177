"""What an engine is opened with, from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quintet.config.native import Experiment
from quintet.rollout.agent_loop import derive_seed
from quintet.rollout.engine import EngineSetup
from quintet.rollout.memory import slots_within
from quintet.runtime.stored_types import stored_type, with_types

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["engine_dtype", "engine_setup", "policy_dtype"]

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def policy_dtype(config: Experiment) -> torch.dtype:
    """Type in which the policy generates and multiplies while it learns."""
    return TYPES[with_types(config).policy.dtype]


def engine_dtype(config: Experiment, policy: Path) -> torch.dtype:
    """The engine's own type; without one, that of the policy. `auto` is what the model names that the run began with:
    the one at `policy.path`, or that made at `policy`. A checkpoint's own says how learners hold it.

    Raises:
        ConfigError: the model names a type that no engine is known to take.
        MachineError: that model isn't there any more.
    """
    named: str | None = config.rollout.engine_options.dtype
    if named is None:
        return policy_dtype(config)
    if named == "auto":
        named = stored_type(config.policy.path or policy, "rollout.engine_options.dtype")
    return TYPES[named]


def engine_setup(
    config: Experiment,
    policy: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    context: int,
    *,
    side_by_side: int | None = None,
    learner_owns: bool = True,
) -> EngineSetup:
    """For an engine around the model of that directory, with room for `context` tokens of prompt and answer and for
    `side_by_side` requests, or as many as `rollout.max_concurrent` says. `learner_owns` says that the model is the
    learner's.

    Raises:
        ConfigError: not even one request fits into the engine's share of the memory.
    """
    options = config.rollout.engine_options
    dtype = engine_dtype(config, policy)
    wanted = config.rollout.max_concurrent if side_by_side is None else side_by_side

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    return EngineSetup(
        directory=policy,
        model=model,
        dtype=dtype,
        slots=slots_within(model, context, wanted, options.memory_share, dtype),
        context=context,
        decode=decode,
        options=options,
        seed=derive_seed(config.seed, "engine"),
        trust_remote_code=config.policy.trust_remote_code,
        learner_owns=learner_owns,
    )
