"""If these fail, actions are drawn from another distribution than the one whose log-probs are trained."""

from __future__ import annotations

import pytest
import torch

from quintet.embodied_records import ActionSampling
from quintet.policies.vla.action_distributions import (
    normal_statistics,
    sample_normal,
    sample_tokens,
    token_statistics,
)

LOGITS = torch.tensor([0.1, 2.0, -1.0, 0.7, 1.9])
GRID = (torch.arange(20_000) + 0.5) / 20_000


@pytest.mark.parametrize("sampling", [ActionSampling(), ActionSampling(temperature=0.6, top_k=3)])
def test_tokens_are_as_frequent_as_their_probabilities(sampling: ActionSampling) -> None:
    scaled = LOGITS / sampling.temperature
    if sampling.top_k:
        scaled[scaled < scaled.topk(sampling.top_k).values[-1]] = -torch.inf
    expected = torch.distributions.Categorical(logits=scaled)
    tokens, logprobs = sample_tokens(LOGITS.expand(len(GRID), -1), GRID, sampling)
    frequencies = tokens.bincount(minlength=5) / len(GRID)
    assert torch.allclose(frequencies, expected.probs, atol=1e-4)
    assert torch.allclose(logprobs, expected.log_prob(tokens), atol=1e-6)
    again, entropies = token_statistics(LOGITS.expand(len(GRID), -1), tokens, sampling)
    assert torch.equal(again, logprobs)
    finite = expected.probs[expected.probs > 0]
    assert torch.allclose(entropies[0], -(finite * finite.log()).sum(), atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-24])
def test_the_first_and_the_last_uniform_give_tokens_that_are_possible(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    token, logprob = sample_tokens(logits, torch.tensor([uniform]), ActionSampling())
    assert token.item() in (1, 2)
    assert logprob.item() == pytest.approx(-0.6931, abs=1e-3)


def test_tokens_out_of_the_kept_ones_have_finite_log_probs_and_gradients() -> None:
    """A token that was kept when it was sampled may no longer be kept after an update."""
    logits = LOGITS.clone().requires_grad_()
    logprobs, _ = token_statistics(logits, torch.tensor(2), ActionSampling(top_k=2))
    (logprobs.exp() * 2).backward()
    assert logprobs.isfinite()
    assert logprobs.exp() == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_normal_actions_are_the_quantiles_of_their_uniforms() -> None:
    mean, log_std, sampling = torch.tensor(0.3), torch.tensor(-0.5), ActionSampling(temperature=2.0)
    expected = torch.distributions.Normal(mean, 2 * log_std.exp())
    actions, logprobs = sample_normal(mean.expand(len(GRID)), log_std, GRID, sampling)
    assert torch.allclose(actions, expected.icdf(GRID), atol=1e-4)
    assert torch.allclose(logprobs, expected.log_prob(actions), atol=1e-5)
    again, entropies = normal_statistics(mean.expand(len(GRID)), log_std, actions, sampling)
    assert torch.equal(again, logprobs)
    assert torch.allclose(entropies, expected.entropy().expand_as(entropies), atol=1e-6)
    greedy, _ = sample_normal(mean, log_std, None, sampling)
    assert greedy == mean
    extremes, _ = sample_normal(mean.expand(2), log_std, torch.tensor([0.0, 1 - 2.0**-24]), sampling)
    assert extremes.isfinite().all()
