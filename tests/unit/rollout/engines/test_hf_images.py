"""If these fail, the hf engine samples from another distribution than the policy that is trained on images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from vision_models import batch_of, process, prompt_with, save_qwen2_5_vl, save_qwen2_vl, save_qwen3_vl, turn

from quintet.policies.model_loading import load_model
from quintet.policies.token_statistics import compute_token_statistics
from quintet.policies.vision.image_encoder import placeholder_tokens
from quintet.records import Generation, ImageInput, Request
from quintet.rollout.engines.hf import model_runner
from quintet.rollout.engines.hf.engine import HfEngine
from quintet.runtime.calls.remote_call import _decode_request, _encode_request
from quintet.training.packing import MicroBatchBudget, iter_micro_batches

IMAGES = [process(16, 24), process(8, 40), process(40, 8), process(24, 24)]


@pytest.fixture(scope="module", params=[save_qwen2_vl, save_qwen2_5_vl, save_qwen3_vl])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(request.param(tmp_path_factory.mktemp("model")))


def engine_of(model: PreTrainedModel, **settings: int) -> HfEngine:
    return HfEngine(model, **{"max_num_seqs": 4, "max_model_len": 400, "shares_learner_model": True, **settings})


def request_of(number: int, *images: ImageInput, first: int = 20, **changes: object) -> Request:
    request = Request(number, prompt_with(*images, first=first), 3 + number % 4, seed=100 + number, images=images)
    return replace(request, **changes)


def run(engine: HfEngine, requests: list[Request]) -> dict[int, Generation]:
    for request in requests:
        engine.add_request(request)
    done: dict[int, Generation] = {}
    while engine.busy:
        done |= {generation.id: generation for generation in engine.step()}
    return done


def assert_logprobs_of_learner(model: PreTrainedModel, requests: list[Request], done: dict[int, Generation]) -> None:
    batch = batch_of(*([turn(request.prompt, done[request.id].tokens, request.images)] for request in requests))
    with torch.no_grad():
        micro = next(iter_micro_batches(batch, MicroBatchBudget()))
        expected = compute_token_statistics(model, micro.packed).logprobs
    sampled = torch.tensor([x for request in requests for x in done[request.id].logprobs])
    logprobs = torch.zeros(len(batch.tokens)).index_copy(0, micro.index, expected)[batch.loss_mask]
    torch.testing.assert_close(sampled, logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prefill_tokens", [8192, 13])
def test_log_probs_are_those_of_the_learner(model: PreTrainedModel, prefill_tokens: int) -> None:
    """Samples of one prompt, prompts with common images, text alone, and chunks that end within an image."""
    requests = [request_of(number, IMAGES[0], IMAGES[1]) for number in range(4)]
    requests += [request_of(number, *IMAGES[: number - 4], first=20 + number % 2) for number in range(4, 9)]
    done = run(engine_of(model, prefill_tokens=prefill_tokens), requests)
    assert len(done) == len(requests)
    assert_logprobs_of_learner(model, requests, done)


def test_each_image_is_encoded_once(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = model_runner.encode_images

    def record(body: object, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        encoded.append(len(grids))
        return encode(body, patches, grids)

    monkeypatch.setattr(model_runner, "encode_images", record)
    engine = engine_of(model)
    run(engine, [request_of(0, IMAGES[0]), request_of(1, IMAGES[0], IMAGES[1]), request_of(2, IMAGES[0])])
    assert sum(encoded) == 2
    run(engine, [request_of(3, IMAGES[1], IMAGES[2], first=50)])
    assert sum(encoded) == 3


def test_dialogues_continue_with_further_images(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    first = request_of(1, IMAGES[0], keep_kv_cache=True)
    reply = run(engine, [first])[1].tokens
    prompt = (*first.prompt, *reply, *prompt_with(IMAGES[3], IMAGES[0]))
    second = request_of(1, IMAGES[0], IMAGES[3], prompt=prompt)
    assert_logprobs_of_learner(model, [second], run(engine, [second]))


def test_preempted_requests_continue(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    requests = [request_of(number, IMAGES[number % 2], max_tokens=8) for number in range(4)]
    expected = run(engine_of(model), requests)
    for request in requests:
        engine.add_request(request)
    for _ in range(3):
        engine.step()
    engine.reset_prefix_cache()
    done = run(engine, [])
    assert {number: each.tokens for number, each in done.items()} == {n: each.tokens for n, each in expected.items()}
    assert_logprobs_of_learner(model, requests, done)


def test_placeholders_are_never_sampled(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    requests = [request_of(n, IMAGES[0], max_tokens=60, repetition_penalty=1.5, temperature=3.0) for n in range(4)]
    done = run(engine, requests)
    sampled = {token for generation in done.values() for token in generation.tokens}
    assert len(sampled) > 100
    assert sampled.isdisjoint(placeholder_tokens(model.config))


def test_requests_without_their_images_are_refused(model: PreTrainedModel, policy_directory: Path) -> None:
    with pytest.raises(ValueError, match="tokens of 1 images that the request does not contain"):
        engine_of(model).add_request(request_of(0, IMAGES[0], images=()))
    with pytest.raises(ValueError, match="reads no images"):
        engine_of(load_model(policy_directory)).add_request(request_of(0, IMAGES[0]))


def test_requests_reach_engines_of_other_processes_with_their_images() -> None:
    for request in (request_of(0, IMAGES[0], IMAGES[1]), request_of(1)):
        assert _decode_request(_encode_request(request)) == request
