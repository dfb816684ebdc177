"""If these fail, samples that share a prompt are scored as if they had another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quintet.config.native.learners import BudgetConfig
from quintet.config.native.training import TrainingConfig
from quintet.policies.model_loading import load_model
from quintet.policies.token_statistics import log_probs_and_entropy
from quintet.records import Batch
from quintet.training.packing import MicroBatchBudget, iter_micro_batches

Sequence = tuple[list[int], list[tuple[int, bool]]]
"""A prompt, and what follows it: each token, and whether the policy wrote it."""


def batch_of(sequences: list[Sequence]) -> Batch:
    tokens = [[*prompt, *(token for token, _ in rest)] for prompt, rest in sequences]
    masks = [[*(False for _ in prompt), *(own for _, own in rest)] for prompt, rest in sequences]
    flat = torch.tensor([token for row in tokens for token in row])
    return Batch(
        tokens=flat,
        positions=torch.cat([torch.arange(len(row)) for row in tokens]),
        lengths=torch.tensor([len(row) for row in tokens]),
        loss_mask=torch.tensor([own for row in masks for own in row]),
        turn=torch.zeros_like(flat),
        turn_end=torch.zeros_like(flat, dtype=torch.bool),
        trajectory=torch.arange(len(tokens)),
        group=torch.arange(len(tokens)),
        logprobs=torch.zeros(len(flat)),
        rewards=torch.zeros(len(flat)),
    )


def packed_logprobs(directory: Path, batch: Batch, max_tokens: int) -> Tensor:
    model = load_model(directory)
    out = torch.zeros(len(batch.tokens))
    with torch.no_grad():
        for micro in iter_micro_batches(batch, MicroBatchBudget(max_tokens)):
            out[micro.index], _ = log_probs_and_entropy(model, micro.packed)
    return out


def one_by_one(directory: Path, batch: Batch) -> Tensor:
    """Each sequence on its own through transformers' attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    parts = []
    for tokens, mask in zip(
        batch.tokens.split(batch.lengths.tolist()), batch.loss_mask.split(batch.lengths.tolist()), strict=True
    ):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].log_softmax(-1)
        scored = logits[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
        parts.append(torch.cat([torch.zeros(1), scored]) * mask)
    return torch.cat(parts)


def own(*tokens: int) -> list[tuple[int, bool]]:
    return [(token, True) for token in tokens]


CASES: dict[str, list[Sequence]] = {
    "samples of one prompt": [([1, 2, 3], own(4, 5)), ([1, 2, 3], own(6)), ([1, 2, 3], own(7, 8, 9))],
    "one-token replies to one prompt": [([1, 2, 3], own(4)), ([1, 2, 3], own(5))],
    "groups of prompts of unequal length": [
        ([9, 9, 1, 2], own(3)),
        ([9, 9, 1], own(4, 5, 6)),
        ([9, 9, 1, 2], own(7, 8)),
        ([9, 9, 1], own(4)),
    ],
    "a prompt that begins another": [([1, 2], own(3, 4)), ([1, 2, 5], own(6, 7)), ([1, 2], own(8, 9))],
    "a prompt of one token": [([1], own(2, 3)), ([2], own(3, 4)), ([1], own(5))],
    "nothing in common": [([1, 2], own(3, 4)), ([5, 6, 7], own(8)), ([9], own(1, 2, 3))],
    "turns of others in between": [
        ([1, 2, 3], [*own(4, 5), (6, False), (7, False), *own(8)]),
        ([1, 2, 3], [*own(4), (6, False), *own(8, 9)]),
        ([1, 2], [*own(4), (6, False), (6, False)]),
    ],
    "one sequence": [([1, 2, 3, 4], own(5, 6))],
    "a sequence without own tokens": [([1, 2, 3], []), ([1, 2, 3], own(4, 5)), ([6, 2], own(4))],
}


@pytest.mark.parametrize("max_tokens", [1, 6, 1000])
@pytest.mark.parametrize("name", CASES)
def test_packed_sequences_score_as_they_would_alone(policy_directory: Path, name: str, max_tokens: int) -> None:
    batch = batch_of(CASES[name])
    expected = one_by_one(policy_directory, batch)
    torch.testing.assert_close(packed_logprobs(policy_directory, batch, max_tokens), expected, atol=2e-5, rtol=0)


PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=5)
RESTS = st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=5)


@settings(max_examples=60, deadline=None)
@given(sequences=st.lists(st.tuples(PROMPTS, RESTS), min_size=1, max_size=8), max_tokens=st.integers(1, 60))
def test_any_batch_scores_as_its_sequences_would_alone(
    policy_directory: Path, sequences: list[Sequence], max_tokens: int
) -> None:
    batch = batch_of(sequences)
    expected = one_by_one(policy_directory, batch)
    torch.testing.assert_close(packed_logprobs(policy_directory, batch, max_tokens), expected, atol=2e-5, rtol=0)


def test_each_prompt_is_computed_once() -> None:
    prompt, other = list(range(1, 21)), [*range(1, 11), *range(50, 60)]
    batch = batch_of([(p, own(100 + i, 200, 201)) for i in range(8) for p in (prompt, other)])
    (micro,) = iter_micro_batches(batch, MicroBatchBudget(10_000))
    # the ten tokens in common, ten more of each prompt, and of each reply all but its last token
    assert len(micro.packed.tokens) == 10 + 2 * 10 + 16 * 2


def test_each_response_token_is_in_exactly_one_micro_batch() -> None:
    batch = batch_of([case for cases in CASES.values() for case in cases])
    scored = torch.cat([micro.index for micro in iter_micro_batches(batch, MicroBatchBudget(7))])
    assert torch.equal(scored.sort().values, batch.loss_mask.nonzero().squeeze(-1))


def test_micro_batches_respect_token_and_sequence_limits() -> None:
    """A `micro_batch_size` counts sequences, a token budget tokens: each holds by itself and beside the other."""
    batch = batch_of([([n, n + 1], [(n, True)] * 3) for n in range(7)])

    def sizes(budget: MicroBatchBudget) -> list[int]:
        return [len(torch.unique(batch.tokens[micro.index])) for micro in iter_micro_batches(batch, budget)]

    assert sizes(MicroBatchBudget(max_sequences=3)) == [3, 3, 1]
    assert sizes(MicroBatchBudget(max_tokens=10)) == [2, 2, 2, 1]
    assert sizes(MicroBatchBudget(max_tokens=20, max_sequences=3)) == [3, 1, 3]
    assert sizes(MicroBatchBudget()) == [7]


def test_a_component_has_its_own_limits_or_those_of_the_run() -> None:
    training = TrainingConfig(micro_batch_tokens=77)
    assert MicroBatchBudget.from_config(BudgetConfig(), training) == MicroBatchBudget(77)
    own = MicroBatchBudget.from_config(BudgetConfig(tokens=30, sequences=5), training, num_ranks=2)
    assert own == MicroBatchBudget(30, 5, 2)


def test_balanced_ranks_get_equally_many_similar_micro_batches() -> None:
    """By hand: sequences of 10, 11 … 17 tokens, 108 in all, with about 40 in a pass make three passes; for two ranks
    they are four."""
    batch = batch_of([([n], [(n, True)] * (9 + n)) for n in range(8)])

    def costs(budget: MicroBatchBudget) -> list[int]:
        return [
            len(micro.index) + len(torch.unique(batch.tokens[micro.index]))
            for micro in iter_micro_batches(batch, budget)
        ]

    assert costs(MicroBatchBudget(max_tokens=40)) == [33, 42, 33]
    assert costs(MicroBatchBudget(max_tokens=40, num_ranks=2)) == [33, 27, 31, 17]
    assert costs(MicroBatchBudget(num_ranks=2)) == [60, 48]
    assert costs(MicroBatchBudget(max_sequences=3, num_ranks=3)) == [33, 42, 33]
    assert len(costs(MicroBatchBudget(num_ranks=16))) == 8


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    tokens=st.none() | st.integers(1, 60),
    sequences=st.none() | st.integers(1, 6),
    ranks=st.integers(2, 5),
)
@settings(max_examples=80, deadline=None)
def test_balanced_micro_batches_have_each_sequence_once_within_limits(
    lengths: list[int], tokens: int | None, sequences: int | None, ranks: int
) -> None:
    batch = batch_of([([n], own(*range(length))) for n, length in enumerate(lengths)])
    micro_batches = list(iter_micro_batches(batch, MicroBatchBudget(tokens, sequences, ranks)))
    plain = list(iter_micro_batches(batch, MicroBatchBudget(tokens, sequences)))
    places = torch.cat([micro.index for micro in micro_batches])
    assert torch.equal(places.sort().values, batch.loss_mask.nonzero().squeeze(-1))
    assert len(micro_batches) % ranks == 0 or len(micro_batches) == len(lengths)
    assert len(plain) <= len(micro_batches) < len(plain) + ranks
    owner = torch.arange(len(lengths)).repeat_interleave(batch.lengths)
    held = [len(torch.unique(owner[micro.index])) for micro in micro_batches]
    assert max(held) <= (sequences or len(lengths))
    assert max(len(micro.index) for micro in micro_batches) <= max(len(micro.index) for micro in plain)
