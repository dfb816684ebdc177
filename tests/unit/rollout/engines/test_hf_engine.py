"""If these fail, the engine's tokens or log-probs are not the model's: training goes off-policy."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from quintet.config.native.rollout import EngineConfig
from quintet.errors import ConfigError
from quintet.policies import inference_decoder
from quintet.policies.model_loading import load_model
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.engine import EngineError, EngineSetup
from quintet.rollout.engines.hf import paged_attention, prefill, scheduler
from quintet.rollout.engines.hf.engine import HfEngine, build_hf_engine
from quintet.rollout.engines.weight_source import ModuleWeights, TensorWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("_with_and_without_kernels")

SHARED = tuple(range(40, 60))


def prompt(number: int) -> tuple[int, ...]:
    """Prompts of different lengths behind one common prefix."""
    return (*SHARED, *range(100 + number, 103 + 2 * number))


def agrees(directory: Path, request: Request, generation: Generation) -> None:
    """The engine's log-probs are those of transformers, to float32 rounding."""
    whole = request.prompt + generation.tokens
    expected = reference_logprobs(directory, whole, len(request.prompt))
    torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-5, rtol=0)


def run(engine: HfEngine, requests: list[Request]) -> dict[int, Generation]:
    for request in requests:
        engine.add_request(request)
    done: dict[int, Generation] = {}
    while engine.busy:
        for generation in engine.step():
            assert generation.id not in done
            done[generation.id] = generation
    return done


def request(number: int, **changes: object) -> Request:
    fields = {"id": number, "prompt": prompt(number), "max_tokens": 3 + number % 5, "seed": 1000 + number, **changes}
    return Request(**fields)


@pytest.fixture
def engine(policy_directory: Path) -> HfEngine:
    return HfEngine(load_model(policy_directory), max_num_seqs=4, max_model_len=64)


@lru_cache(maxsize=2)
def transformers_own(directory: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def reference_logprobs(directory: Path, tokens: tuple[int, ...], start: int) -> torch.Tensor:
    """Log-probs of plain transformers without a KV cache."""
    with torch.no_grad():
        logits = transformers_own(directory)(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logits[start - 1 : -1].gather(-1, torch.tensor(tokens[start:])[:, None]).squeeze(-1)


def test_logprobs_match_transformers(engine: HfEngine, policy_directory: Path) -> None:
    """Eleven ragged requests through four slots: prefix sharing, joining, leaving, moving slots."""
    done = run(engine, [request(n) for n in range(11)])
    assert len(done) == 11
    for number, generation in done.items():
        expected = reference_logprobs(policy_directory, prompt(number) + generation.tokens, len(prompt(number)))
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-5, rtol=0)


def test_long_and_short_prompts_in_one_batch(policy_directory: Path) -> None:
    """Dialogues continue behind both."""
    engine = HfEngine(load_model(policy_directory), max_num_seqs=4, max_model_len=300)
    texts = [tuple(range(5, 5 + length)) for length in (150, 3, 90, 64, 65)]
    asked = [request(n, prompt=text, max_tokens=4, keep_kv_cache=True) for n, text in enumerate(texts)]
    done = run(engine, asked)
    for one in asked:
        agrees(policy_directory, one, done[one.id])
    on = [
        request(n, prompt=(*text, *done[n].tokens, *range(20, 22 + 40 * n)), max_tokens=4)
        for n, text in enumerate(texts)
    ]
    done = run(engine, on)
    for one in on:
        agrees(policy_directory, one, done[one.id])


def test_greedy_is_the_most_likely_token(engine: HfEngine, policy_directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    generation = run(engine, [request(0, temperature=0.0, max_tokens=6)])[0]
    model = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32).eval()
    tokens = prompt(0)
    for token in generation.tokens:
        assert int(model(torch.tensor([tokens])).logits[0, -1].argmax()) == token
        tokens = (*tokens, token)


def test_a_response_does_not_depend_on_the_batch(engine: HfEngine) -> None:
    together = run(engine, [request(n) for n in range(9)])
    for number in (0, 4, 8):
        assert run(engine, [request(number)])[number].tokens == together[number].tokens


def test_another_seed_samples_other_tokens(engine: HfEngine) -> None:
    draws = {run(engine, [request(0, seed=seed, max_tokens=8)])[0].tokens for seed in range(6)}
    assert len(draws) > 1


def test_stop_reasons(engine: HfEngine) -> None:
    first = run(engine, [request(0, max_tokens=4)])[0]
    assert (first.finish_reason, len(first.tokens)) == (FinishReason.LENGTH, 4)
    stopped = run(engine, [request(0, max_tokens=4, stop_token_ids=(first.tokens[1],))])[0]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens[-1] == first.tokens[1]
    full = run(engine, [request(0, prompt=tuple(range(60)), max_tokens=50)])[0]
    assert (full.finish_reason, len(full.tokens)) == (FinishReason.CONTEXT, 4)


def test_a_response_of_one_token_ends_before_anything_is_cached(engine: HfEngine, policy_directory: Path) -> None:
    asked = [request(0, max_tokens=1), request(1)]
    done = run(engine, asked)
    for one in asked:
        agrees(policy_directory, one, done[one.id])


def test_a_prompt_that_fills_the_context_is_rejected(engine: HfEngine) -> None:
    with pytest.raises(ValueError, match="64"):
        engine.add_request(request(0, prompt=tuple(range(64))))


def test_new_weights_are_used_at_once(policy_directory: Path) -> None:
    """A prefix computed under old weights must be dropped."""
    model = load_model(policy_directory)
    engine = HfEngine(model, max_num_seqs=4, max_model_len=64)
    before = run(engine, [request(n, temperature=0.0) for n in range(3)])
    fresh = load_model(policy_directory)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    engine.load_weights(5, ModuleWeights(fresh))
    after = run(engine, [request(n, temperature=0.0) for n in range(3)])
    expected = run(HfEngine(fresh, max_num_seqs=4, max_model_len=64), [request(n, temperature=0.0) for n in range(3)])
    assert {n: g.tokens for n, g in after.items()} == {n: g.tokens for n, g in expected.items()}
    assert before[0].logprobs != after[0].logprobs
    assert after[0].weight_version == 5


def count_prefilled(engine: HfEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of prompt tokens of every prefill pass, in order."""
    counts: list[int] = []
    plain = scheduler.next_spans

    def counting(*arguments: object, **options: object) -> object:
        spans = plain(*arguments, **options)  # type: ignore[arg-type]
        if spans:
            counts.append(sum(span.count for span in spans))
        return spans

    monkeypatch.setattr(scheduler, "next_spans", counting)
    return counts


def test_a_prompt_is_prefilled_once(engine: HfEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_prefilled(engine, monkeypatch)
    first = run(engine, [request(n, prompt=prompt(5), seed=n) for n in range(10)])
    assert sum(counts) == len(prompt(5))
    again = run(engine, [request(n, prompt=prompt(5), seed=n) for n in range(10)])
    assert sum(counts) == len(prompt(5))
    assert {n: g.tokens for n, g in first.items()} == {n: g.tokens for n, g in again.items()}
    engine.reset_prefix_cache()
    run(engine, [request(0, prompt=prompt(5))])
    assert sum(counts) == 2 * len(prompt(5))


def test_least_recently_used_prompts_are_evicted(engine: HfEngine, policy_directory: Path) -> None:
    """Four unused prompts stay cached; forty requests of seven prompts arrive in changing order."""
    numbers = [(3 * n * n + n // 3) % 7 for n in range(40)]
    done = run(engine, [request(i, prompt=prompt(number)) for i, number in enumerate(numbers)])
    for i, number in enumerate(numbers):
        expected = reference_logprobs(policy_directory, prompt(number) + done[i].tokens, len(prompt(number)))
        torch.testing.assert_close(torch.tensor(done[i].logprobs), expected, atol=1e-5, rtol=0)


def test_sleep_and_wake_up_keep_results(engine: HfEngine) -> None:
    before = run(engine, [request(n) for n in range(3)])
    engine.sleep()
    engine.wake_up()
    assert {n: g.tokens for n, g in run(engine, [request(n) for n in range(3)]).items()} == {
        n: g.tokens for n, g in before.items()
    }
    engine.add_request(request(0))
    with pytest.raises(ValueError, match="sleep"):
        engine.sleep()


@pytest.mark.proves("rlinf", "rollout.enable_offload")
def test_copied_weights_are_offloaded_while_asleep(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, this records the devices that weights move to; the learner's own weights do not move."""
    for dtype, expected in ((torch.bfloat16, [torch.device("cpu")] * 2), (torch.float32, [])):
        setup = EngineSetup(
            directory=policy_directory,
            model=load_model(policy_directory),
            dtype=dtype,
            max_num_seqs=2,
            max_model_len=64,
            options=EngineConfig(offload=True),
            detokenize=lambda tokens: "",
        )
        engine = build_hf_engine(setup)
        sent: list[torch.device] = []
        monkeypatch.setattr(engine._model, "to", sent.append)
        before = run(engine, [request(1)])
        engine.sleep()
        engine.wake_up()
        assert run(engine, [request(1)]) == before
        assert sent == expected


def test_offloaded_weights_free_their_memory(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a GPU has no room for the learner while the engine sleeps."""
    engine = HfEngine(load_model(policy_directory), max_num_seqs=2, max_model_len=64, sleep_device=torch.device("cpu"))
    before = run(engine, [request(1)])
    monkeypatch.setattr(engine._model, "to", lambda _: engine._model._apply(torch.clone))
    lay = {name: weakref.ref(own.data.untyped_storage()) for name, own in engine._model.named_parameters()}
    engine.sleep()
    assert [name for name, memory in lay.items() if memory() is not None] == []
    engine.wake_up()
    assert run(engine, [request(1)]) == before


def test_rotary_frequencies_are_not_rounded_with_the_weights(policy_directory: Path) -> None:
    """Frequencies in bfloat16 would rotate late positions by a wrong angle."""
    setup = EngineSetup(
        directory=policy_directory,
        model=load_model(policy_directory),
        dtype=torch.bfloat16,
        max_num_seqs=2,
        max_model_len=64,
        options=EngineConfig(),
        detokenize=lambda tokens: "",
    )
    engine = build_hf_engine(setup)
    assert engine._model.dtype is torch.bfloat16
    assert torch.equal(engine._model.model.rotary_emb.inv_freq, setup.model.model.rotary_emb.inv_freq)


def test_long_prompts_are_prefilled_in_chunks(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HfEngine(load_model(policy_directory), max_num_seqs=4, max_model_len=64, prefill_tokens=7)
    counts = count_prefilled(engine, monkeypatch)
    asked = [request(n) for n in range(5)]
    done = run(engine, asked)
    assert max(counts[1:]) <= 7
    for one in asked:
        agrees(policy_directory, one, done[one.id])


def test_a_continued_dialogue_reuses_its_kv_cache(
    engine: HfEngine, policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second turn's prompt, only the last response token and the new tokens are prefilled."""
    first = [request(n, keep_kv_cache=True) for n in range(4)]
    done = run(engine, first)
    counts = count_prefilled(engine, monkeypatch)
    second = [request(n, prompt=prompt(n) + done[n].tokens + (7, 8 + n, 9)) for n in range(4)]
    again = run(engine, second)
    assert sum(counts) == 4 * (1 + 3)
    for one in second:
        agrees(policy_directory, one, again[one.id])


def test_a_changed_dialogue_is_prefilled_from_the_first_difference(engine: HfEngine, policy_directory: Path) -> None:
    """A template drops an earlier thought: cached keys and values behind it cannot be reused."""
    first = run(engine, [request(3, keep_kv_cache=True, max_tokens=6)])[3]
    second = request(3, prompt=prompt(3) + first.tokens[:2] + (5,) + first.tokens[2:] + (6,))
    agrees(policy_directory, second, run(engine, [second])[3])
    third = request(3, keep_kv_cache=True, prompt=(1, 2, 3))
    agrees(policy_directory, third, run(engine, [third])[3])


def test_more_dialogues_than_cached_prompts(engine: HfEngine, policy_directory: Path) -> None:
    """Four slots, nine dialogues of three turns: cached ones are evicted, and log-probs stay right."""
    prompts = {n: prompt(n) for n in range(9)}
    for _ in range(3):
        asked = [request(n, prompt=prompts[n], keep_kv_cache=True, max_tokens=3) for n in prompts]
        done = run(engine, asked)
        for one in asked:
            agrees(policy_directory, one, done[one.id])
            prompts[one.id] = one.prompt + done[one.id].tokens + (11,)


def test_a_weight_sync_during_generation_is_recorded(policy_directory: Path, tmp_path: Path) -> None:
    """Every token's log-prob is that of the weights that generated it."""
    engine = HfEngine(load_model(policy_directory), max_num_seqs=2, max_model_len=64)
    asked = [request(n, max_tokens=8) for n in range(3)]
    for one in asked:
        engine.add_request(one)
    for _ in range(3):
        engine.step()
    fresh = load_model(policy_directory)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    engine.load_weights(4, ModuleWeights(fresh))
    done: dict[int, Generation] = {}
    while engine.busy:
        done |= {generation.id: generation for generation in engine.step()}
    assert done[0].version_changes == done[1].version_changes == ((3, 4),)
    assert (done[2].version_changes, done[2].weight_version) == ((), 4)
    for number in (0, 1):
        whole = prompt(number) + done[number].tokens
        old = reference_logprobs(policy_directory, whole, len(prompt(number)))[:3]
        engine.add_request(request(9, prompt=whole, max_tokens=1))
        engine.step()
        torch.testing.assert_close(torch.tensor(done[number].logprobs[:3]), old, atol=1e-5, rtol=0)
    fresh.save_pretrained(tmp_path / "fresh")
    for number in (0, 1):
        whole = prompt(number) + done[number].tokens
        new = reference_logprobs(tmp_path / "fresh", whole, len(prompt(number)))[3:]
        torch.testing.assert_close(torch.tensor(done[number].logprobs[3:]), new, atol=1e-5, rtol=0)


def test_aborted_requests_leave_the_batch(engine: HfEngine, policy_directory: Path) -> None:
    asked = [request(n, max_tokens=9) for n in range(7)]
    for one in asked:
        engine.add_request(one)
    for _ in range(3):
        engine.step()
    gone = {generation.id: generation for generation in engine.abort([1, 6, 99])}
    assert {n: (g.finish_reason, len(g.tokens)) for n, g in gone.items()} == {
        1: (FinishReason.ABORT, 3),
        6: (FinishReason.ABORT, 0),
    }
    done: dict[int, Generation] = {}
    while engine.busy:
        done |= {generation.id: generation for generation in engine.step()}
    assert set(done) == {0, 2, 3, 4, 5}
    for one in asked:
        if one.id in done:
            agrees(policy_directory, one, done[one.id])


def test_stop_strings_match_across_token_borders(policy_directory: Path) -> None:
    """Tokens 1 and 2 alone hold no stop; together they do."""
    letters = {n: "ab"[n % 2] for n in range(4096)}
    engine = HfEngine(
        load_model(policy_directory),
        max_num_seqs=2,
        max_model_len=64,
        detokenize=lambda tokens: "".join(letters[n] for n in tokens),
    )
    done = run(engine, [request(0, max_tokens=40, stop_strings=("aab", "zzz"))])[0]
    text = "".join(letters[n] for n in done.tokens)
    assert done.finish_reason is FinishReason.STOP
    assert text.index("aab") + 3 == len(text)
    with pytest.raises(ValueError, match="detokenizer"):
        HfEngine(load_model(policy_directory), max_num_seqs=2, max_model_len=64).add_request(
            request(0, stop_strings=("x",))
        )


def test_min_tokens_delays_every_stop(engine: HfEngine, policy_directory: Path) -> None:
    plain = run(engine, [request(0, max_tokens=12)])[0]
    asked = request(0, max_tokens=12, min_tokens=5, stop_token_ids=tuple(set(plain.tokens[:4])))
    done = run(engine, [asked])[0]
    assert not set(done.tokens[:5]) & set(asked.stop_token_ids)
    agrees(policy_directory, asked, done)


def test_repetition_penalty_does_not_change_logprobs(engine: HfEngine, policy_directory: Path) -> None:
    plain = run(engine, [request(0, max_tokens=20, temperature=0.0)])[0]
    asked = request(0, max_tokens=20, temperature=0.0, repetition_penalty=1e6)
    done = run(engine, [asked])[0]
    assert len(set(plain.tokens)) < 20
    assert len(set(done.tokens) | set(asked.prompt)) == 20 + len(set(asked.prompt))
    agrees(policy_directory, asked, done)


def test_nan_weights_fail_requests_but_not_the_engine(
    policy_directory: Path,
) -> None:
    model = load_model(policy_directory)
    engine = HfEngine(model, max_num_seqs=2, max_model_len=64)
    good = {name: tensor.clone() for name, tensor in model.named_parameters()}
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}
    engine.load_weights(3, TensorWeights(bad.items()))
    done = run(engine, [request(n) for n in range(3)])
    assert {(g.finish_reason, len(g.tokens), g.failure.error_type) for g in done.values() if g.failure} == {
        (FinishReason.FAILED, 0, "NonFinite")
    }
    assert len(done) == 3
    engine.load_weights(4, TensorWeights(good.items()))
    agrees(policy_directory, request(1), run(engine, [request(1)])[1])


def test_unknown_and_missing_weights_are_errors(engine: HfEngine, policy_directory: Path) -> None:
    weights = dict(load_model(policy_directory).named_parameters())
    with pytest.raises(EngineError, match=r"no weight model\.nonsense"):
        engine.load_weights(1, TensorWeights([("model.nonsense", torch.zeros(1))]))
    first = next(iter(weights))
    with pytest.raises(EngineError, match=f"1 weights are missing from the weight sync, among them {first}"):
        engine.load_weights(1, TensorWeights([(name, tensor) for name, tensor in weights.items() if name != first]))


def build_test_engine(directory: Path, dtype: torch.dtype = torch.float32, **options: object) -> HfEngine:
    """The engine as a run builds it."""
    setup = EngineSetup(
        directory=directory,
        model=load_model(directory),
        dtype=dtype,
        max_num_seqs=4,
        max_model_len=64,
        detokenize=str,
        options=EngineConfig.model_validate(options),
    )
    return build_hf_engine(setup)


def test_prompts_are_not_split_without_chunked_prefill(policy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_test_engine(policy_directory, chunked_prefill=False, max_batched_tokens=7)
    counts = count_prefilled(engine, monkeypatch)
    asked = [request(0, prompt=tuple(range(1, 20))), request(1, prompt=(5, 6)), request(2, prompt=(7, 8, 9))]
    done = run(engine, asked)
    assert counts == [5, 19]
    for one in asked:
        agrees(policy_directory, one, done[one.id])


def test_compiled_layers_sample_the_same_tokens(policy_directory: Path) -> None:
    """Batches of at most two rows are compiled, larger ones are not."""
    engine = build_test_engine(policy_directory, torch_compile=True, torch_compile_max_batch=2)
    asked = [request(n, max_tokens=4) for n in range(3)]
    done = run(engine, asked)
    for one in asked:
        agrees(policy_directory, one, done[one.id])


def test_running_requests_and_throughput_are_logged(policy_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = build_test_engine(policy_directory, log_statistics=True, log_every_steps=2)
    with caplog.at_level("INFO", "quintet.engine"):
        run(engine, [request(n, max_tokens=4) for n in range(5)])
    assert [line.split(" tok")[0].rsplit(" ", 1)[0] for line in caplog.messages[:2]] == [
        "step 2: 4 running, 1 waiting,",
        "step 4: 4 running, 1 waiting,",
    ]


def test_an_engine_of_another_dtype_copies_the_weights(policy_directory: Path) -> None:
    engine = build_test_engine(policy_directory, torch.bfloat16)
    done = run(engine, [request(0, max_tokens=4)])[0]
    expected = reference_logprobs(policy_directory, prompt(0) + done.tokens, len(prompt(0)))
    gap = (torch.tensor(done.logprobs) - expected).abs().max()
    assert 0 < float(gap) < 0.1


def test_float16_on_a_cpu_is_a_config_error(policy_directory: Path) -> None:
    with pytest.raises(ConfigError, match="float32 and bfloat16") as caught:
        build_test_engine(policy_directory, torch.float16)
    assert caught.value.key == "rollout.engine_options.dtype"


def test_log_probs_do_not_depend_on_the_other_requests_of_a_batch(policy_directory: Path) -> None:
    """Otherwise runs with another number of engines, or of requests at the same time, would have other numbers."""
    if inference_decoder.decode_kernels(torch.float32, "cpu") is None:
        pytest.skip("attention in torch depends on the shape of the batch")
    model = load_model(policy_directory)
    prompts = [(*range(10, 30 + 10 * (i % 4)), *range(i, i + 3 + 13 * (i % 7))) for i in range(24)]
    requests = [Request(i, prompt, 4 + i % 9, seed=i, keep_kv_cache=True) for i, prompt in enumerate(prompts)]
    by_size = [_run_two_turns(HfEngine(model, max_num_seqs=size, max_model_len=160), requests) for size in (24, 5, 1)]
    assert all(generations == by_size[0] for generations in by_size[1:])


def _run_two_turns(engine: HfEngine, requests: list[Request]) -> list[dict[int, Generation]]:
    first = run(engine, requests)
    second = [replace(each, prompt=(*each.prompt, *first[each.id].tokens, 7, each.id)) for each in requests]
    return [first, run(engine, second)]


def test_prompts_too_long_for_the_kernels_do_not_change_the_others(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if inference_decoder.decode_kernels(torch.float32, "cpu") is None:
        pytest.skip("attention in torch depends on the shape of the batch")
    for module in (paged_attention, prefill):
        monkeypatch.setattr(module, "MAX_KERNEL_TOKENS", 60)
    lengths = (100, 59, 80, 30, 60)
    asked = [request(n, prompt=tuple(range(9, 9 + length)), max_tokens=4) for n, length in enumerate(lengths)]
    engine = HfEngine(load_model(policy_directory), max_num_seqs=5, max_model_len=160)
    together = run(engine, asked)
    for one in asked:
        agrees(policy_directory, one, together[one.id])
        engine.reset_prefix_cache()
        if len(one.prompt) <= 60:
            assert run(engine, [one])[one.id] == together[one.id]
