"""If these fail, a long prompt stops the responses of all others, or waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quintet.config.plan.kv_blocks import BLOCK
from quintet.policies import inference_decoder
from quintet.policies.model_loading import load_model
from quintet.records import Request
from quintet.rollout.engines.hf.attention_state import CacheShape
from quintet.rollout.engines.hf.engine import HfEngine
from quintet.rollout.engines.hf.paged_cache import CachedSequence, PagedCache
from quintet.rollout.engines.hf.prefill import MAX_STALE_PASSES, PassBudget, next_spans, split_at_kernel_limit

SHAPE = CacheShape((0,), 1, 1, torch.float32, torch.device("cpu"))


def test_the_budget_follows_measured_times() -> None:
    """Decoding alone 0.1 s; 64 tokens take 0.1 s more; 2.5 times 0.1 s leaves 0.15 s, and without decoding 0.5 s."""
    budget = PassBudget(8192, 2.5)
    assert budget.next_tokens(16) == 0, "pure decoding is measured first"
    budget.record(0.1, 16, 0)
    assert budget.next_tokens(16) == 64
    budget.record(0.2, 16, 64)
    assert budget.next_tokens(16) == 96
    assert budget.next_tokens(0) == 320
    budget.record(2.0, 16, 96)  # attention over a long context
    assert budget.next_tokens(16) < 50
    assert PassBudget(7, 2.5).next_tokens(0) == 7


def test_pure_decoding_is_measured_again_when_it_may_have_changed() -> None:
    budget = PassBudget(8192, 2.5)
    budget.record(0.1, 16, 0)
    assert budget.next_tokens(17) > 0
    assert budget.next_tokens(40) == budget.next_tokens(4) == 0
    for _ in range(MAX_STALE_PASSES + 1):
        budget.record(0.2, 16, 64)
    assert budget.next_tokens(16) == 0
    budget.record(0.1, 16, 0)
    assert budget.next_tokens(16) > 0


def test_without_a_slowdown_the_budget_is_constant() -> None:
    budget = PassBudget(100)
    budget.record(9.0, 3, 50)
    assert budget.next_tokens(0) == budget.next_tokens(500) == 100


def opened(cache: PagedCache, first: int, length: int) -> CachedSequence:
    return cache.open(tuple(range(first, first + length)))


def test_short_prompts_come_first_but_a_long_one_does_not_wait_for_ever() -> None:
    cache = PagedCache(SHAPE, 2000, 400, 4096)
    long, passes = opened(cache, 10_000, 200), 0
    while not long.num_computed:
        short = opened(cache, 100 * passes, 60)
        (span,) = next_spans([long, short], 60, chunked=True)
        assert span.count == 60
        passes += 1
    assert span.sequence is long
    assert 5 < passes < 15, "140 tokens behind, 15 of them made up in each pass"


def test_a_pass_is_filled_with_the_next_prompts() -> None:
    cache = PagedCache(SHAPE, 100, 8, 256)
    sequences = [opened(cache, 1000 * n, length) for n, length in enumerate((90, 30, 40))]
    spans = next_spans(sequences, 100, chunked=True)
    assert [sequences.index(span.sequence) for span in spans] == [1, 2, 0]
    assert [(span.start, span.count) for span in spans] == [(0, 30), (0, 40), (0, 30)]
    assert sequences[0].num_computed == 30


def test_samples_of_a_prompt_and_what_prompts_share_are_computed_in_the_same_pass() -> None:
    cache = PagedCache(SHAPE, 100, 8, 256)
    prompts = [tuple(range(40)), tuple(range(40)), (*range(2 * BLOCK), 7, 7, 7)]
    spans = next_spans([cache.open(prompt) for prompt in prompts], 1000, chunked=True)
    assert sorted((span.start, span.count) for span in spans) in ([(0, 35), (32, 8)], [(0, 40), (32, 3)])


def test_long_prompts_are_divided_where_the_kernels_end() -> None:
    assert split_at_kernel_limit(4000, 200) == [(4000, 96), (4096, 104)]
    assert split_at_kernel_limit(0, 4096) == [(0, 4096)]
    assert split_at_kernel_limit(5000, 10) == [(5000, 10)]


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_passes_are_padded_only_for_batch_invariance(policy_directory: Path, batch_invariant: bool) -> None:
    engine = HfEngine(load_model(policy_directory), max_num_seqs=2, max_model_len=64, batch_invariant=batch_invariant)
    sizes: list[int] = []
    embedding = engine._model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, arguments: sizes.append(arguments[0].shape[-1]))
    engine.add_request(Request(0, (1, 2, 3), 4, seed=0))
    while engine.busy:
        engine.step()
    rows = inference_decoder.MIN_ROWS
    assert sizes == ([rows] * 4 if batch_invariant else [3, 1, 1, 1])


def test_an_engine_with_slow_passes_decodes_in_every_one(policy_directory: Path) -> None:
    """Each step of the engine brings a token to the running request while the long prompt is read."""
    engine = HfEngine(load_model(policy_directory), max_num_seqs=2, max_model_len=600, max_pass_slowdown=1.0001)
    engine.add_request(Request(0, (1, 2, 3), 300, seed=0))
    engine.step()
    engine.add_request(Request(1, tuple(5 + n % 199 for n in range(500)), 1, seed=0))
    steps = 0
    while not any(generation.id == 1 for generation in engine.step()):
        steps += 1
    assert len(engine.partial_responses([0])[0][0]) == steps + 2
    assert steps > 5
