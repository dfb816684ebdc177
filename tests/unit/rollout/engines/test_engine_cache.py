"""If these fail, requests cost more than their distinct tokens, or the engine keeps memory that it does not need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quintet.policies import inference_decoder
from quintet.policies.model_loading import load_model
from quintet.records import Generation, Request
from quintet.rollout.engines.hf import idle_timer, scheduler
from quintet.rollout.engines.hf.engine import HfEngine

pytestmark = pytest.mark.usefixtures("_with_and_without_kernels")

HEAD, OTHER = tuple(range(200, 250)), tuple(range(100, 150))


def run(engine: HfEngine, requests: list[Request]) -> dict[int, Generation]:
    for request in requests:
        engine.add_request(request)
    done: dict[int, Generation] = {}
    while engine.busy:
        done |= {generation.id: generation for generation in engine.step()}
    return done


def new_engine(directory: Path, **options: int) -> HfEngine:
    return HfEngine(load_model(directory), **{"max_num_seqs": 8, "max_model_len": 128, **options})


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of prompt tokens of every pass that has any."""
    passes: list[int] = []
    plain = scheduler.next_spans

    def counting(*arguments: object, **options: object) -> object:
        spans = plain(*arguments, **options)  # type: ignore[arg-type]
        passes.append(sum(span.count for span in spans))
        return spans

    monkeypatch.setattr(scheduler, "next_spans", counting)
    return passes


def test_prompts_behind_several_prefixes_compute_each_once(policy_directory: Path, counts: list[int]) -> None:
    """Two prefixes of 50 tokens, three full blocks of 16 each; the last two tokens are in a block of each prompt."""
    prompts = [(*head, 10 + n, 11, 12) for n, head in enumerate((HEAD, OTHER) * 3)]
    run(new_engine(policy_directory), [Request(n, prompt, 3, seed=n) for n, prompt in enumerate(prompts)])
    assert sum(counts) == 2 * 48 + 6 * 5


def test_a_later_prompt_shares_the_tokens_of_a_block_too(policy_directory: Path, counts: list[int]) -> None:
    engine = new_engine(policy_directory)
    run(engine, [Request(0, (*HEAD, 1, 2, 3), 3, seed=0)])
    counts.clear()
    run(engine, [Request(1, (*HEAD, 4, 5), 3, seed=1)])
    assert sum(counts) == 2


def test_branches_of_a_conversation_continue_in_its_cache(policy_directory: Path, counts: list[int]) -> None:
    """No request names an earlier one: two different replies to the same turn, and one to another part of it."""
    engine = new_engine(policy_directory)
    first = run(engine, [Request(0, HEAD, 20, seed=0, keep_kv_cache=True)])[0]
    turn = (*HEAD, *first.tokens)
    counts.clear()
    branches = [(*turn, 1, 2), (*turn, 3, 4, 5), (*turn[:60], 6)]
    alone = [run(engine, [Request(9, branch, 4, seed=5)])[9] for branch in branches]
    assert counts == [1 + 2, 3, 1]
    fresh = run(new_engine(policy_directory), [Request(n, branch, 4, seed=5) for n, branch in enumerate(branches)])
    assert [generation.tokens for generation in alone] == [fresh[n].tokens for n in range(3)]


def test_a_full_pool_preempts_and_computes_the_same_tokens(policy_directory: Path) -> None:
    """Eight sequences of up to 8 blocks in a pool of 14: without preemption 64 would be needed."""
    requests = [Request(n, tuple(range(20 + n, 50 + n)), 90, seed=n, temperature=0.7) for n in range(8)]
    requests[3] = replace(requests[3], top_k=5, repetition_penalty=1.2, frequency_penalty=0.1)
    expected = run(new_engine(policy_directory), requests)
    engine = new_engine(policy_directory, max_cache_blocks=14)
    done = run(engine, requests)
    assert engine._scheduler.num_preempted >= 2
    assert {n: each.tokens for n, each in done.items()} == {n: each.tokens for n, each in expected.items()}
    if inference_decoder.decode_kernels(load_model(policy_directory).dtype, "cpu"):
        assert done == expected
    assert engine._scheduler._cache.pool.num_used <= 14
    order = list(done)
    assert order.index(0) < order.index(7), "the first request waits for the last one"


def test_the_first_request_is_never_preempted(policy_directory: Path) -> None:
    """It ends after as many steps as in a pool with space for all."""

    def steps_to_the_first_response(engine: HfEngine) -> int:
        for n in range(8):
            engine.add_request(Request(n, tuple(range(20 + n, 50 + n)), 60, seed=n))
        for count in range(1, 100):
            if 0 in {generation.id for generation in engine.step()}:
                return count
        raise AssertionError("the first request does not end")

    full = new_engine(policy_directory, max_cache_blocks=14)
    assert steps_to_the_first_response(full) == steps_to_the_first_response(new_engine(policy_directory))
    assert full._scheduler.num_preempted


def test_a_pool_for_one_sequence_serves_all(policy_directory: Path) -> None:
    engine = new_engine(policy_directory, max_cache_blocks=1)
    requests = [Request(n, tuple(range(20 + n, 120 + n)), 27, seed=n) for n in range(3)]
    done = run(engine, requests)
    expected = run(new_engine(policy_directory), requests)
    assert {n: each.tokens for n, each in done.items()} == {n: each.tokens for n, each in expected.items()}


def test_memory_is_that_of_the_tokens_and_at_most_a_block_per_sequence(policy_directory: Path) -> None:
    """One long sequence beside short ones does not make them longer."""
    engine = new_engine(policy_directory)
    lengths = (120, 5, 6, 7, 8)
    for n, length in enumerate(lengths):
        engine.add_request(Request(n, tuple(range(20 * n + 1, 20 * n + 1 + length)), 8, seed=n))
    for _ in range(3):
        engine.step()
    assert engine._scheduler._cache.pool.num_used == sum(-(-(length + 2) // 16) for length in lengths)


def test_an_idle_engine_frees_its_memory(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_timer, "IDLE_SECONDS", 0.01)
    engine = new_engine(policy_directory)
    before = run(engine, [Request(0, HEAD, 4, seed=0)])
    timer = engine._idle_timer._timer
    assert timer is not None
    timer.join(30)
    while (again := engine._idle_timer._timer) is not None and again is not timer:
        again.join(30)
    pool = engine._scheduler._cache.pool
    assert pool.num_used == 0
    assert run(engine, [Request(0, HEAD, 4, seed=0)]) == before


def test_an_engine_with_requests_keeps_its_memory(policy_directory: Path) -> None:
    engine = new_engine(policy_directory)
    engine.add_request(Request(0, HEAD, 4, seed=0))
    engine.step()
    engine.free_idle_memory()
    assert engine._scheduler._cache.pool.num_used > 0
    (done,) = run(engine, []).values()
    assert done == run(new_engine(policy_directory), [Request(0, HEAD, 4, seed=0)])[0]
