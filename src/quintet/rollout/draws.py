"""How replies are drawn and how many at a time, as an experiment wants it; and tokens that it names by number."""

from __future__ import annotations

from dataclasses import replace

from quintet.config.native import Experiment
from quintet.errors import ConfigError
from quintet.rollout.agent_loop import Sampling

__all__ = [
    "check_tokens",
    "engine_context",
    "greedy_sampling",
    "requests_side_by_side",
    "training_sampling",
    "validation_prompts",
    "validation_sampling",
]


def training_sampling(config: Experiment, seed: int) -> Sampling:
    """Draws of training, all of which follow from `seed`. Without `do_sample` the likeliest token is taken each time;
    the temperature of learning stays."""
    rollout = config.rollout
    likeliest = greedy_sampling(config, seed)
    if not rollout.do_sample:
        return likeliest
    return replace(
        likeliest, temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p
    )


def greedy_sampling(config: Experiment, seed: int = 0) -> Sampling:
    """The likeliest token each time; what ends a reply, and what repetition costs, is as in training."""
    rollout = config.rollout
    return Sampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        seed=seed,
        repetition_penalty=rollout.repetition_penalty,
        min_tokens=rollout.min_response_tokens,
        ignore_end=rollout.ignore_end,
        end_ids=None if rollout.end_token is None else (rollout.end_token,),
        stop_texts=rollout.stop,
    )


def validation_sampling(config: Experiment, seed: int) -> Sampling:
    """Draws of validation: what ends a reply is as in training, the rest is its own."""
    wanted, likeliest = config.validation.sampling, greedy_sampling(config)
    if wanted.repetition_penalty is not None:
        likeliest = replace(likeliest, repetition_penalty=wanted.repetition_penalty)
    if not wanted.do_sample:
        return likeliest
    return replace(
        likeliest,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        min_p=wanted.min_p,
        seed=seed,
    )


def requests_side_by_side(config: Experiment) -> int:
    """Most requests that an engine decodes at a time in training."""
    prompts = config.rollout.engine_options.prompts_per_device
    most = config.rollout.max_concurrent
    return most if prompts is None else min(most, prompts * config.training.samples_per_group)


def validation_prompts(config: Experiment, held_out: int) -> int:
    """Held-out starts that are played at a time, at least one."""
    limits = [held_out]
    if config.data is not None and config.data.validation_batch is not None:
        limits.append(config.data.validation_batch)
    if config.validation.prompts_per_device is not None:
        limits.append(config.validation.prompts_per_device)
    return max(1, min(limits))


def engine_context(config: Experiment) -> int:
    """Most tokens of prompt and reply together: never more than the two limits need."""
    needed = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    asked = config.rollout.engine_options.max_model_tokens
    return needed if asked is None else min(needed, asked)


def check_tokens(config: Experiment, vocabulary: int) -> None:
    """See that tokens named by number are there.

    Raises:
        ConfigError: one is beyond the vocabulary.
    """
    for name, number in {"pad_token": config.rollout.pad_token, "end_token": config.rollout.end_token}.items():
        if number is not None and number >= vocabulary:
            raise ConfigError(
                f"rollout.{name} = {number}, and the model's last token is {vocabulary - 1}",
                key=f"rollout.{name}",
                value=number,
                hint=f"leave rollout.{name} out: the tokenizer knows it",
            )
