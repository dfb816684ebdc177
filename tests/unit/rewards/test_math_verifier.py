"""If these fail, right mathematics is scored as wrong, or wrong as right."""

from __future__ import annotations

import pytest

from quintet.rewards.answer_extraction import extract_boxed
from quintet.rewards.verifiers import math

RIGHT = [
    ("42", "42"),
    ("42.0", "42"),
    ("042", "42"),
    ("+7", "7"),
    ("-7", "-7"),
    ("−7", "-7"),
    ("1,234,567", "1234567"),
    ("1{,}234", "1234"),
    (r"\$18", "18"),
    ("18.", "18"),
    ("0.5", r"\frac{1}{2}"),
    (r"\frac12", r"\frac{1}{2}"),
    (r"\dfrac{2}{4}", "1/2"),
    (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    ("1e3", "1000"),
    (r"50\%", "50%"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\sqrt{2}/2", r"\frac{1}{\sqrt{2}}"),
    (r"2\pi", r"\pi \cdot 2"),
    ("x^2+2x+1", "(x+1)^2"),
    ("(x-1)(x+1)", "x^2-1"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    ("(1,2)", "(1, 2)"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    ("[0,1)", "[0, 1)"),
    (r"(-\infty, 2]", r"(-\infty,2]"),
    (r"90^\circ", "90"),
    (r"\text{east}", r"\text{east}"),
    (r"5\text{ cm}", "5"),
    ("x=4", "4"),
    (r"2^{10}", "1024"),
    (r"\log_{2} 8", "3"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("1+2i", "2i+1"),
    (r"10\,000", "10000"),
]
WRONG = [
    ("41", "42"),
    ("-42", "42"),
    ("4.2", "42"),
    (r"\frac{1}{3}", "0.33"),
    ("x+1", "x-1"),
    ("(2,1)", "(1,2)"),
    ("[0,1]", "[0,1)"),
    (r"\sqrt{3}", "3"),
    ("", "42"),
    ("42 or 43", "42"),
    (r"\infty", "1"),
    ("50", "0.5"),
    ("9" * 1001, "9"),
    (r"\frac{1}{0}", "0"),
    (r"\notalatexcommand{", "1"),
]


@pytest.mark.parametrize(("answer", "truth"), RIGHT)
def test_equivalent_answers_are_correct(answer: str, truth: str) -> None:
    assert math.verify_boxed(f"So it is $\\boxed{{{answer}}}$.", truth, {}).score == 1.0


@pytest.mark.parametrize(("answer", "truth"), WRONG)
def test_different_answers_are_wrong(answer: str, truth: str) -> None:
    assert math.verify_boxed(f"So it is $\\boxed{{{answer}}}$.", truth, {}).score == 0.0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed {5}", "5"),
        (r"\fbox{6}", "6"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\boxed{7}}", "7"),
        ("none", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_closed_box_is_read(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


def test_many_open_boxes_take_no_time_to_read() -> None:
    assert extract_boxed(r"\boxed{" * 20_000) is None


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The final answer is 42.", 1.0),
        ("Therefore, the final answer is $42$. I hope it is correct.", 1.0),
        (r"first \boxed{41}, no: \boxed{42}", 1.0),
        (r"it could be 42, but \boxed{41}", 0.0),
        ("I don't know.", 0.0),
        ("", 0.0),
        ("The answer is 41.", 0.0),
    ],
)
def test_the_answer_is_extracted_from_any_position(text: str, score: float) -> None:
    assert math.verify_anywhere(text, "42", {}).score == score


def test_the_answer_is_extracted_after_a_long_response() -> None:
    assert math.verify_anywhere("1 + 1 = 2. " * 5000 + "The final answer is 42.", "42", {}).score == 1.0


def test_without_a_box_a_boxed_answer_is_wrong() -> None:
    assert math.verify_boxed("The answer is 42.", "42", {}).score == 0.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("I think so.\nAnswer: 42", 1.0),
        ("Answer: 41\nAnswer: 42", 1.0),
        (r"Answer: $\boxed{42}$", 1.0),
        ("answer: 42", 1.0),
        ("Answer: 41", 0.0),
        ("42", 0.0),
        ("Answer: 42" + " and so on" * 40, 0.0),
    ],
)
def test_the_answer_line_is_verified(text: str, score: float) -> None:
    assert math.verify_answer_line(text, "42", {}).score == score


def test_geometry_weighs_value_and_form() -> None:
    assert math.verify_geometry3k(r"<think>hm</think>\boxed{4}", "4", {}).score == 1.0
    assert math.verify_geometry3k(r"\boxed{4}", "4", {}).score == pytest.approx(0.9)
    assert math.verify_geometry3k(r"<think>hm</think>\boxed{5}", "4", {}).score == pytest.approx(0.1)
    assert math.verify_geometry3k(r"\boxed{4}", "4", {}).reward_components["acc"] == 1.0


def test_each_of_several_truths_counts() -> None:
    assert math.verify_boxed(r"\boxed{3}", ["2", "3"], {}).score == 1.0
    assert math.verify_boxed(r"\boxed{3}", {"target": ["2", "4"]}, {}).score == 0.0


def test_a_truth_may_be_boxed_itself() -> None:
    assert math.verify_boxed(r"\boxed{3}", r"The answer is \boxed{3}", {}).score == 1.0


def test_a_row_without_truth_is_a_fault_of_the_row() -> None:
    for verify in (math.verify_boxed, math.verify_anywhere, math.verify_answer_line):
        for text in (r"\boxed{3}", "none", ""):
            for missing in (None, "", " $ $ ", []):
                with pytest.raises(ValueError, match="no ground truth"):
                    verify(text, missing, {})
            with pytest.raises(ValueError, match="has 2000 characters"):
                verify(text, "1+" * 1000, {})


def test_equal_numbers_are_one_class_of_majority_votes() -> None:
    votes = {
        math.verify_boxed(f"\\boxed{{{text}}}", "1", {}).extracted_answer
        for text in ("0.5", "1/2", r"\frac{2}{4}", "50%")
    }
    assert votes == {"1/2"}
