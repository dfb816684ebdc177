"""If these fail, what rules say of an answer becomes another reward than the configuration names."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from quintet.config.native.data import OverlongConfig, RewardConfig
from quintet.records import Failure, PromptRow, Response
from quintet.rewards.reward_computation import RewardComputation, overlong_penalty
from quintet.rewards.reward_managers import PooledRewardScorer, strip_end_marks
from quintet.rewards.verifier_process import VerifierJob


def answer(text: str = "", tokens: int = 1) -> Response:
    return Response(3, PromptRow(0, "", ()), text, tokens)


def reward(config: RewardConfig, score: float, text: str = "", tokens: int = 1) -> float:
    return RewardComputation(config, 100).reward(answer(text, tokens), {"score": score}).score


def test_a_function_without_acc_measures_a_reward_and_no_success() -> None:
    verifier, function = (RewardComputation(RewardConfig(function=path), 100) for path in (None, "rewards.py:score"))
    assert verifier.reward(answer(), {"score": 0.8}).measures_success
    assert not function.reward(answer(), {"score": 0.8}).measures_success
    assert function.reward(answer(), {"score": 0.8, "reward_components": {"acc": 1.0}}).measures_success
    assert not verifier.raw_reward(answer(), 0.8).measures_success


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (120, -2.0)]
)
def test_the_overlong_penalty_grows_over_the_buffer(tokens: int, penalty: float) -> None:
    """longest 100, buffer 20: (100 - 20 - tokens) / 20, at most 0."""
    assert overlong_penalty(tokens, 100, OverlongConfig(buffer=20)) == pytest.approx(penalty)
    assert overlong_penalty(tokens, 100, OverlongConfig(buffer=20, penalty=0.5)) == pytest.approx(penalty / 2)


@pytest.mark.parametrize(
    ("wrong", "scale", "score", "expected"),
    [(0, 1, 1, 1), (0, 1, 0, 0), (0, 2, 0.5, 1), (-1, 5, 1, 5), (-1, 5, 0, -5), (-1, 5, 0.5, 0), (-1, 1, 0.25, -0.5)],
)
def test_verifier_scores_map_to_wrong_reward_to_1_times_scale(
    wrong: float, scale: float, score: float, expected: float
) -> None:
    assert reward(RewardConfig(wrong_reward=float(wrong), scale=float(scale)), score) == pytest.approx(expected)


def test_scores_of_a_custom_function_are_scaled_but_not_mapped() -> None:
    assert reward(RewardConfig(wrong_reward=-1.0, scale=2.0, function="a.py:f"), 0.25) == 0.5
    assert reward(RewardConfig(wrong_reward=-1.0, scale=2.0, function="a.py:f"), -3.0) == -6.0


def test_the_format_reward_does_not_depend_on_scale() -> None:
    config = RewardConfig(format="boxed", format_reward=0.1, scale=2.0)
    judged = RewardComputation(config, 100).reward(answer(r"\boxed{3}"), {"score": 1.0})
    assert (judged.score, judged.reward_components) == (pytest.approx(2.1), {"acc": 1.0, "format": 1.0})
    assert reward(config, 1.0, "3") == 2.0


@pytest.mark.parametrize(
    ("text", "prefix", "has"),
    [
        ("so</think><answer>3</answer>", "<think>\n", 1.0),
        ("so</think><answer>3</answer>", "", 0.0),
        ("so</think><answer>3</answer>", None, 1.0),  # stored: the prompt is unknown
        ("<think>so</think><answer>3</answer>", None, 1.0),
        ("<think>so</think><answer>3</answer>", "", 1.0),
        ("<think>so</think><answer>3</answer>", "<think>\n", 0.0),  # twice
        ("<answer>3</answer>", "<think>\n", 0.0),
        ("<answer>3</answer>", None, 0.0),
        ("so <answer>3</answer>", "<think>\n", 0.0),
    ],
)
def test_a_thought_that_the_prompt_opens_belongs_to_the_format(text: str, prefix: str | None, has: float) -> None:
    response = Response(3, PromptRow(0, "", ()), text, 1, prefix)
    config = RewardConfig(format="think_answer", format_reward=1.0)
    result = RewardComputation(config, 100).reward(response, {"score": 0.0})
    assert (result.reward_components["format"], result.score) == (has, has)


class Jobs(list[VerifierJob]):
    """A pool that keeps its jobs."""

    submit = list.append


@pytest.mark.parametrize(
    ("options", "text"),
    [({"kind": "exact"}, "<think>\nso"), ({"kind": "ifeval_roll"}, "so"), ({"function": "mine.py:score"}, "so")],
)
def test_verifiers_see_a_thought_that_the_prompt_opens_but_functions_and_classes_of_roll_do_not(
    options: dict[str, str], text: str
) -> None:
    jobs = Jobs()
    config = RewardConfig(function_arguments={}, **options)
    PooledRewardScorer(jobs, RewardComputation(config, 100)).submit(
        Response(0, PromptRow(0, "", (), "x"), "so", 1, "<think>\n")
    )
    message = jobs[0].message
    assert message.get("arguments", {}).get("solution_str", message.get("text")) == text


def test_the_math_rule_of_roll_knows_whether_the_prompt_opens_a_thought() -> None:
    jobs = Jobs()
    scorer = PooledRewardScorer(jobs, RewardComputation(RewardConfig(kind="math_rule", function_arguments={}), 100))
    for prefix in ("<think>\n", "", None):
        scorer.submit(Response(0, PromptRow(0, "", (), "x"), "so", 1, prefix))
    assert [job.message["options"] for job in jobs] == [{"thinking_started": True}, {}, {}]


def test_terms_that_cancel_are_no_reward() -> None:
    """In floats, 0.1 + 0.2 - 0.3 is 5.6e-17."""
    config = RewardConfig(
        manager="dapo", format="boxed", format_reward=0.2, scale=0.1, overlong=OverlongConfig(buffer=20)
    )
    assert reward(config, 1.0, r"\boxed{3}", 86) == 0.0


def test_length_counts_whatever_the_scale() -> None:
    config = RewardConfig(manager="dapo", overlong=OverlongConfig(buffer=20), scale=2.0)
    judged = RewardComputation(config, 100).reward(answer(tokens=90), {"score": 1.0, "extracted_answer": "3"})
    assert (judged.score, judged.reward_components, judged.extracted_answer) == (
        1.5,
        {"acc": 1.0, "overlong": -0.5},
        "3",
    )


def test_further_reward_components_are_kept() -> None:
    config = RewardConfig(function="a.py:f")
    judged = RewardComputation(config, 100).reward(
        answer(), {"score": 2.0, "reward_components": {"acc": 0.0, "style": 0.7}}
    )
    assert (judged.score, judged.reward_components) == (2.0, {"acc": 0.0, "style": 0.7})
    assert RewardComputation(config, 100).reward(answer(), {"score": 2.0}).reward_components == {"acc": 1.0}
    assert RewardComputation(config, 100).reward(answer(), {"score": -2.0}).reward_components == {"acc": 0.0}


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_has_failed_and_counts_as_quite_wrong(score: float) -> None:
    judged = RewardComputation(RewardConfig(wrong_reward=-1.0, scale=5.0), 100).reward(answer(), {"score": score})
    assert judged.score == -5.0
    assert judged.failure is not None
    assert (judged.failure.where, judged.failure.error_type, judged.reward_components) == (
        "reward",
        "ValueError",
        {"acc": 0.0},
    )


def test_a_failure_is_recorded_with_its_cause() -> None:
    judged = RewardComputation(RewardConfig(), 100).reward(answer(), Failure("reward", "Timeout", "no verdict"))
    assert (judged.score, judged.failure) == (0.0, Failure("reward", "Timeout", "no verdict"))


@pytest.mark.parametrize(
    ("text", "bare"),
    [("42<|im_end|>", "42"), ("42</s>\n<|endoftext|> ", "42"), ("4<|im_end|>2", "4<|im_end|>2"), ("42", "42")],
)
def test_marks_of_the_end_are_taken_off(text: str, bare: str) -> None:
    assert strip_end_marks(text) == bare


@pytest.mark.parametrize(
    "idle", [{"format_reward": 0.5}, {"requests_per_minute": 5}, {"function_arguments": {"a": 1}}], ids=str
)
def test_reward_options_without_effect_are_rejected(idle: dict) -> None:
    with pytest.raises(ValidationError, match=next(iter(idle))):
        RewardConfig(**idle)
