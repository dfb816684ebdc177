"""If these fail, responses are sampled or ended in another way than configured."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.errors import ConfigError
from quintet.pipelines.rollout_step import response_lines
from quintet.records import FinishReason, Outcome, Trajectory, Turn
from quintet.rollout.sampling_params import (
    SamplingParams,
    check_tokens,
    greedy_sampling,
    max_concurrent_requests,
    max_model_len,
    training_sampling,
    validation_prompts,
    validation_sampling,
)

ENDS = ("rollout.repetition_penalty=1.1", "rollout.min_response_tokens=3", "rollout.end_token=9", "rollout.stop=['.']")
ENDED: dict[str, Any] = {"repetition_penalty": 1.1, "min_tokens": 3, "stop_token_ids": (9,), "stop_strings": (".",)}


def experiment(*overrides: str) -> Experiment:
    return load_experiment(None, overrides).experiment


def test_training_uses_the_configured_sampling() -> None:
    drawn = ("rollout.temperature=0.7", "rollout.top_k=5", "rollout.top_p=0.9", "rollout.min_p=0.1")
    assert training_sampling(experiment(*drawn, *ENDS), 4) == SamplingParams(0.7, 5, 0.9, 4, min_p=0.1, **ENDED)
    assert training_sampling(experiment(), 4) == SamplingParams(1.0, 0, 1.0, 4)


def test_without_do_sample_decoding_is_greedy() -> None:
    still = experiment("rollout.do_sample=false", "rollout.top_k=5", "rollout.min_p=0.1", *ENDS)
    assert training_sampling(still, 4) == SamplingParams(0.0, 0, 1.0, 4, **ENDED)
    assert greedy_sampling(still) == SamplingParams(0.0, 0, 1.0, 0, **ENDED)


def test_validation_has_its_own_sampling_and_the_stop_conditions_of_training() -> None:
    assert validation_sampling(experiment(*ENDS), 4) == SamplingParams(0.0, 0, 1.0, 0, **ENDED)
    words = ("do_sample=true", "temperature=0.6", "top_k=3", "top_p=0.8", "min_p=0.2")
    own = [f"validation.sampling.{word}" for word in words]
    assert validation_sampling(experiment(*own, *ENDS), 4) == SamplingParams(0.6, 3, 0.8, 4, min_p=0.2, **ENDED)
    plain = experiment("validation.sampling.repetition_penalty=1.0", *ENDS)
    assert validation_sampling(plain, 4).repetition_penalty == 1.0


def test_a_request_has_all_sampling_parameters() -> None:
    sampling = SamplingParams(0.6, 3, 0.9, 4, min_p=0.2, **ENDED)
    request = sampling.request(7, (1, 2), 16, 5, (3, 4))
    assert (request.id, request.prompt, request.max_tokens, request.seed) == (7, (1, 2), 16, 5)
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0.6, 3, 0.9, 0.2)
    assert (request.repetition_penalty, request.min_tokens, request.stop_strings) == (1.1, 3, (".",))
    assert request.stop_token_ids == (9,)
    assert SamplingParams(1.0, 0, 1.0, 0).request(7, (1,), 16, 5, (3, 4)).stop_token_ids == (3, 4)
    assert SamplingParams(1.0, 0, 1.0, 0, ignore_end=True).request(7, (1,), 16, 5, (3, 4)).stop_token_ids == ()
    assert sampling.request(7, (1,), 2, 5, ()).min_tokens == 2, "a reply can't be longer than its longest"


def test_a_response_goes_on_after_its_end_token_if_that_is_configured() -> None:
    ends = [
        training_sampling(experiment(f"rollout.ignore_end={ignored}"), 4).request(7, (1,), 16, 5, (3, 4)).stop_token_ids
        for ignored in ("false", "true")
    ]
    assert ends == [(3, 4), ()]


def test_prompts_per_device_limits_concurrent_requests() -> None:
    overrides = ("training.samples_per_group=4", "rollout.max_concurrent=64")
    assert max_concurrent_requests(experiment(*overrides)) == 64
    assert max_concurrent_requests(experiment(*overrides, "rollout.engine_options.prompts_per_device=3")) == 12
    assert max_concurrent_requests(experiment(*overrides, "rollout.engine_options.prompts_per_device=30")) == 64


def test_validation_prompts_is_the_lowest_limit() -> None:
    assert validation_prompts(experiment(), 50) == 50
    assert validation_prompts(experiment("validation.prompts_per_device=8"), 50) == 8
    assert validation_prompts(experiment("validation.prompts_per_device=80"), 50) == 50
    assert validation_prompts(experiment(), 0) == 1


def test_max_model_len_is_at_most_prompt_plus_response() -> None:
    overrides = ("rollout.max_prompt_tokens=100", "rollout.max_response_tokens=20")
    assert max_model_len(experiment(*overrides)) == 120
    assert max_model_len(experiment(*overrides, "rollout.engine_options.max_model_tokens=110")) == 110
    assert max_model_len(experiment(*overrides, "rollout.engine_options.max_model_tokens=8000")) == 120


@pytest.mark.parametrize("name", ["pad_token", "end_token"])
def test_a_token_beyond_the_vocabulary_is_a_config_error(name: str) -> None:
    check_tokens(experiment(f"rollout.{name}=99"), 100)
    with pytest.raises(ConfigError, match=rf"rollout.{name} = 100, but the model's last token id is 99"):
        check_tokens(experiment(f"rollout.{name}=100"), 100)


def test_printed_responses_name_their_turn() -> None:
    turn = Turn("seen", (1,), False, (5, 6), (-0.1, -0.2), 3, "Up\n", ("Up",), True, 1.0, FinishReason.STOP)
    episode = Trajectory("lake", 11, group=2, sample=1, turns=(turn, turn), outcome=Outcome.SUCCESS)
    first, second = response_lines([episode], step=4)
    assert first == "step 4, group 2, sample 1, turn 0: 2 tokens, stop: [5 6] 'Up\\n'"
    assert "turn 1" in second
