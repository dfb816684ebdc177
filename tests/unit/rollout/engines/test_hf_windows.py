"""If these fail, the embedded engine samples from another distribution beyond a model's sliding window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.policies.model_check import reference_logits
from quintet.policies.model_loading import cast_weights, load_model
from quintet.records import Generation, Request
from quintet.rollout.engines.hf import attention_state
from quintet.rollout.engines.hf.engine import HfEngine
from support.tiny_families import save_tiny_model

WINDOW = 7
LENGTHS = (3, 6, 7, 8, 20, 31, 9)
FAMILIES = ("mistral", "gemma3_text", "qwen2", "exaone4")


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with windows in all of its layers or in some."""
    path: Path = tmp_path_factory.mktemp(request.param)
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if request.param != "mistral" else {}
    uses = {"use_sliding_window": True} if request.param == "qwen2" else {}
    save_tiny_model(request.param, path, sliding_window=WINDOW, **kinds, **uses)
    return path


def requests(generator: torch.Generator, shared: int) -> list[Request]:
    """Prompts of several lengths, of which the first tokens are equal, two samples each."""
    tokens = torch.randint(96, (64,), generator=generator).tolist()
    prompts = [(*tokens[:shared], *tokens[shared + n : shared + n + length]) for n, length in enumerate(LENGTHS)]
    return [Request(n, prompts[n // 2], 4 + n % 9, seed=n) for n in range(2 * len(prompts))]


def run(
    engine: HfEngine, batch: Sequence[Request], interrupt: Callable[[HfEngine], None] | None = None
) -> list[Generation]:
    for each in batch:
        engine.add_request(each)
    done: dict[int, Generation] = {}
    steps = 0
    while engine.busy:
        done.update((generation.id, generation) for generation in engine.step())
        steps += 1
        if interrupt and steps == 3:
            interrupt(engine)
    return [done[each.id] for each in batch]


def check(model: Any, batch: Sequence[Request], generations: Sequence[Generation], tolerance: float) -> None:
    sequences = [torch.tensor([*r.prompt, *g.tokens]) for r, g in zip(batch, generations, strict=True)]
    for request, generation, logits in zip(batch, generations, reference_logits(model, sequences), strict=True):
        expected = logits[len(request.prompt) - 1 : -1].float().log_softmax(-1)
        sampled = expected.gather(1, torch.tensor(generation.tokens)[:, None])[:, 0]
        assert (sampled - torch.tensor(generation.logprobs)).abs().max() < tolerance


@pytest.mark.parametrize("shared", [0, 12])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("prefill_tokens", [8192, 5])
def test_log_probs_are_those_of_transformers(
    directory: Path, shared: int, compiled: bool, prefill_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(attention_state, "decode_kernels", lambda *_: None)
    model = load_model(directory)
    engine = HfEngine(model, max_num_seqs=5, max_model_len=96, prefill_tokens=prefill_tokens)
    batch = requests(torch.Generator().manual_seed(shared), shared)
    check(model, batch, run(engine, batch), 1e-4)


def test_preempted_and_continued_dialogues_keep_their_windows(directory: Path) -> None:
    model = load_model(directory)
    engine = HfEngine(model, max_num_seqs=5, max_model_len=96)
    first = [replace(each, keep_kv_cache=True) for each in requests(torch.Generator().manual_seed(1), 10)]
    answers = run(engine, first, HfEngine.reset_prefix_cache)
    check(model, first, answers, 1e-4)
    second = [
        Request(r.id, (*r.prompt, *g.tokens, 5, 6, 7), 6, seed=50 + r.id) for r, g in zip(first, answers, strict=True)
    ]
    check(model, second, run(engine, second), 1e-4)


def test_bfloat16_differs_by_its_rounding_only(directory: Path) -> None:
    model = load_model(directory)
    cast_weights(model, torch.bfloat16)
    batch = requests(torch.Generator().manual_seed(2), 12)
    check(model, batch, run(HfEngine(model, max_num_seqs=5, max_model_len=96), batch), 0.05)


@pytest.mark.parametrize("prefill_tokens", [8192, 5])
def test_log_probs_of_prompts_are_those_of_transformers(directory: Path, prefill_tokens: int) -> None:
    model = load_model(directory)
    engine = HfEngine(model, max_num_seqs=5, max_model_len=96, prefill_tokens=prefill_tokens)
    batch = [replace(each, prompt_logprobs=0) for each in requests(torch.Generator().manual_seed(0), 12)]
    scores = [generation.prompt_logprobs for generation in run(engine, batch)]
    prompts = [torch.tensor(each.prompt) for each in batch]
    for prompt, score, logits in zip(prompts, scores, reference_logits(load_model(directory), prompts), strict=True):
        assert score is not None
        expected = logits[:-1].float().log_softmax(-1).gather(1, prompt[1:, None])[:, 0]
        assert (expected - torch.tensor(score.logprobs)).abs().max() < 1e-4
