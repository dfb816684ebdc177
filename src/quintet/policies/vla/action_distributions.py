"""Distributions of actions: sampling by inverse transform, log-probs and entropies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quintet.embodied_records import ActionSampling
from quintet.policies.output_head import MASKED_LOGIT

SMALLEST_UNIFORM = 2.0**-25
"""Half the distance of float32 uniforms, so that the quantiles of a normal distribution are finite."""


def sample_tokens(logits: Tensor, uniforms: Tensor | None, sampling: ActionSampling) -> tuple[Tensor, Tensor]:
    """Return tokens, int64 [...], and their log-probs, float32 [...], from logits [..., K] and uniforms [...].

    A token is the first whose cumulative probability exceeds its uniform; without uniforms, or at temperature 0, the
    likeliest.
    """
    logprobs = token_log_softmax(logits, sampling)
    if uniforms is None or sampling.temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cumulative = logprobs.double().exp().cumsum(-1)
        thresholds = uniforms.double().unsqueeze(-1) * cumulative[..., -1:]
        tokens = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def token_statistics(logits: Tensor, tokens: Tensor, sampling: ActionSampling) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies, float32 [...] in nats, of tokens [...] under logits [..., K]."""
    logprobs = token_log_softmax(logits, sampling)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropies


def token_log_softmax(logits: Tensor, sampling: ActionSampling) -> Tensor:
    """Return log-probs, float32 [..., K]. `temperature` 0 does not scale; `top_k` excludes the other tokens."""
    logits = logits.float()
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, MASKED_LOGIT)
    return logits.log_softmax(-1)


def sample_normal(
    mean: Tensor, log_std: Tensor, uniforms: Tensor | None, sampling: ActionSampling
) -> tuple[Tensor, Tensor]:
    """Return actions and their log-probs, float32 [...], from means [...] and uniforms [...].

    An action is the quantile of its uniform; without uniforms, or at temperature 0, the mean.
    """
    mean, log_std = mean.float(), _scaled(log_std, sampling)
    if uniforms is None or sampling.temperature == 0:
        actions = mean
    else:
        clamped = uniforms.double().clamp(SMALLEST_UNIFORM, 1 - SMALLEST_UNIFORM)
        actions = mean + log_std.exp() * torch.special.ndtri(clamped).float()
    actions = actions.detach()
    return actions, _normal_log_prob(actions, mean, log_std)


def normal_statistics(
    mean: Tensor, log_std: Tensor, actions: Tensor, sampling: ActionSampling
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies, float32 [...] in nats, of actions [...] under normal distributions."""
    mean, log_std = mean.float(), _scaled(log_std, sampling)
    entropies = (0.5 + 0.5 * math.log(2 * math.pi) + log_std).expand_as(mean)
    return _normal_log_prob(actions, mean, log_std), entropies


def _scaled(log_std: Tensor, sampling: ActionSampling) -> Tensor:
    """Return the log of the standard deviation, which a temperature multiplies."""
    return log_std.float() + (math.log(sampling.temperature) if sampling.temperature > 0 else 0.0)


def _normal_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    return -0.5 * ((actions - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
