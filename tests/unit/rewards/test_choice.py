"""If these fail, letters of multiple choice are misread, or ground truths that name none are scored silently."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.rewards.score import GroundTruthError
from quintet.rewards.verifiers import choice
from quintet.rewards.verifiers.choice_texts import Choices, true_letters

CITIES = {"choices": ["Rome", "Paris", "Bonn", "A dog"]}


@pytest.mark.parametrize(
    ("text", "truth", "extra"),
    [
        (r"\boxed{42} Answer: D", "D", {}),
        (r"\boxed{} Answer: D", "D", {}),
        ("\\boxed{x}\nAnswer: D", "D", {}),
        (r"\boxed{E - text}", "E", {}),
        (r"\boxed{\text{(E)}}", "E", {}),
        ("**D**", "D", {}),
        ("(D)", "D", {}),
        ("D)", "D", {}),
        ("D. Paris", "D", {}),
        ("option d", "D", {}),
        ("The answer is D because A is wrong", "D", {}),
        ("The answer is a dog", "D", CITIES),
        ("A dog", "D", CITIES),
        ("I", "I", {}),
        ("d", "D", {}),
        (r"\boxed{d}", "D", {}),
        (r"\boxed{E}", "E", {}),
        (r"\boxed{A} then \boxed{B}", "B", {}),
        (r"<think>\boxed{A}</think> Answer: B", "B", {}),
        ("The answer is D. The answer is not B.", "D", {}),
        ("B, not C", "B", {}),
        ("Answer: **D**", "D", {}),
        ("**Answer:** D", "D", {}),
        ("**Answer: D**", "D", {}),
        ("## Answer\n\nD", "D", {}),
        ("Final Answer: (D) Paris", "D", {}),
        ("The correct option is D.", "D", {}),
        ("So D is correct.", "D", {}),
        ("A. Rome\nB. Paris\nC. Bonn\nI choose B", "B", {}),
        ("A. Rome\nB. Paris\nC. Bonn\nB", "B", {}),
        (r"$\boxed{\textbf{C}}$", "C", {}),
        (r"\boxed{\mathrm{C}}", "C", {}),
        (r"\boxed{C.}", "C", {}),
        (r"\boxed{C) 12}", "C", {}),
        (r"\boxed{\text{C: } 12}", "C", {}),
        ("D. Both A and B", "D", {}),
        ("Answer: D) both B and C", "D", {}),
        ("the answer is option (c)", "C", {}),
        ("<answer>C</answer>", "C", {}),
        ("<answer>The answer is C</answer>", "C", {}),
        ("#### C", "C", {}),
        ("#### 12\nAnswer: C", "C", {}),
        ("Ｂ", "B", {}),
        ("（Ｂ）", "B", {}),
        ("答案是B", "B", {}),
        ("答案：B", "B", {}),
        ("B: Paris", "B", {}),
        ("B - Paris", "B", {}),
        ("B – Paris", "B", {}),
        ("B Paris", "B", {}),
        ("A because it is red", "A", {}),
        ("Answer: A. Because", "A", {}),
        ("Answer: paris", "B", CITIES),
        ("Answer: Paris.", "B", CITIES),
        ("Paris", "B", CITIES),
        ("I'd go with option C rather than B", "C", {}),
        ("It can't be B, so it must be D.", "D", {}),
        ("If the answer is B, then x. So the answer is C", "C", {}),
        ("The answer is C. If the answer is B then no.", "C", {}),
        ("The answer would be C", "C", {}),
        ("The answer to this question is C.", "C", {}),
        ("Answer - C", "C", {}),
        ("Answer (A-D): C", "C", {}),
        ("ANSWER:C", "C", {}),
        ("Answer\n\nC", "C", {}),
        ("answer: [C]", "C", {}),
        ("Therefore, the correct answer is **(C) Bonn**.", "C", {}),
        ("<b>C</b>", "C", {}),
        ("`C`", "C", {}),
        ("I pick C!", "C", {}),
        ("C, since it's cold", "C", {}),
        ("The answer is C, A is too small", "C", {}),
        ("B. I think", "B", {}),
        ("B and I think so", "B", {}),
        ("Z", "Z", {}),
        ("(B) is right, (C) is wrong", "B", {}),
        ("Answer: B.\n\nExplanation: A is wrong since the option (C)...", "B", {}),
        ("The answer is:\n\n$$\\boxed{\\text{B}}$$", "B", {}),
        ("B\n\nBecause A, C are wrong", "B", {}),
        ("Let A be a set. Answer: C", "C", {}),
        ("Hence D.", "D", {}),
        (r"\boxed{\text{Option C}}", "C", {}),
        (r"\boxed{C \text{ (Paris)}}", "C", {}),
        ("The answer is A", "A", {}),
        ("The answer is A.", "A", {}),
        ("The answer is A!", "A", {}),
        ("answer is a", "A", {}),
        ("My answer: b", "B", {}),
        ("The answer is (B) since option A fails", "B", {}),
        ("Answer:A,", "A", {}),
        ("B, a city", "B", {}),
        ("B, a city in France", "B", {}),
        ("The answer is C and A is wrong.", "C", {}),
        ("Answer: b, a nice one", "B", {}),
        ("C\n\nA. wrong\nB. wrong\nC. right", "C", {}),
        ("D) Paris\n\nB would be Rome.", "D", {}),
        ("The best answer is choice D: all", "D", {}),
        ("A: Rome\nB: Paris\nAnswer: A", "A", {}),
        ("Options: A) x B) y. Answer: B) y", "B", {}),
    ],
)
def test_a_right_choice_is_recognised(text: str, truth: str, extra: dict[str, Any]) -> None:
    assert choice.verify(text, truth, extra).score == 1.0


@pytest.mark.parametrize(
    ("text", "truth", "extra"),
    [
        ("Answer: A or B", "A", {}),
        ("Answer: A or B", "B", {}),
        ("A dog runs", "A", {}),
        ("The answer is a dog", "A", {}),
        ("I think so", "I", {}),
        (r"\boxed{E} ", "D", CITIES),
        (r"\boxed{A} then \boxed{B}", "A", {}),
        (r"<think>\boxed{A}</think> Answer: B", "A", {}),
        ("<think>the answer is B", "B", {}),
        ("blah answer is B</think>", "B", {}),
        ("not B", "B", {}),
        ("The answer is not B", "B", {}),
        ("The answer is not (B)", "B", {}),
        ("The answer isn't B", "B", {}),
        ("A. Rome\nB. Paris\nC. Bonn", "A", {}),
        (r"\boxed{A, B}", "A", {}),
        (r"\boxed{A, B}", "B", {}),
        (r"\boxed{AB}", "A", {}),
        (r"\boxed{A \text{ and } B}", "B", {}),
        ("A/B", "A", {}),
        ("(A) or (B)", "B", {}),
        ("A and C", "A", {}),
        ("The capital is Paris", "B", CITIES),
        ("Rome", "B", CITIES),
        ("Neither A nor B", "A", {}),
        ("Neither A nor B", "B", {}),
        ("None of these", "N", {}),
        ("", "A", {}),
        ("answer:", "A", {}),
        ("Both A and B are right", "A", {}),
        ("The answer is B and D.", "B", {}),
        ("U.S.", "A", {}),
        ("Looking at A, it is wrong. Looking at B, fine.", "B", {}),
        ("The answer is 42", "A", {}),
        (r"\boxed{a - b}", "A", {}),
        (r"\boxed{D = 5}", "D", {}),
        ("A and B is right", "A", {}),
        ("I am sure: C", "C", {}),
    ],
)
def test_no_choice_several_and_denied_ones_are_wrong(text: str, truth: str, extra: dict[str, Any]) -> None:
    assert choice.verify(text, truth, extra).score == 0.0


@pytest.mark.parametrize(
    ("truth", "extra", "letters"),
    [
        *(
            (truth, {}, "B")
            for truth in ("B", "(B)", "B.", "b", " B\n", "B. Paris", "B) Paris", r"\boxed{B}", "Answer: B")
        ),
        *((truth, CITIES, "B") for truth in ("B", "B. paris", "Paris", 1, "1", 1.0)),
        ("A dog", CITIES, "D"),
        (["A", "b"], {}, "AB"),
        ({"target": "B"}, {}, "B"),
        ("D. Both A and B", {}, "D"),
        ("y", {"choices": {"text": ["x", "y"], "label": ["A", "B"]}}, "B"),
        ("y", {"options": '{"A": "x", "C": "y"}'}, "C"),
        ("y", {"choices": ["(A) x", "(B) y"]}, "B"),
        ("y", {"choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}]}, "B"),
    ],
)
def test_a_ground_truth_names_its_letter(truth: Any, extra: dict[str, Any], letters: str) -> None:
    assert true_letters(truth, Choices.of_row(extra)) == set(letters)


@pytest.mark.parametrize(
    ("truth", "extra"),
    [
        *(
            (truth, {})
            for truth in ("Paris", "A dog", "A, C", "AC", "A or B", "A. or B", "A) A", "", " ", 1, None, [], [["A"]])
        ),
        *((truth, CITIES) for truth in ("E", "B. Rome", "London", 4, -1, True, float("nan"), {"x": "B"}, b"B")),
        ("A", {"choices": ["B", "A"]}),
        ("same", {"choices": ["same", "same"]}),
        ("2", {"choices": {"text": ["x", "y"], "label": ["1", "2"]}}),
    ],
)
def test_a_ground_truth_that_names_no_letter_is_refused(truth: Any, extra: dict[str, Any]) -> None:
    with pytest.raises(GroundTruthError):
        choice.verify("B", truth, extra)


@given(
    st.sampled_from("ABCDE"),
    st.sampled_from("ABCDE"),
    st.sampled_from(["{}", "({})", "**{}**", "{}.", r"$\text{{{}}}$"]),
)
def test_a_box_beats_thoughts_and_a_statement_is_read_without_one(letter: str, other: str, form: str) -> None:
    written = form.format(letter)
    for text in (rf"\boxed{{{written}}}", f"The answer is {written}", rf"\boxed{{7}} Answer: {written}"):
        assert choice.verify(rf"<think>\boxed{{{other}}} so {other}</think>{text}", letter, {}).score == 1.0, text
