"""If these fail, rows with multiple choice of a ROLL file get other rewards than ROLL's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quintet.config.native.registry_union import validate_options
from quintet.errors import ConfigError
from quintet.rewards.score import GroundTruthError
from quintet.rewards.verifiers.boxed_choice import read_choice, verify_boxed, verify_crossthinkqa
from quintet.rewards.verifiers.options import CrossThinkQaOptions
from quintet.rewards.verifiers.registry import VERIFIERS
from quintet.rewards.verifiers.roll_text import repetition_penalty, text_after_thinking
from quintet.rewards.verifiers.truth_checks import check_ground_truth

GOLDEN = json.loads((Path(__file__).parents[2] / "parity" / "golden" / "roll_rules.json").read_text())
BOXED, STATED, WRONG_BOX, WRONG = r"so \boxed{B}", "the answer is B.", r"\boxed{C}", "I take c, or C"


def rule(text: str, **options: object) -> float:
    return verify_crossthinkqa(text, "B", {}, CrossThinkQaOptions(**options)).score


@pytest.mark.parametrize(
    ("reward_type", "rewards"),
    [
        ("loose", (1.0, 1.0, -1.0, -1.0)),
        ("soft", (1.0, 0.5, -0.5, -1.0)),
        ("strict", (1.0, -1.0, -1.0, -1.0)),
    ],
)
def test_a_letter_is_rewarded_by_type(reward_type: str, rewards: tuple[float, ...]) -> None:
    assert tuple(rule(text, reward_type=reward_type) for text in (BOXED, STATED, WRONG_BOX, WRONG)) == rewards


def test_the_accuracy_is_one_if_the_rule_is_positive_whatever_the_penalties() -> None:
    text = "well " * 12 + r"\boxed{B}"  # 13 words, 11 triples: "well well well" 10 times, and another
    score = verify_crossthinkqa(text, "B", {}, CrossThinkQaOptions())
    assert score.score == pytest.approx(1 - 0.5 * 9 / 11)
    assert score.reward_components == {"acc": 1.0, "boxed": 1.0, "rule": 1.0, "repetition": pytest.approx(-4.5 / 11)}
    assert verify_crossthinkqa(WRONG_BOX, "B", {}, CrossThinkQaOptions()).reward_components["acc"] == 0.0


def test_the_length_reward_is_that_of_the_padded_length() -> None:
    assert rule(BOXED, length_coefficient=1.0, padded_length=64) == 0.5
    assert rule(BOXED, length_coefficient=1.0, padded_length=250) == 0.75
    assert rule(BOXED, length_coefficient=0.5, padded_length=250) == 0.875
    assert rule(BOXED, length_coefficient=1.0, padded_length=4096) == 1.0


def test_a_length_reward_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="needs `padded_length`"):
        CrossThinkQaOptions(length_coefficient=0.1)


@pytest.mark.parametrize(
    ("text", "letter", "boxed"),
    [
        (r"\boxed{A} then \boxed{(B) Paris}", "B", True),
        (r"\boxed{b}", None, True),
        (r"\boxed{\text{B}}", "B", True),
        (r"\boxed{}: The answer is: **D**", "D", False),  # an empty box is none
        ("The Answer Is c or E", "E", False),
        ("Surely B", "S", False),
        ("none", None, False),
    ],
)
def test_the_first_capital_of_the_answer_is_the_letter(text: str, letter: str | None, boxed: bool) -> None:
    choice = read_choice(text)
    assert (choice.letter, choice.boxed) == (letter, boxed)


def test_only_the_text_after_thinking_has_the_answer() -> None:
    assert rule(r"<think>\boxed{B}</think>\boxed{C}") == -0.5
    assert rule(r"<think>\boxed{C}</think>" + "\n\n" + r"\boxed{B}<|im_end|>") == 1.0
    assert text_after_thinking("a</think>b</think>\n\n c") == " c"


@pytest.mark.parametrize(("text", "score"), [(BOXED, 1.0), (STATED, 0.0), (WRONG_BOX, 0.0), (WRONG, 0.0)])
def test_a_choice_without_box_is_wrong_where_the_box_is_required(text: str, score: float) -> None:
    assert verify_boxed(text, "B", {}).score == score


def test_a_row_without_letter_is_a_fault_of_the_row() -> None:
    with pytest.raises(ValueError, match="no ground truth"):
        verify_boxed(BOXED, "", {})


def test_repetition_counts_triples_of_words() -> None:
    assert repetition_penalty("a b c d", -0.5) == 0.0
    assert repetition_penalty("a b", -0.5) == 0.0
    assert repetition_penalty("x x x x x", -0.1) == pytest.approx(-0.1 * 2 / 3)  # one triple, three times


@pytest.mark.parametrize("case", GOLDEN["choice"])
def test_rewards_are_those_of_roll(case: dict) -> None:
    for reward_type, told in case["crossthinkqa"].items():
        score = verify_crossthinkqa(case["text"], case["truth"], {}, CrossThinkQaOptions(reward_type=reward_type))
        assert score.score == pytest.approx(told)
    assert verify_boxed(case["text"], case["truth"], {}).score == case["multiple_choice_boxed"]


def test_an_unknown_reward_type_is_refused() -> None:
    config = VERIFIERS.get("crossthinkqa").config
    assert config is not None
    with pytest.raises(ConfigError, match=r"arguments.reward_type = 'hard'"):
        validate_options(config, {"reward_type": "hard"}, "arguments")


@pytest.mark.parametrize("verifier", ["crossthinkqa", "multiple_choice_boxed"])
def test_an_error_does_not_advise_columns_that_have_no_effect(verifier: str) -> None:
    with pytest.raises(GroundTruthError, match=r"write a letter, such as B or \(B\)$"):
        check_ground_truth(verifier, "Paris", {"choices": ["Rome", "Paris"]}, {})
