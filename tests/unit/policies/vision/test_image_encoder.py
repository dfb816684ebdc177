"""If these fail, a policy trains on other log-probs of texts with images than transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from vision_models import (
    batch_of,
    load_in_transformers,
    process,
    prompt_with,
    save_qwen2_5_vl,
    save_qwen2_vl,
    save_qwen3_vl,
    transformers_logprobs,
    turn,
)

from quintet.errors import MachineError
from quintet.policies import hidden_states
from quintet.policies.model_loading import load_model
from quintet.policies.output_head import OutputHead
from quintet.policies.token_statistics import compute_token_statistics
from quintet.policies.vision.image_encoder import placeholder_tokens
from quintet.records import Batch
from quintet.training.packing import MicroBatchBudget, iter_micro_batches, select_sequences

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen2_vl": save_qwen2_vl,
    "qwen2_5_vl": save_qwen2_5_vl,
    "qwen3_vl": save_qwen3_vl,
}


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory: Path) -> PreTrainedModel:
    return load_model(directory)


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Samples of one prompt, prompts that share images, dialogues with several images, and text alone."""
    wide, tall, large = process(8, 40), process(40, 8), process(48, 40)
    first = prompt_with(wide, large)
    samples = [[turn(first, response, (wide, large))] for response in ([17, 18, 19], [17, 15], [30])]
    dialogue = [
        turn(prompt_with(tall), [40, 41, 42], (tall,)),
        turn((2, *prompt_with(wide, tall)), [43, 44], (wide,), continues=True),
    ]
    alone = [turn((20, 21, 22, 23), [11, 12])]
    return batch_of(*samples, dialogue, [turn(first[:-1], [16], (wide, large))], alone)


def learner_logprobs(model: PreTrainedModel, batch: Batch, max_tokens: int | None = None) -> Tensor:
    out = torch.zeros(len(batch.tokens))
    parts = []
    for micro in iter_micro_batches(batch, MicroBatchBudget(max_tokens)):
        statistics = compute_token_statistics(model, micro.packed, 0.7)
        parts.append((micro.index, statistics.logprobs))
    index, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return out.index_copy(0, index, values)


@pytest.mark.parametrize("max_tokens", [None, 40])
def test_log_probs_of_packed_sequences_are_those_of_transformers(
    model: PreTrainedModel, directory: Path, batch: Batch, max_tokens: int | None
) -> None:
    with torch.no_grad():
        expected = transformers_logprobs(load_in_transformers(directory), batch, 0.7)
        torch.testing.assert_close(learner_logprobs(model, batch, max_tokens), expected, rtol=0, atol=1e-5)


def test_log_probs_depend_on_images(model: PreTrainedModel, batch: Batch) -> None:
    """Else the other tests would not notice wrong features."""
    assert batch.image_patches is not None
    other = replace(batch, image_patches=255 - batch.image_patches)
    with torch.no_grad():
        difference = (learner_logprobs(model, batch) - learner_logprobs(model, other)).abs()
    assert difference.max() > 0.05


def test_gradients_are_those_of_transformers(model: PreTrainedModel, directory: Path, batch: Batch) -> None:
    theirs = load_in_transformers(directory)
    transformers_logprobs(theirs, batch, 0.7).square().sum().backward()
    learner_logprobs(model, batch, 40).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        grad, reference = parameter.grad, expected[name]
        assert grad is not None
        assert reference is not None
        torch.testing.assert_close(
            grad, reference, rtol=1e-3, atol=1e-4 * float(reference.abs().max()) + 1e-6, msg=name
        )
    model.zero_grad()


def test_placeholders_of_images_have_probability_0(model: PreTrainedModel) -> None:
    assert isinstance(model.lm_head, OutputHead)
    states = torch.randn(3, model.lm_head.in_features) * 50
    probs = model.lm_head(states).softmax(-1)
    assert len(placeholder_tokens(model.config)) == 4
    assert not probs[:, list(placeholder_tokens(model.config))].any()


def test_a_selection_of_sequences_has_the_same_log_probs(model: PreTrainedModel, batch: Batch) -> None:
    chosen = torch.tensor([3, 0])
    part = select_sequences(batch, chosen)
    with torch.no_grad():
        everything = learner_logprobs(model, batch).split(batch.lengths.tolist())
        torch.testing.assert_close(learner_logprobs(model, part), torch.cat([everything[3], everything[0]]))


def test_a_model_that_reads_images_in_another_way_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model whose encoder is not that of its family would."""
    encode = hidden_states.encode_images
    monkeypatch.setattr(hidden_states, "encode_images", lambda *inputs: 1.5 * encode(*inputs))
    with pytest.raises(MachineError, match="is not supported: hidden states"):
        load_model(directory)
