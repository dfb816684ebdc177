"""If these fail, layers with a recurrence mix the tokens of different sequences, or learn from wrong gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.config.plan.kv_blocks import BLOCK
from quintet.config.plan.model_shapes import read_shape
from quintet.errors import MachineError
from quintet.policies.attention import PackedLayout
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.model_check import own_attention
from quintet.policies.model_loading import enable_activation_checkpointing, load_model
from quintet.policies.parallel.ulysses_parallel import PaddedLayout
from quintet.records import Request
from quintet.rollout.engines.hf import paged_attention, prefill
from quintet.rollout.engines.hf.attention_state import CacheShape
from quintet.rollout.engines.hf.engine import HfEngine
from support.tiny_families import save_tiny_model

PREFIX, STEMS, PARENTS, BRANCHES = 5, (3, 1), (0, 0, 1), (4, 1, 6)
FAMILIES = ("qwen3_5_text", "lfm2", "granitemoehybrid")
"""Linear attention, short convolutions and a state space."""


def tiny(family: str, directory: Path) -> Any:
    save_tiny_model(family, directory)
    return load_model(directory)


def packed_pass(model: Any, tokens: list[Tensor]) -> Tensor:
    """Return the hidden states of a prefix, of stems and of branches of one token and more."""
    starts = [0, *(PREFIX for _ in STEMS), *(PREFIX + STEMS[parent] for parent in PARENTS)]
    positions = torch.cat([torch.arange(start, start + len(part)) for start, part in zip(starts, tokens, strict=True)])
    layout = PackedLayout(torch.tensor(BRANCHES), PREFIX, torch.tensor(STEMS), torch.tensor(PARENTS))
    return compute_hidden_states(model.model, torch.cat(tokens), positions, layout)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("recomputes", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_beginnings_give_the_states_and_gradients_of_separate_sequences(
    family: str, recomputes: bool, tmp_path: Path
) -> None:
    model = tiny(family, tmp_path)
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(96, (n,), generator=generator) for n in (PREFIX, *STEMS, *BRANCHES)]
    weights = torch.randn(64, generator=generator)
    expected, total = [], torch.zeros(())
    with own_attention(model):
        for branch, parent in enumerate(PARENTS):
            sequence = torch.cat([tokens[0], tokens[1 + parent], tokens[1 + len(STEMS) + branch]])
            states = model.model(input_ids=sequence[None], use_cache=False).last_hidden_state[0]
            expected.append(states[-BRANCHES[branch] :])
            total = total + (expected[-1] * weights).sum()
    reference = gradients(model, total)
    if recomputes:
        enable_activation_checkpointing(model)
    states = packed_pass(model, tokens)[-sum(BRANCHES) :]
    torch.testing.assert_close(states, torch.cat(expected), atol=1e-4, rtol=1e-4)
    actual = gradients(model, (states * weights).sum())
    assert actual.keys() == reference.keys()
    for name, gradient in reference.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-4 * float(gradient.abs().max()) + 1e-6, rtol=1e-3)


def test_sequences_over_several_ranks_are_refused(tmp_path: Path) -> None:
    model = tiny("lfm2", tmp_path)
    tokens = torch.arange(6)
    layout = PaddedLayout(PackedLayout(torch.tensor([6])), 6)
    with pytest.raises(MachineError, match="ShortConv needs whole sequences") as refused:
        compute_hidden_states(model.model, tokens, tokens, layout)
    assert refused.value.hint == "set actor.parallel.context=1 and actor.parallel.ulysses=1"


def sampled(engine: HfEngine, requests: list[Request]) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
    for request in requests:
        engine.add_request(request)
    results = {}
    while engine.busy:
        results |= {each.id: (each.tokens, each.logprobs) for each in engine.step()}
    return results


REQUESTS = [Request(n, tuple(range(7, 10 + 5 * (n % 4))), 30 + n % 5, seed=n) for n in range(7)]
"""Samples of four prompts that share beginnings."""


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_depend_neither_on_the_batch_nor_on_preemption_nor_on_pieces_of_prompts(
    family: str, tmp_path: Path
) -> None:
    model = tiny(family, tmp_path)
    alone = HfEngine(model, max_num_seqs=1, max_model_len=64)
    expected = {key: value for request in REQUESTS for key, value in sampled(alone, [request]).items()}
    together = HfEngine(model, max_num_seqs=7, max_model_len=64)
    small = HfEngine(model, max_num_seqs=7, max_model_len=64, max_cache_blocks=6)
    pieces = HfEngine(model, max_num_seqs=4, max_model_len=64, chunked_prefill=True, prefill_tokens=5)
    for engine in (together, small, pieces):
        for number, (tokens, logprobs) in sampled(engine, REQUESTS).items():
            assert tokens == expected[number][0]
            assert logprobs == pytest.approx(expected[number][1], abs=1e-4)
    assert small._scheduler.num_preempted


def test_a_prompt_that_is_split_into_single_tokens_is_computed_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last two tokens come in one pass, on both sides of the limit of the compiled kernels."""
    model = tiny("qwen3_5_text", tmp_path)
    request = Request(0, tuple(range(5, 18)), 8, seed=1)
    expected = sampled(HfEngine(model, max_num_seqs=1, max_model_len=64), [request])[0]
    for module in (paged_attention, prefill):
        monkeypatch.setattr(module, "MAX_KERNEL_TOKENS", 12)
    split = HfEngine(model, max_num_seqs=1, max_model_len=64, chunked_prefill=True, prefill_tokens=11)
    tokens, logprobs = sampled(split, [request])[0]
    assert tokens == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=1e-4)


def test_a_conversation_goes_on_from_its_own_tokens(tmp_path: Path) -> None:
    """Its second prompt contains the first turn, whose keys are cached, but not the recurrent states."""
    model = tiny("qwen3_5_text", tmp_path)
    engine = HfEngine(model, max_num_seqs=2, max_model_len=128)
    first = Request(0, tuple(range(5, 40)), 8, seed=1, keep_kv_cache=True)
    answer = sampled(engine, [first])[0][0]
    second = Request(1, (*first.prompt, *answer, 3, 4), 8, seed=2)
    fresh = HfEngine(model, max_num_seqs=2, max_model_len=128)
    assert sampled(engine, [second])[1][0] == sampled(fresh, [second])[1][0]


def test_only_attention_takes_memory_of_the_cache(tmp_path: Path) -> None:
    model = tiny("qwen3_5_text", tmp_path)
    kinds = model.config.layer_types
    shape = CacheShape.from_model(model)
    assert [kinds[layer] for layer in shape.layers] == ["full_attention"] * kinds.count("full_attention")
    assert 0 < len(shape.layers) < len(kinds)
    numbers = read_shape(json.loads((tmp_path / "config.json").read_text())).cache_numbers()
    assert shape.block_bytes == 4 * BLOCK * numbers


def test_log_probs_of_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    model = tiny("qwen3_5_text", tmp_path)
    engine = HfEngine(model, max_num_seqs=2, max_model_len=64, prefill_tokens=16)
    prompts = [tuple(range(3, 45)), tuple(range(9, 30))]
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(number, prompt, 1, seed=0, prompt_logprobs=0))
    results = {}
    while engine.busy:
        results |= {each.id: each.prompt_logprobs for each in engine.step()}
    for number, prompt in enumerate(prompts):
        tokens = torch.tensor(prompt)
        with torch.inference_mode(), own_attention(model):
            logprobs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
        scored = results[number]
        assert scored is not None
        torch.testing.assert_close(torch.tensor(scored.logprobs), expected, atol=1e-4, rtol=1e-4)
