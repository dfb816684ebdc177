"""If these fail, log-probs of prompts or penalties are wrong, or one request changes, stops or starves the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_engine import prompt, reference_logprobs, request, run

from quintet.config.native.policy import LoraConfig
from quintet.config.plan.kv_blocks import BLOCK
from quintet.policies.lora import add_lora
from quintet.policies.model_check import reference_logits
from quintet.policies.model_loading import cast_weights, load_model
from quintet.records import FinishReason, Request
from quintet.rollout.engines.hf.engine import HfEngine
from quintet.rollout.engines.weight_source import ModuleWeights
from quintet.sampling import StructuredOutput

CONTEXT = 128
PENALTIES: dict[str, Any] = {
    "frequency_penalty": 1.5,
    "presence_penalty": -0.5,
    "logit_bias": ((40, 3.0), (41, -100.0)),
}


def build(directory: Path, **options: Any) -> HfEngine:
    return HfEngine(load_model(directory), **{"max_num_seqs": 64, "max_model_len": CONTEXT, **options})


def scored(number: int, tokens: tuple[int, ...], **changes: Any) -> Request:
    return request(number, prompt=tokens, **{"max_tokens": 0, "prompt_logprobs": 0, **changes})


def long_prompt(count: int) -> tuple[int, ...]:
    return tuple(40 + place % 50 for place in range(count))


def assert_scores(directory: Path, tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
    expected = reference_logprobs(directory, tokens, 1) if len(tokens) > 1 else torch.zeros(0)
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [1, 16, 17, 33])
def test_a_last_pass_of_one_token_has_nothing_to_score(policy_directory: Path, length: int) -> None:
    engine = build(policy_directory, prefill_tokens=16)
    tokens = long_prompt(length)
    for top in (0, 2):
        (generation,) = run(engine, [scored(0, tokens, prompt_logprobs=top)]).values()
        assert generation.prompt_logprobs is not None
        assert_scores(policy_directory, tokens, generation.prompt_logprobs.logprobs)
        assert len(generation.prompt_logprobs.top_logprobs) == (length - 1 if top else 0)


def test_short_prompts_beside_a_long_one_take_no_memory_of_its_length(policy_directory: Path) -> None:
    engine = build(policy_directory, prefill_tokens=160)
    requests = [scored(0, long_prompt(96)), *(scored(number, (40 + number, 41)) for number in range(1, 30))]
    for each in requests:
        engine.add_request(each)
    largest = 0
    while engine.busy:
        for generation in engine.step():
            assert generation.prompt_logprobs is not None
            assert_scores(policy_directory, requests[generation.id].prompt, generation.prompt_logprobs.logprobs)
        pool = engine._scorer._pool
        largest = max(largest, pool.num_used * BLOCK if pool else 0)
    assert largest <= 2 * 160


def test_scored_prompts_hold_no_memory_afterwards(policy_directory: Path) -> None:
    engine = build(policy_directory, prefill_tokens=16)
    run(engine, [scored(0, long_prompt(50))])
    assert engine._scorer._pool is None


def test_an_unsupported_format_is_refused_before_the_prompt_is_scored(policy_directory: Path) -> None:
    engine = build(policy_directory)
    output: dict[str, Any] = {"structured_output": StructuredOutput("json_object"), "stop_token_ids": (1,)}
    with pytest.raises(ValueError, match="structured outputs"):
        engine.add_request(scored(0, (40, 41), max_tokens=3, **output))
    assert not engine.busy


def test_prompts_without_numbers_fail_like_responses_do(policy_directory: Path) -> None:
    model = load_model(policy_directory)
    with torch.no_grad():
        model.get_output_embeddings().weight[50] = torch.nan
    engine = HfEngine(model, max_num_seqs=4, max_model_len=CONTEXT)
    (generation,) = run(engine, [scored(0, (40, 41, 42))]).values()
    assert generation.finish_reason is FinishReason.FAILED
    assert generation.failure is not None
    assert generation.failure.error_type == "NonFinite"


@pytest.mark.parametrize("prefill_tokens", [8, 8192])
def test_plain_requests_have_the_same_bits_beside_penalties_and_scores(
    policy_directory: Path, prefill_tokens: int
) -> None:
    plain = [request(number, max_tokens=12) for number in range(3)]
    plain.append(request(3, max_tokens=12, top_p=0.8, top_logprobs=2))
    plain.append(request(4, max_tokens=12, temperature=0.0, min_p=0.1))
    others = [
        request(10, max_tokens=9, **PENALTIES),
        request(11, max_tokens=9, repetition_penalty=1.3, top_k=3, temperature=0.5),
        request(12, max_tokens=9, temperature=0.0, frequency_penalty=2.0),
        scored(13, long_prompt(60), prompt_logprobs=2),
        scored(14, prompt(2), max_tokens=5),
    ]
    engine = build(policy_directory, prefill_tokens=prefill_tokens)
    alone = {each.id: run(engine, [each])[each.id] for each in [*plain, *others]}
    for order in ([*plain, *others], [*others, *plain]):
        together = run(build(policy_directory, prefill_tokens=prefill_tokens), order)
        assert {number: g.tokens for number, g in together.items()} == {n: g.tokens for n, g in alone.items()}
        for each in plain:
            assert together[each.id].logprobs == alone[each.id].logprobs


def test_penalties_count_tokens_from_before_a_preemption_and_new_weights(policy_directory: Path) -> None:
    requests = [request(number, max_tokens=14, **PENALTIES) for number in range(3)]
    requests.append(request(3, max_tokens=14, repetition_penalty=1.4, frequency_penalty=0.7))
    expected = run(build(policy_directory), requests)
    engine = build(policy_directory)
    source = load_model(policy_directory)
    for each in requests:
        engine.add_request(each)
    done, steps = {}, 0
    while engine.busy:
        done.update({generation.id: generation for generation in engine.step()})
        steps += 1
        if steps % 3 == 0:
            engine.reset_prefix_cache() if steps % 2 else engine.load_weights(steps, ModuleWeights(source))
    assert {number: g.tokens for number, g in done.items()} == {number: g.tokens for number, g in expected.items()}
    assert all(generation.version_changes for generation in done.values())


def test_new_weights_restart_a_half_scored_prompt(policy_directory: Path) -> None:
    engine = build(policy_directory, prefill_tokens=16)
    other = load_model(policy_directory)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    engine.add_request(scored(0, long_prompt(40)))
    engine.step()
    engine.load_weights(7, ModuleWeights(other))
    (generation,) = run(engine, []).values()
    fresh = HfEngine(other, max_num_seqs=4, max_model_len=CONTEXT)
    (expected,) = run(fresh, [scored(0, long_prompt(40))]).values()
    assert generation.weight_version == 7
    assert generation.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    assert generation.prompt_logprobs.logprobs == pytest.approx(expected.prompt_logprobs.logprobs, abs=1e-4)


def test_scores_and_responses_of_a_request_are_of_the_same_weights(policy_directory: Path) -> None:
    """The prompt is scored, and the weights change while the request waits for a free sequence."""
    engine = build(policy_directory, max_num_seqs=1)
    other = load_model(policy_directory)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    engine.add_request(request(1, max_tokens=6))
    engine.add_request(scored(2, (40, 41, 42), max_tokens=2))
    engine.step()
    engine.step()
    engine.load_weights(3, ModuleWeights(other))
    generation = run(engine, [])[2]
    fresh = HfEngine(other, max_num_seqs=4, max_model_len=CONTEXT)
    (expected,) = run(fresh, [scored(2, (40, 41, 42), max_tokens=2)]).values()
    assert generation.weight_version == 3
    assert generation.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    assert generation.prompt_logprobs.logprobs == pytest.approx(expected.prompt_logprobs.logprobs, abs=1e-4)


def test_aborts_and_sleep_leave_no_scores_behind(policy_directory: Path) -> None:
    engine = build(policy_directory, prefill_tokens=16, max_num_seqs=1)
    engine.add_request(scored(0, long_prompt(60)))
    engine.add_request(scored(1, long_prompt(50), max_tokens=40))
    engine.step()
    (aborted,) = engine.abort([0])
    assert aborted.finish_reason is FinishReason.ABORT
    for _ in range(14):
        engine.step()
    (aborted,) = engine.abort([1])
    assert aborted.id == 1
    assert aborted.tokens
    assert not engine.busy
    engine.sleep()
    engine.wake_up()
    (generation,) = run(engine, [scored(2, long_prompt(20))]).values()
    assert generation.prompt_logprobs is not None
    assert_scores(policy_directory, long_prompt(20), generation.prompt_logprobs.logprobs)


def test_a_request_with_penalties_and_a_minimum_obeys_both(policy_directory: Path) -> None:
    engine = build(policy_directory)
    base = request(0, max_tokens=8, temperature=0.0)
    first = run(engine, [base])[0].tokens[0]
    ended = replace(base, stop_token_ids=(first,), min_tokens=3, logit_bias=((first, 100.0),))
    tokens = run(engine, [ended])[0].tokens
    assert first not in tokens[:2]
    assert tokens[2:] == (first,) or tokens[3:] == (first,)


def test_adapters_count_in_the_scores_of_a_learners_model(policy_directory: Path) -> None:
    model = load_model(policy_directory)
    add_lora(model, LoraConfig(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    tokens = long_prompt(20)
    (logits,) = reference_logits(model, [torch.tensor(tokens)])
    expected = logits[:-1].float().log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    plain = reference_logprobs(policy_directory, tokens, 1)
    assert (expected - plain).abs().max() > 0.01
    engine = HfEngine(model, max_num_seqs=4, max_model_len=CONTEXT, shares_learner_model=True)
    (generation,) = run(engine, [scored(0, tokens)]).values()
    assert generation.prompt_logprobs is not None
    assert generation.prompt_logprobs.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_scores_in_bfloat16_are_near_those_in_float32(policy_directory: Path) -> None:
    model = load_model(policy_directory)
    cast_weights(model, torch.bfloat16)
    tokens = long_prompt(40)
    engine = HfEngine(model, max_num_seqs=4, max_model_len=CONTEXT, prefill_tokens=16)
    (generation,) = run(engine, [scored(0, tokens, prompt_logprobs=1)]).values()
    assert generation.prompt_logprobs is not None
    expected = reference_logprobs(policy_directory, tokens, 1).tolist()
    assert generation.prompt_logprobs.logprobs == pytest.approx(expected, abs=0.1)
