"""If these fail, SGLang answers other prompts with images than those that are trained, and nothing shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_stand_in import Brain, Server
from torch import nn
from vision_models import batch_of, process, prompt_with, save_qwen2_5_vl, turn

from quintet.config.native.rollout import EngineConfig
from quintet.policies.model_loading import load_model
from quintet.policies.token_statistics import compute_token_statistics
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.engine import ENGINES, Engine, EngineSetup
from quintet.rollout.engines.sglang.protocol import ImageData, MalformedResponseError, ResponseChunk
from quintet.rollout.engines.weight_source import ModuleWeights
from quintet.training.packing import MicroBatchBudget, iter_micro_batches

CONTEXT = 128
IMAGES = [process(16, 24), process(8, 40), process(24, 24)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2_5_vl(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(directory: Path) -> Iterator[Server]:
    running = Server(model_path=str(directory), context_length=CONTEXT + 8, enable_deterministic_inference=True)
    yield running
    running.close()


@pytest.fixture
def model(directory: Path) -> Any:
    return load_model(directory)


@pytest.fixture
def engine(directory: Path, model: Any, server: Server) -> Iterator[Engine]:
    options = EngineConfig(arguments={}, detokenize=True, deterministic=True, server_url=server.url)
    setup = EngineSetup(directory, model, torch.float32, 4, CONTEXT, detokenize=str, options=options)
    opened = ENGINES.get("sglang-server").load()(setup)
    yield opened
    opened.close()


def requests(**changes: Any) -> list[Request]:
    """Samples of one prompt, several images in another order, text alone; likely tokens, hence no placeholders."""
    prompts = [IMAGES[:1], IMAGES[:1], [IMAGES[1], IMAGES[0], IMAGES[2]], []]
    return [
        Request(number, prompt_with(*images, first=20), 6, seed=number, top_k=2, images=tuple(images), **changes)
        for number, images in enumerate(prompts)
    ]


def run(engine: Engine, requests: list[Request]) -> dict[int, Generation]:
    for each in requests:
        engine.add_request(each)
    done: dict[int, Generation] = {}
    while engine.busy:
        done |= {each.id: each for each in engine.step()}
    return done


def assert_logprobs_of_model(model: Any, requests: list[Request], done: dict[int, Generation]) -> None:
    """SGLang normalizes log-probs over all tokens, also placeholders of images."""
    assert all(each.failure is None and each.tokens for each in done.values()), done
    batch = batch_of(*([turn(each.prompt, done[each.id].tokens, each.images)] for each in requests))
    masked, model.lm_head = model.lm_head, nn.Linear(64, model.lm_head.out_features, bias=False)
    model.lm_head.weight = masked.weight
    with torch.no_grad():
        micro = next(iter_micro_batches(batch, MicroBatchBudget()))
        expected = compute_token_statistics(model, micro.packed, 1.0).logprobs
    model.lm_head = masked
    logprobs = torch.zeros(len(batch.tokens)).index_copy(0, micro.index, expected)[batch.loss_mask]
    sampled = torch.tensor([number for each in requests for number in done[each.id].logprobs])
    torch.testing.assert_close(sampled, logprobs, rtol=0, atol=1e-4)


def test_log_probs_are_those_of_the_learner_also_with_new_weights(engine: Engine, model: Any) -> None:
    asked = requests()
    assert_logprobs_of_model(model, asked, run(engine, asked))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    engine.load_weights(1, ModuleWeights(model))
    assert_logprobs_of_model(model, asked, run(engine, asked))


def test_log_probs_without_penalties_have_the_images(engine: Engine, model: Any) -> None:
    asked = requests(repetition_penalty=1.3)
    assert_logprobs_of_model(model, asked, run(engine, asked))


def test_a_prompt_that_is_read_otherwise_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a server that encodes the text of the prompt again, or resizes images."""
    expanded = Brain._expanded

    def drifting(self: Brain, body: Any) -> Any:
        tokens, vision = expanded(self, body)
        return (tokens[1:] if vision else tokens), vision

    monkeypatch.setattr(Brain, "_expanded", drifting)
    done = run(engine, requests())
    assert [done[number].finish_reason for number in range(4)] == [FinishReason.FAILED] * 3 + [FinishReason.LENGTH]
    assert done[0].failure is not None
    assert "SGLANG_MM_AVOID_RETOKENIZE" in done[0].failure.message


def test_sampled_placeholders_are_a_failure(model: Any) -> None:
    images = ImageData.from_model(model)
    assert images
    (asked, *_) = requests()
    chunk = ResponseChunk((7, images.image_token), (0.0, 0.0), "length", None, (), prompt_tokens=len(asked.prompt))
    with pytest.raises(MalformedResponseError, match="placeholders"):
        images.check(asked, 0, chunk)


def test_requests_without_their_images_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="does not contain"):
        engine.add_request(Request(0, prompt_with(IMAGES[0]), 4, seed=0))
