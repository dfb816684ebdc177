"""If these fail, tokens are sampled from another distribution than the requested one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quintet.rollout.engines.hf.sampling import LogitsProcessing, sample, uniform

pytestmark = pytest.mark.usefixtures("_with_and_without_kernels")

HALF = torch.tensor([0.5, 0.3, 0.2]).log()


def numbers(n: int) -> Tensor:
    return uniform(torch.arange(n), torch.zeros(n, dtype=torch.long))


def same_for_all_rows(n: int, **values: float) -> LogitsProcessing:
    named = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, **values}
    return LogitsProcessing(torch.arange(n), **{name: torch.full((n,), value) for name, value in named.items()})


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8), st.integers(0, 10_000))
def test_uniform_numbers_are_in_the_unit_interval(seeds: list[int], place: int) -> None:
    actual = uniform(torch.tensor(seeds), torch.full((len(seeds),), place))
    assert bool(((actual >= 0) & (actual < 1)).all())


def test_uniform_numbers_are_uniform() -> None:
    histogram = torch.histc(numbers(20_000), bins=10, min=0, max=1) / 20_000
    assert bool((histogram - 0.1).abs().max() < 0.01)


@pytest.mark.parametrize("vocabulary", [3, 64, 65, 200])
def test_sampling_follows_the_probabilities(vocabulary: int) -> None:
    """Also with likely tokens at both ends of vocabulary blocks."""
    n, places = 40_000, [0, vocabulary // 2, vocabulary - 1]
    logits = torch.full((n, vocabulary), -torch.inf)
    logits[:, places] = HALF
    tokens, logprobs = sample(logits, torch.ones(n), numbers(n))
    shares = torch.bincount(tokens, minlength=vocabulary)[places] / n
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.01, rtol=0)
    torch.testing.assert_close(
        logprobs.exp(), torch.tensor([0.5, 0.3, 0.2])[(tokens[:, None] == torch.tensor(places)).long().argmax(-1)]
    )


@given(st.integers(0, 2**32), st.floats(0, 1, exclude_max=True))
def test_inverse_transform_sampling_finds_the_right_token(seed: int, draw: float) -> None:
    logits = torch.randn(1, 150, generator=torch.Generator().manual_seed(seed)) * 3
    whole = logits.double().softmax(-1)[0].cumsum(-1)
    token = int(sample(logits, torch.ones(1), torch.tensor([draw], dtype=torch.float64))[0])
    assert float(whole[token]) >= draw - 1e-6
    assert token == 0 or float(whole[token - 1]) <= draw + 1e-6


def test_temperature_divides_and_zero_is_greedy() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]] * 3)
    tokens, logprobs = sample(logits.clone(), torch.tensor([0.0, 0.5, 2.0]), torch.full((3,), 0.999999))
    assert tokens.tolist() == [2, 2, 2]
    expected = torch.stack([(logits[0] / t).log_softmax(-1)[2] for t in (1.0, 0.5, 2.0)])
    torch.testing.assert_close(logprobs, expected)


def test_top_k_top_p_and_min_p_restrict_sampling() -> None:
    n = 2000
    logits = HALF.expand(n, 3)

    def sampled(**values: float) -> set[int]:
        return set(sample(logits.clone(), torch.ones(n), numbers(n), same_for_all_rows(n, **values))[0].tolist())

    assert sampled(top_k=2) == {0, 1}
    assert sampled(top_p=0.4) == {0}
    assert sampled(top_p=0.6) == {0, 1}
    assert sampled(min_p=0.5) == {0, 1}
    assert sampled(min_p=0.7) == {0}
    # of the two that top-k leaves, the first alone has 0.5 / 0.8
    assert sampled(top_k=2, top_p=0.6) == {0}


def warpers() -> dict[str, tuple[dict[str, float], Callable[[], object]]]:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    return {
        "top_k": ({"top_k": 5}, lambda: TopKLogitsWarper(5)),
        "top_p": ({"top_p": 0.6}, lambda: TopPLogitsWarper(0.6)),
        "min_p": ({"min_p": 0.2}, lambda: MinPLogitsWarper(0.2)),
    }


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_restricted_sampling_matches_transformers(name: str) -> None:
    values, warper = warpers()[name]
    row = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 2
    kept = (warper()(torch.zeros(1, 1, dtype=torch.long), row.clone()) > -torch.inf)[0]  # type: ignore[operator]
    n = 20_000
    tokens = sample(row.expand(n, -1).clone(), torch.ones(n), numbers(n), same_for_all_rows(n, **values))[0]
    shares = torch.bincount(tokens, minlength=40) / n
    expected = row[0].masked_fill(~kept, -torch.inf).softmax(-1)
    assert not bool((shares[~kept] > 0).any())
    torch.testing.assert_close(shares, expected, atol=0.015, rtol=0)


def test_repetition_penalty_matches_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    row = torch.randn(1, 12, generator=torch.Generator().manual_seed(5)) * 2
    held = torch.tensor([[1, 4, 7]])
    expected = RepetitionPenaltyLogitsProcessor(1.8)(held, row.clone()).argmax(-1)
    rules = same_for_all_rows(1, repetition_penalty=1.8)
    seen = torch.zeros(1, 12, dtype=torch.bool)
    seen[0, held[0]] = True
    rules = replace(rules, penalized_tokens=seen)
    token, logprob = sample(row.clone(), torch.zeros(1), torch.zeros(1), rules)
    assert int(token) == int(expected)
    torch.testing.assert_close(logprob, row.log_softmax(-1)[0, token])


def test_logits_of_other_rows_are_not_processed() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 2)
    rules = LogitsProcessing(
        torch.tensor([1]), torch.tensor([0]), torch.ones(1), torch.zeros(1), torch.ones(1), banned_tokens=[(0, (2,))]
    )
    tokens, _ = sample(logits, torch.zeros(2), torch.zeros(2), rules)
    assert tokens.tolist() == [2, 1]


def test_non_finite_logits_return_nan_log_probs() -> None:
    logits = torch.zeros(3, 70)
    logits[1, 5], logits[2, 0] = torch.nan, torch.inf
    tokens, logprobs = sample(logits, torch.ones(3), torch.full((3,), 0.5, dtype=torch.float64))
    assert logprobs.isnan().tolist() == [False, True, True]
    assert bool(((tokens >= 0) & (tokens < 70)).all())
