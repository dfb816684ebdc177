"""If these fail, math rows of a ROLL file get other rewards than ROLL's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quintet.rewards.verifiers import math
from quintet.rewards.verifiers.math_rule import answer_part, last_boxed, verify
from quintet.rewards.verifiers.options import MathRuleOptions

CASES = json.loads((Path(__file__).parents[2] / "parity" / "golden" / "roll_rules.json").read_text())["math"]
GOLDEN = [case for case in CASES if case["truth"]]
"""ROLL's scores; with an empty ground truth they are 0, which is an error of the data here."""


@pytest.mark.parametrize("case", GOLDEN)
def test_scores_are_those_of_roll(case: dict) -> None:
    options = MathRuleOptions(thinking_started=case["prompt"].rstrip("\n").endswith("<think>"))
    assert verify(case["text"], case["truth"], {}, options).score == case["score"]


def test_our_own_verifier_differs_where_roll_finds_no_answer() -> None:
    ours = [math.verify_anywhere(case["text"], case["truth"], {}).score for case in GOLDEN]
    more = {case["text"] for case, score in zip(GOLDEN, ours, strict=True) if score > case["score"]}
    less = [case["text"] for case, score in zip(GOLDEN, ours, strict=True) if score < case["score"]]
    assert {"4", r"The answer is \boxed{4}.", "We get \\boxed{4}.\n\nSo that was it."} < more
    assert (len(more), less) == (11, ["<think>hm</think>\n\n\\boxed\\{4}"])


@pytest.mark.parametrize(
    ("text", "started", "answer"),
    [
        ("<think>a</think>\n b \n", False, "b"),
        ("<think>a</think>b", True, ""),
        ("a</think>b", True, "b"),
        ("a</think>b</think>c", False, ""),
        ("a <think>b</think>c", False, ""),
        ("a\n\nb\n\nc", False, "c"),
        ("a\nb", False, ""),
    ],
)
def test_the_answer_is_after_thinking_or_in_the_last_paragraph(text: str, started: bool, answer: str) -> None:
    assert answer_part(text, started) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed\{1} \boxed{2}", "1"),
        (r"\boxed{a", None),
        (r'\boxed{"}" b}', '"}" b'),
        ("a", None),
    ],
)
def test_the_last_box_is_read_to_its_brace(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_repetition_format_and_length_do_not_change_the_reward() -> None:
    text = "<think>so so so so so so so</think>" + "y" * 200 + r" \boxed{4}"
    assert verify(text, "4", {}, MathRuleOptions()).score == 1.0


def test_each_of_several_right_answers_counts_and_none_is_a_fault_of_the_row() -> None:
    assert verify(r"a</think>\boxed{4}", ["5", "4"], {}, MathRuleOptions()).score == 1.0
    with pytest.raises(ValueError, match="no ground truth"):
        verify(r"a</think>\boxed{4}", None, {}, MathRuleOptions())
