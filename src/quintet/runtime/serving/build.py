"""Build the request handler of a model's directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import VisionConfig
from quintet.data.chat_templates import chat_template
from quintet.errors import ConfigError
from quintet.policies.model_loading import (
    build_meta_model,
    load_model,
    load_policy_tokenizer,
    prepare_vision_language_model,
)
from quintet.policies.vision.image_encoder import is_vision_language
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.rollout.engines.async_engine import AsyncEngine
from quintet.rollout.engines.engine import ENGINES
from quintet.runtime.components import stop_token_ids
from quintet.runtime.device import move_to_engine_device
from quintet.runtime.engines.engine_builders import engine_setup
from quintet.runtime.memory import use_one_arena
from quintet.runtime.process_settings import configure_process
from quintet.runtime.serving.request_handler import RequestHandler
from quintet.runtime.serving.tokenization import ChatTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

DEFAULT_CONTEXT = 4096
"""Default context in tokens of models that support more, since the KV cache is allocated for all of it."""
SELF_LOADING_ENGINES = frozenset({"vllm", "sglang"})
"""Engines that read the weights from the directory, so that no second copy is loaded."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A request handler, and settings of its engine to be shown to users."""

    handler: RequestHandler
    max_concurrent_requests: int
    """Maximum number of concurrent requests."""
    dtype: str


def build_request_handler(
    config: Experiment,
    policy: Path,
    *,
    name: str,
    context: int | None,
    default_context: int = DEFAULT_CONTEXT,
    template: str | None = None,
    can_sleep: bool = False,
) -> ServedModel:
    """Build the engine of `config.rollout` around the model at `policy`, served as `name`. The default `context` is the
    model's own, at maximum `default_context`. `template` replaces the tokenizer's, as `data.template` does. If it
    `can_sleep`, clients may let the engine free the memory of its device.

    Raises:
        ConfigError: the engine is unknown or does not support the configuration.
        MachineError: the directory contains no model.
    """
    configure_process(config)
    use_one_arena()
    # in the connection's thread instead of a pool, where a large text delays small ones
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    build_engine = ENGINES.get(config.rollout.engine).load()
    model = _model(config, policy)
    tokenizer = load_policy_tokenizer(config.policy, policy)
    if (text := chat_template(template).text) is not None:
        tokenizer.chat_template = text
    vocab_size, stop_tokens = (
        int(model.get_input_embeddings().num_embeddings),
        stop_token_ids(tokenizer, model.generation_config),
    )
    setup = engine_setup(
        config,
        policy,
        model,
        tokenizer,
        _context(config, model, context, default_context),
        is_learner_model=not can_sleep,
        is_interactive=True,
    )
    chat_tokenizer = build_chat_tokenizer(model, tokenizer, stop_tokens, config.policy.vision)
    engine = AsyncEngine(build_engine(setup), setup.max_num_seqs)
    handler = RequestHandler(engine, chat_tokenizer, name, vocab_size, setup.grammars, can_sleep=can_sleep)
    return ServedModel(handler, setup.max_num_seqs, str(setup.dtype).removeprefix("torch."))


def build_chat_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, stop_tokens: Sequence[int], vision: VisionConfig
) -> ChatTokenizer:
    """Build the tokenizer of a model, with the images that it reads."""
    images = ImagePrompts.from_model(model, vision)
    names = ("image_token_id", "video_token_id") if images else ()
    return ChatTokenizer(tokenizer, stop_tokens, images, [getattr(model.config, name) for name in names])


def _model(config: Experiment, policy: Path) -> PreTrainedModel:
    """Load the model; without weights if the engine reads them itself."""
    trusted, options = config.policy.trust_remote_code, config.rollout.engine_options
    if config.rollout.engine not in SELF_LOADING_ENGINES or options.load_format == "dummy":
        return move_to_engine_device(
            load_model(
                policy,
                trust_remote_code=trusted,
                overrides=config.policy.overrides,
                is_computed=config.rollout.engine == "hf",
            ),
            config,
        )
    model = build_meta_model(policy, trust_remote_code=trusted)
    if is_vision_language(model.config):
        prepare_vision_language_model(model, policy)
    return model


def _context(config: Experiment, model: PreTrainedModel, requested: int | None, default: int) -> int:
    maximum = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    requested = requested or config.rollout.engine_options.max_model_tokens
    if requested is None:
        return min(maximum or default, default)
    if maximum is not None and requested > maximum:
        raise ConfigError(
            f"--context {requested}: the model supports {maximum} tokens",
            key="--context",
            value=requested,
            hint=f"use {maximum} or less",
        )
    return requested
