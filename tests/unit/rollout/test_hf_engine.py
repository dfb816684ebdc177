"""If these fail, the engine's tokens or log-probs are not the model's: training goes off-policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintet.policies.causal_lm import load_model
from quintet.records import Generation, Request, StopReason
from quintet.rollout.hf import HfEngine
from quintet.rollout.sampling import sample, uniform

SHARED = tuple(range(40, 60))


def prompt(number: int) -> tuple[int, ...]:
    """Prompts of different lengths behind one common prefix."""
    return (*SHARED, *range(100 + number, 103 + 2 * number))


def run(engine: HfEngine, requests: list[Request]) -> dict[int, Generation]:
    for request in requests:
        engine.submit(request)
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
    return HfEngine(load_model(policy_directory), slots=4, context=64)


def reference_logprobs(directory: Path, tokens: tuple[int, ...], start: int) -> torch.Tensor:
    """By transformers alone, with its own attention and no cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logits[start - 1 : -1].gather(-1, torch.tensor(tokens[start:])[:, None]).squeeze(-1)


def test_logprobs_are_those_of_transformers(engine: HfEngine, policy_directory: Path) -> None:
    """Eleven ragged requests through four slots: prefix sharing, joining, leaving, moving slots."""
    done = run(engine, [request(n) for n in range(11)])
    assert len(done) == 11
    for number, generation in done.items():
        expected = reference_logprobs(policy_directory, prompt(number) + generation.tokens, len(prompt(number)))
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-5, rtol=0)


def test_greedy_is_the_most_likely_token(engine: HfEngine, policy_directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    generation = run(engine, [request(0, temperature=0.0, max_tokens=6)])[0]
    model = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32).eval()
    tokens = prompt(0)
    for token in generation.tokens:
        assert int(model(torch.tensor([tokens])).logits[0, -1].argmax()) == token
        tokens = (*tokens, token)


def test_an_answer_doesnt_depend_on_its_neighbours(engine: HfEngine) -> None:
    together = run(engine, [request(n) for n in range(9)])
    for number in (0, 4, 8):
        assert run(engine, [request(number)])[number].tokens == together[number].tokens


def test_another_seed_draws_other_tokens(engine: HfEngine) -> None:
    draws = {run(engine, [request(0, seed=seed, max_tokens=8)])[0].tokens for seed in range(6)}
    assert len(draws) > 1


def test_it_says_why_it_stopped(engine: HfEngine) -> None:
    first = run(engine, [request(0, max_tokens=4)])[0]
    assert (first.stop, len(first.tokens)) == (StopReason.LENGTH, 4)
    stopped = run(engine, [request(0, max_tokens=4, stop_ids=(first.tokens[1],))])[0]
    assert stopped.stop is StopReason.STOP
    assert stopped.tokens[-1] == first.tokens[1]
    full = run(engine, [request(0, prompt=tuple(range(60)), max_tokens=50)])[0]
    assert (full.stop, len(full.tokens)) == (StopReason.CONTEXT, 5)


def test_a_prompt_that_fills_the_context_is_refused(engine: HfEngine) -> None:
    with pytest.raises(ValueError, match="64"):
        engine.submit(request(0, prompt=tuple(range(64))))


def test_new_weights_are_used_at_once(policy_directory: Path) -> None:
    """A prefix computed under old weights must be forgotten."""
    model = load_model(policy_directory)
    engine = HfEngine(model, slots=4, context=64)
    before = run(engine, [request(n, temperature=0.0) for n in range(3)])
    fresh = load_model(policy_directory)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    engine.load_weights(5, fresh.named_parameters())
    after = run(engine, [request(n, temperature=0.0) for n in range(3)])
    expected = run(HfEngine(fresh, slots=4, context=64), [request(n, temperature=0.0) for n in range(3)])
    assert {n: g.tokens for n, g in after.items()} == {n: g.tokens for n, g in expected.items()}
    assert before[0].logprobs != after[0].logprobs
    assert after[0].weight_version == 5


def count_prefilled(engine: HfEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward pass that isn't a decoding step, as they come."""
    from quintet.rollout import hf

    seen: list[int] = []

    def counting(body: object, tokens: torch.Tensor, positions: torch.Tensor, layout: object) -> torch.Tensor:
        if not isinstance(layout, hf.DecodeLayout):
            seen.append(len(tokens))
        return plain(body, tokens, positions, layout)

    plain = hf.hidden_states
    monkeypatch.setattr(hf, "hidden_states", counting)
    return seen


def test_a_prompt_is_computed_once(engine: HfEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_prefilled(engine, monkeypatch)
    first = run(engine, [request(n, prompt=prompt(5), seed=n) for n in range(10)])
    assert sum(seen) == len(prompt(5))
    again = run(engine, [request(n, prompt=prompt(5), seed=n) for n in range(10)])
    assert sum(seen) == len(prompt(5))
    assert {n: g.tokens for n, g in first.items()} == {n: g.tokens for n, g in again.items()}
    engine.forget()
    run(engine, [request(0, prompt=prompt(5))])
    assert sum(seen) == 2 * len(prompt(5))


def test_prompts_used_long_ago_make_room(engine: HfEngine, policy_directory: Path) -> None:
    """Four slots keep two prompts; forty requests of seven prompts come in changing order."""
    numbers = [(3 * n * n + n // 3) % 7 for n in range(40)]
    done = run(engine, [request(i, prompt=prompt(number)) for i, number in enumerate(numbers)])
    for i, number in enumerate(numbers):
        expected = reference_logprobs(policy_directory, prompt(number) + done[i].tokens, len(prompt(number)))
        torch.testing.assert_close(torch.tensor(done[i].logprobs), expected, atol=1e-5, rtol=0)


def test_sleep_frees_the_cache_and_work_goes_on(engine: HfEngine) -> None:
    before = run(engine, [request(n) for n in range(3)])
    engine.sleep()
    engine.wake()
    assert {n: g.tokens for n, g in run(engine, [request(n) for n in range(3)]).items()} == {
        n: g.tokens for n, g in before.items()
    }
    engine.submit(request(0))
    with pytest.raises(RuntimeError, match="sleep"):
        engine.sleep()


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8), st.integers(0, 10_000))
def test_uniform_draws_lie_in_the_unit_interval(seeds: list[int], place: int) -> None:
    draws = uniform(torch.tensor(seeds), torch.full((len(seeds),), place))
    assert bool(((draws >= 0) & (draws < 1)).all())


def test_uniform_draws_are_uniform() -> None:
    draws = uniform(torch.arange(20_000), torch.zeros(20_000, dtype=torch.long))
    histogram = torch.histc(draws, bins=10, min=0, max=1) / len(draws)
    assert bool((histogram - 0.1).abs().max() < 0.01)


def test_sampling_follows_the_probabilities() -> None:
    n = 40_000
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(n, 3)
    draws = uniform(torch.arange(n), torch.zeros(n, dtype=torch.long))
    ones, zeros = torch.ones(n), torch.zeros(n, dtype=torch.long)
    tokens, logprobs = sample(logits, ones, zeros, ones, draws)
    shares = torch.bincount(tokens, minlength=3) / n
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs, logits[0][tokens])


def test_top_k_and_top_p_cut_the_tail() -> None:
    n = 2000
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(n, 3)
    draws = uniform(torch.arange(n), torch.zeros(n, dtype=torch.long))
    ones, zeros = torch.ones(n), torch.zeros(n, dtype=torch.long)
    assert set(sample(logits, ones, zeros + 2, ones, draws)[0].tolist()) == {0, 1}
    assert set(sample(logits, ones, zeros, ones * 0.4, draws)[0].tolist()) == {0}
    assert set(sample(logits, ones, zeros, ones * 0.6, draws)[0].tolist()) == {0, 1}
