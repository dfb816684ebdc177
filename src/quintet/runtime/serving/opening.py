"""A model's directory becomes an engine that can be asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from quintet.config.native import Experiment
from quintet.errors import ConfigError, MachineError
from quintet.policies.causal_lm import load_model, load_tokenizer
from quintet.rollout.engine import ENGINES
from quintet.rollout.served import EngineThread
from quintet.runtime.device import beside_engine
from quintet.runtime.engines import engine_setup
from quintet.runtime.local import end_tokens
from quintet.runtime.memory import keep_freed_memory
from quintet.runtime.serving.desk import Desk
from quintet.runtime.serving.words import Words

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Opened", "open_desk"]

USUAL_CONTEXT = 4096
"""Tokens of prompt and answer, where the model can do more and nobody says how many: a cache is kept for them."""
LOAD_THEMSELVES = frozenset({"vllm", "sglang"})
"""Engines that read the weights from the directory: ours needn't hold them a second time."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A desk, and what its engine was opened with, for people."""

    desk: Desk
    slots: int
    """Requests side by side."""
    dtype: str


def open_desk(config: Experiment, policy: Path, *, name: str, context: int | None) -> Opened:
    """The engine of `config.rollout` around the model at `policy`, under that name; null takes the model's own context,
    at most `USUAL_CONTEXT`.

    Raises:
        ConfigError: the engine is unknown or can't do what is asked.
        MachineError: the directory isn't a model.
    """
    keep_freed_memory()
    torch.set_num_threads(config.training.threads or torch.get_num_threads())
    opening = ENGINES.get(config.rollout.engine).load()
    model = _model(config, policy)
    trusted = config.policy.trust_remote_code or config.policy.trust_tokenizer_code
    tokenizer = load_tokenizer(
        config.policy.tokenizer or policy, trust_remote_code=trusted, fast=config.policy.fast_tokenizer
    )
    vocabulary, ends = int(model.get_input_embeddings().num_embeddings), end_tokens(tokenizer, model)
    setup = engine_setup(config, policy, model, tokenizer, _context(config, model, context))
    desk = Desk(EngineThread(opening(setup)), Words(tokenizer, ends), name, vocabulary)
    return Opened(desk, setup.slots, str(setup.dtype).removeprefix("torch."))


def _model(config: Experiment, policy: Path) -> PreTrainedModel:
    """The model, or only its shape where the engine reads the weights itself."""
    trusted, options = config.policy.trust_remote_code, config.rollout.engine_options
    if config.rollout.engine not in LOAD_THEMSELVES or options.load_format == "dummy":
        return beside_engine(load_model(policy, trust_remote_code=trusted, overrides=config.policy.overrides), config)
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        shape = AutoConfig.from_pretrained(policy, trust_remote_code=trusted, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape, trust_remote_code=trusted)
        if (policy / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(policy, local_files_only=True)
    except (OSError, ValueError) as error:
        raise MachineError(f"can't load a model from {policy}: {error}", "give a Hugging Face directory") from error
    return cast("PreTrainedModel", model)


def _context(config: Experiment, model: PreTrainedModel, wanted: int | None) -> int:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    wanted = wanted or config.rollout.engine_options.max_model_tokens
    if wanted is None:
        return min(most or USUAL_CONTEXT, USUAL_CONTEXT)
    if most is not None and wanted > most:
        raise ConfigError(
            f"--context {wanted}: the model knows {most} places",
            key="--context",
            value=wanted,
            hint="give that or less",
        )
    return wanted
