"""Sampling parameters of training and validation, and the sizes of an engine, from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from quintet.config.native.experiment import Experiment
from quintet.errors import ConfigError
from quintet.records import ImageInput, Request
from quintet.sampling import SamplingSettings

SETTINGS = tuple(each.name for each in fields(SamplingSettings))


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingSettings):
    """Sampling parameters of a rollout."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    ignore_end: bool = False
    """Whether responses continue to their maximum length despite end tokens; `stop_strings` still end them."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a response instead of those of the chat format (None: those)."""

    def request(
        self,
        number: int,
        prompt: tuple[int, ...],
        max_tokens: int,
        seed: int,
        stop_token_ids: Sequence[int],
        *,
        keep_kv_cache: bool = False,
        images: tuple[ImageInput, ...] = (),
    ) -> Request:
        """Build the request for a turn. `stop_token_ids` are the chat format's; `keep_kv_cache` is True if the dialogue
        may continue; `images` are the images in the prompt."""
        stop_token_ids = tuple(stop_token_ids) if self.stop_token_ids is None else self.stop_token_ids
        settings = {name: getattr(self, name) for name in SETTINGS}
        return Request(
            id=number,
            prompt=prompt,
            max_tokens=max_tokens,
            seed=seed,
            **settings | {"min_tokens": min(self.min_tokens, max_tokens)},
            stop_token_ids=() if self.ignore_end else stop_token_ids,
            keep_kv_cache=keep_kv_cache,
            images=images,
        )


def training_sampling(config: Experiment, seed: int) -> SamplingParams:
    """Return the sampling parameters of training. Without `do_sample` decoding is greedy, while the learner keeps
    `rollout.temperature`."""
    rollout = config.rollout
    greedy = greedy_sampling(config, seed)
    if not rollout.do_sample:
        return greedy
    return replace(
        greedy, temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p
    )


def greedy_sampling(config: Experiment, seed: int = 0) -> SamplingParams:
    """Return parameters of greedy decoding, with the stop conditions and repetition penalty of training."""
    rollout = config.rollout
    return SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        seed=seed,
        repetition_penalty=rollout.repetition_penalty,
        min_tokens=rollout.min_response_tokens,
        ignore_end=rollout.ignore_end,
        stop_token_ids=None if rollout.end_token is None else (rollout.end_token,),
        stop_strings=rollout.stop,
    )


def validation_sampling(config: Experiment, seed: int) -> SamplingParams:
    """Return the sampling parameters of validation, with the stop conditions of training."""
    options, greedy = config.validation.sampling, greedy_sampling(config)
    if options.repetition_penalty is not None:
        greedy = replace(greedy, repetition_penalty=options.repetition_penalty)
    if not options.do_sample:
        return greedy
    return replace(
        greedy,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=seed,
    )


def max_concurrent_requests(config: Experiment) -> int:
    """Return the maximum number of requests that an engine decodes at the same time in training."""
    prompts = config.rollout.engine_options.prompts_per_device
    limit = config.rollout.max_concurrent
    return limit if prompts is None else min(limit, prompts * config.samples_per_prompt)


def validation_prompts(config: Experiment, num_held_out: int) -> int:
    """Return the number of held-out start states that are run at the same time, at least one."""
    limits = [num_held_out]
    if config.data is not None and config.data.validation_batch is not None:
        limits.append(config.data.validation_batch)
    if config.validation.prompts_per_device is not None:
        limits.append(config.validation.prompts_per_device)
    return max(1, min(limits))


def max_model_len(config: Experiment) -> int:
    """Return the maximum number of prompt and response tokens: never more than the two limits together."""
    needed = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    limit = config.rollout.engine_options.max_model_tokens
    return needed if limit is None else min(needed, limit)


def check_tokens(config: Experiment, vocab_size: int) -> None:
    """Check that token ids in the configuration exist.

    Raises:
        ConfigError: a token id is beyond the vocabulary.
    """
    for name, token in {"pad_token": config.rollout.pad_token, "end_token": config.rollout.end_token}.items():
        if token is not None and token >= vocab_size:
            raise ConfigError(
                f"rollout.{name} = {token}, but the model's last token id is {vocab_size - 1}",
                key=f"rollout.{name}",
                value=token,
                hint=f"remove rollout.{name}: the tokenizer defines it",
            )
