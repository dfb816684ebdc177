"""If these fail, vLLM's log-probs do not match its tokens, or it continues with old weights."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm_bench import LONG, Bench, logprobs, make_policy, needs_vllm, open_bench, request, shift

from quintet.errors import ConfigError
from quintet.policies.model_loading import load_model
from quintet.records import FinishReason, Generation
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.weight_source import ModuleWeights, TensorWeights
from quintet.sampling import StructuredOutput

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def tied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def started_bench(tied_policy: Path) -> Iterator[Bench]:
    """One engine in this process for all tests that do not break it."""
    bench = open_bench(tied_policy)
    yield bench
    bench.engine.close()


@pytest.fixture
def bench(started_bench: Bench, tied_policy: Path) -> Bench:
    """The engine with its initial weights."""
    started_bench.model.load_state_dict(load_model(tied_policy).state_dict())
    started_bench.engine.load_weights(0, ModuleWeights(started_bench.model))
    return started_bench


CHANGED_DRAWS = [
    {},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"top_k": 5, "temperature": 1.7},
    {"top_p": 0.5},
    {"min_p": 0.2, "temperature": 0.8},
    {"repetition_penalty": 1.8},
    {"min_tokens": 6, "stop_token_ids": tuple(range(0, 305, 2))},
]


def test_logprobs_match_the_learner_for_all_sampling_options(bench: Bench) -> None:
    """All in one batch, so that each row has its own temperature."""
    requests = [request(n, **changes) for n, changes in enumerate(CHANGED_DRAWS)]
    done = bench.run(*requests)
    assert max(bench.gap(one, done[one.id]) for one in requests) < 1e-4


def test_top_k_and_top_p_restrict_sampling(bench: Bench) -> None:
    greedy = bench.run(request(0, temperature=0.0))[0]
    likeliest = bench.run(request(1, prompt=request(0).prompt, top_k=1))[1]
    assert greedy.tokens == likeliest.tokens
    penalised = bench.run(request(2, temperature=0.0, repetition_penalty=50.0, max_tokens=30))[2]
    assert len(set(penalised.tokens) | set(request(2).prompt)) == 30 + len(request(2).prompt)


def test_logprobs_match_after_twenty_weight_syncs(bench: Bench) -> None:
    """The long prompt was cached under earlier weights: its cache must be dropped."""
    asked = [request(n, prompt=(*LONG, 100 + n)) for n in range(4)]
    for version in range(1, 21):
        bench.run(replace(asked[0], max_tokens=2))
        shift(bench.model, version)
        bench.engine.load_weights(version, ModuleWeights(bench.model))
    done = bench.run(*asked)
    assert max(bench.gap(one, done[one.id]) for one in asked) < 1e-4
    assert {generation.weight_version for generation in done.values()} == {20}


def test_weights_loaded_by_vllm_itself_and_directly_are_the_same(bench: Bench) -> None:
    """The direct way is used for this model, vLLM's own for others; the tied head is packed again by both."""
    worker = bench.engine._llm_engine._engine.model_executor.driver_worker.worker
    direct, asked = worker._quintet_loader, request(0)
    assert direct
    gaps = []
    for version, loader in ((1, False), (2, direct)):
        worker._quintet_loader = loader
        shift(bench.model, version)
        bench.engine.load_weights(version, ModuleWeights(bench.model))
        gaps.append(bench.gap(asked, bench.run(asked)[0]))
    assert max(gaps) < 1e-4


def test_a_response_depends_only_on_its_seed(bench: Bench) -> None:
    """Greedy requests have no seed; they must not change the samples of other requests."""
    requests = [request(n, temperature=0.0 if n % 3 == 0 else 1.0, top_k=n) for n in range(7)]
    together = bench.run(*requests)
    for one in requests:
        assert bench.run(one)[one.id].tokens == together[one.id].tokens
    assert bench.run(request(1, seed=9, top_k=1 * 0))[1].tokens != bench.run(request(1, top_k=0))[1].tokens


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64 - 1, -1, -5])
def test_every_seed_is_accepted(bench: Bench, seed: int) -> None:
    assert bench.run(request(0, seed=seed))[0].tokens == bench.run(request(0, seed=seed))[0].tokens


def test_stop_reasons(bench: Bench) -> None:
    first = bench.run(request(0, max_tokens=4))[0]
    assert (first.finish_reason, len(first.tokens)) == (FinishReason.LENGTH, 4)
    stopped = bench.run(request(0, stop_token_ids=(first.tokens[1],)))[0]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens == first.tokens[:2]
    full = bench.run(request(0, prompt=tuple(range(1, 300)) + LONG[:208], max_tokens=50))[0]
    assert (full.finish_reason, len(full.tokens)) == (FinishReason.CONTEXT, 5)


def test_only_requested_stop_tokens_end_a_response(bench: Bench) -> None:
    """The model's generation config has half of all tokens as end tokens."""
    done = bench.run(request(0, max_tokens=40))[0]
    assert (done.finish_reason, len(done.tokens)) == (FinishReason.LENGTH, 40)
    assert any(token % 2 == 0 for token in done.tokens[:-1])
    assert bench.run(request(0, max_tokens=40, min_tokens=40))[0].tokens == done.tokens


def test_stops_wait_for_min_tokens(bench: Bench) -> None:
    stops = tuple(range(1, 305, 2))
    done = bench.run(request(0, stop_token_ids=stops, min_tokens=7, max_tokens=40))[0]
    assert not any(token % 2 for token in done.tokens[:7])
    assert done.finish_reason is FinishReason.STOP
    assert len(done.tokens) > 7 or done.tokens[6] % 2


def test_stop_strings_across_token_borders_end_a_response(bench: Bench) -> None:
    words = bench.run(request(0, max_tokens=30))[0]
    text = bench.setup.detokenize(words.tokens[9:12])
    stopped = bench.run(request(0, max_tokens=30, stop_strings=("never said", text[1:-1])))[0]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(stopped.tokens) <= 12
    assert stopped.tokens == words.tokens[: len(stopped.tokens)]
    assert text[1:-1] in bench.setup.detokenize(stopped.tokens)


@pytest.mark.parametrize("prompt", [(), tuple(range(1, 300)) + LONG[:213]])
def test_a_prompt_without_room_is_rejected(bench: Bench, prompt: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="512"):
        bench.engine.add_request(request(0, prompt=prompt))
    assert not bench.engine.busy


def test_requests_that_vllm_rejects_fail_alone(bench: Bench) -> None:
    done = bench.run(request(0), request(1, prompt=(5, 9999)), request(2, temperature=0.001))
    assert [done[n].finish_reason for n in range(3)] == [FinishReason.LENGTH, FinishReason.FAILED, FinishReason.FAILED]
    assert done[1].failure is not None
    assert "vocabulary" in done[1].failure.message
    (without_tokenizer,) = bench.run(
        request(3, structured_output=StructuredOutput("json_object"), stop_token_ids=(2,))
    ).values()
    assert "set rollout.engine_options.detokenize=true" in str(without_tokenizer.failure)


def test_abort_returns_partial_responses(bench: Bench) -> None:
    for number in range(3):
        bench.engine.add_request(request(number, max_tokens=40))
    for _ in range(4):
        assert bench.engine.step() == []
    dropped = bench.engine.abort([1, 77])
    assert [(one.id, one.finish_reason, len(one.tokens), len(one.logprobs)) for one in dropped] == [
        (1, FinishReason.ABORT, 4, 4)
    ]
    rest: dict[int, Generation] = {}
    while bench.engine.busy:
        rest |= {one.id: one for one in bench.engine.step()}
    assert rest.keys() == {0, 2}
    assert rest[0].tokens == bench.run(request(0, max_tokens=40))[0].tokens


def test_a_weight_sync_during_vllm_generation(bench: Bench, tied_policy: Path) -> None:
    """Each token's log-prob is that of the recorded weights, including the keys and values of earlier tokens."""
    asked = [request(n, prompt=(*LONG, n), max_tokens=10) for n in range(12)]
    for one in asked:
        bench.engine.add_request(one)
    for _ in range(4):
        bench.engine.step()
    before = load_model(tied_policy)
    shift(bench.model, 3, scale=0.1)
    bench.engine.load_weights(6, ModuleWeights(bench.model))
    done: dict[int, Generation] = {}
    while bench.engine.busy:
        done |= {one.id: one for one in bench.engine.step()}
    assert done[0].weight_version == 0
    assert done[0].version_changes == ((4, 6),)
    late = [one for one in done.values() if one.weight_version == 6]
    assert len(late) == 4
    assert not any(one.version_changes for one in late)
    for one in asked:
        written = done[one.id]
        own = logprobs(bench.model, one, written)
        for place, version in written.version_changes:
            assert version == 6
            own[:place] = logprobs(before, one, written)[:place]
        assert float((own - torch.tensor(written.logprobs)).abs().max()) < 1e-4


def test_incomplete_weights_leave_the_engine_unchanged(bench: Bench) -> None:
    before = bench.run(request(0))[0]
    with pytest.raises(EngineError, match="lacks"):
        bench.engine.load_weights(1, TensorWeights(list(bench.model.named_parameters())[:-1]))
    assert bench.run(request(0))[0] == before


def test_nan_weights_fail_their_own_requests(bench: Bench) -> None:
    good = {name: tensor.detach().clone() for name, tensor in bench.model.named_parameters()}
    bad = {**good, "model.layers.1.mlp.up_proj.weight": good["model.layers.1.mlp.up_proj.weight"] * math.nan}
    bench.engine.load_weights(1, TensorWeights(bad.items()))
    done = bench.run(*(request(n, prompt=(*LONG, n), temperature=n % 2) for n in range(4)))
    assert {one.finish_reason for one in done.values()} == {FinishReason.FAILED}
    assert {len(one.tokens) for one in done.values()} == {0}
    bench.engine.load_weights(2, TensorWeights(good.items()))
    healed = [request(n, prompt=(*LONG, n)) for n in range(4)]
    done = bench.run(*healed)
    assert max(bench.gap(one, done[one.id]) for one in healed) < 1e-4


def test_a_second_vllm_requires_its_own_process(bench: Bench, tied_policy: Path) -> None:
    """vLLM destroys state that all engines of a process share when one of them ends."""
    with pytest.raises(ConfigError, match="separate_process=true"):
        open_bench(tied_policy)
    assert bench.run(request(0))[0].finish_reason is FinishReason.LENGTH


def test_sleep_is_harmless_on_a_cpu(bench: Bench) -> None:
    before = bench.run(request(0))[0]
    bench.engine.sleep()
    bench.engine.wake_up()
    assert bench.run(request(0))[0] == before


def test_vllm_leaves_the_process_state_unchanged(bench: Bench) -> None:
    """vLLM's environment variables would reach child processes, and torch's threads could not be set again."""
    assert "LD_PRELOAD" not in os.environ
    assert not [name for name in os.environ if name.startswith("VLLM_")]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_vllm_can_be_started_again(started_bench: Bench, tied_policy: Path) -> None:
    """Last use of the shared engine; a run that lost its engine builds a new one."""
    before = started_bench.run(request(0, temperature=0.0))[0].finish_reason
    started_bench.engine.close()
    with pytest.raises(ConfigError, match="Load format `nonsense`"):
        open_bench(tied_policy, load_format="nonsense")
    again = open_bench(tied_policy)
    try:
        assert again.run(request(0, temperature=0.0))[0].finish_reason is before
        assert again.gap(request(1), again.run(request(1))[1]) < 1e-4
    finally:
        again.engine.close()
