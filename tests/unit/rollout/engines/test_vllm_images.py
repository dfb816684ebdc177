"""If these fail, vLLM samples from another distribution than the vision-language policy that is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_models import (
    SHAPE,
    TEXTS,
    batch_of,
    process,
    prompt_with,
    save_qwen2_5_vl,
    save_qwen2_vl,
    save_qwen3_vl,
    turn,
)
from vllm_bench import Bench, needs_vllm, open_bench, shift

from quintet.policies.tiny_models import train_tokenizer
from quintet.policies.token_statistics import compute_token_statistics
from quintet.policies.vision.image_encoder import placeholder_tokens
from quintet.records import Generation, Request
from quintet.rollout.engines.weight_source import ModuleWeights
from quintet.training.packing import MicroBatchBudget, iter_micro_batches

pytestmark = needs_vllm
IMAGES = [process(16, 24), process(8, 40), process(24, 24)]


# vLLM's attention on a CPU needs heads of at least 32
MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": lambda directory: save_qwen2_5_vl(directory, replace(SHAPE, hidden=128)),
    "qwen2_vl": lambda directory: save_qwen2_vl(directory, head_dim=32),
    "qwen3_vl": lambda directory: save_qwen3_vl(directory, head_dim=32),
}


@pytest.fixture(scope="module", params=[("qwen2_5_vl", False), ("qwen2_vl", False), ("qwen3_vl", True)], ids=str)
def bench(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """An engine in this process or in its own."""
    name, separate_process = request.param
    directory = MODELS[name](tmp_path_factory.mktemp("model"))
    train_tokenizer(300, TEXTS, images=True).save_pretrained(directory)
    opened = open_bench(directory, separate_process=separate_process)
    yield opened
    opened.engine.close()


def requests() -> list[Request]:
    """Samples of one prompt, several images in another order, text alone."""
    prompts = [IMAGES[:1], IMAGES[:1], [IMAGES[1], IMAGES[0], IMAGES[2]], []]
    return [
        Request(number, prompt_with(*images, first=20), 12, seed=number, temperature=0.8, images=tuple(images))
        for number, images in enumerate(prompts)
    ]


def assert_logprobs_of_learner(bench: Bench, requests: list[Request], done: dict[int, Generation]) -> None:
    assert all(generation.failure is None and len(generation.tokens) == 12 for generation in done.values()), done
    batch = batch_of(*([turn(each.prompt, done[each.id].tokens, each.images)] for each in requests))
    with torch.no_grad():
        micro = next(iter_micro_batches(batch, MicroBatchBudget()))
        expected = compute_token_statistics(bench.model, micro.packed, 0.8).logprobs
    logprobs = torch.zeros(len(batch.tokens)).index_copy(0, micro.index, expected)[batch.loss_mask]
    sampled = torch.tensor([number for each in requests for number in done[each.id].logprobs])
    torch.testing.assert_close(sampled, logprobs, rtol=0, atol=1e-4)


def test_log_probs_are_those_of_the_learner_also_with_new_weights(bench: Bench) -> None:
    asked = requests()
    assert_logprobs_of_learner(bench, asked, bench.run(*asked))
    shift(bench.model, seed=3)
    bench.engine.load_weights(1, ModuleWeights(bench.model))
    assert_logprobs_of_learner(bench, asked, bench.run(*asked))


def test_placeholders_are_never_sampled(bench: Bench) -> None:
    asked = [Request(n, prompt_with(IMAGES[0]), 60, seed=n, temperature=2.0, images=(IMAGES[0],)) for n in range(4)]
    done = bench.run(*asked)
    assert not [each.failure for each in done.values() if each.failure]
    sampled = {token for generation in done.values() for token in generation.tokens}
    assert len(sampled) > 50
    assert sampled.isdisjoint(placeholder_tokens(bench.model.config))


def test_memory_is_reserved_for_the_largest_image(bench: Bench) -> None:
    """The largest image of this model has 64 tokens, each of 4 patches."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    engine: Any = bench.engine
    model_config = engine._llm_engine._engine.vllm_config.model_config
    inputs = MULTIMODAL_REGISTRY.create_processor(model_config).get_dummy_mm_inputs({"image": 2})
    assert [place.length for place in inputs["mm_placeholders"]["image"]] == [64, 64]
    assert [len(item["pixel_values"].data) for item in inputs["mm_kwargs"]["image"]] == [256, 256]
