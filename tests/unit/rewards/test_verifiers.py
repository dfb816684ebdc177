"""If these fail, answers in numbers, letters, words and expressions are judged wrongly."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.rewards.answer_extraction import extract_stated, extract_tagged
from quintet.rewards.format_check import has_format
from quintet.rewards.numbers import parse_number
from quintet.rewards.verifiers import choice, countdown, gsm8k, numeric, text_match
from quintet.rewards.verifiers.registry import VERIFIERS


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("so #### 72", "72", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### -5", "-5", 1.0),
        ("#### 72", "She has 72.\n#### 72", 1.0),
        ("#### 72\n#### 73", "72", 0.0),
        ("#### 73\n#### 72", "72", 1.0),  # the last counts
        ("#### 72\n#### seventy-three", "72", 1.0),
        ("#### 72" + " " * 293, "72", 1.0),  # 300 characters
        ("#### 72" + " " * 294, "72", 0.0),  # the first one is not read
        ("#### 72" + " " * 300 + "#### 73", "73", 1.0),
        ("x" * 10000 + "#### 72", "72", 1.0),
        ("#### 72.", "72", 1.0),  # by value; verl compares text
        ("####72", "72", 0.0),
        ("72", "72", 0.0),
        ("#### seventy", "72", 0.0),
    ],
)
def test_gsm8k_verifies_the_number_after_the_hashes(text: str, truth: str, score: float) -> None:
    assert gsm8k.verify_strict(text, truth, {}).score == score


@pytest.mark.parametrize(
    ("text", "score"),
    [("it is 72", 1.0), ("72 apples.", 1.0), ("$72.", 1.0), ("72 or 73", 0.0), ("1,072", 0.0), ("none", 0.0)],
)
def test_flexible_gsm8k_reads_the_last_number(text: str, score: float) -> None:
    assert gsm8k.verify_flexible(text, "72", {}).score == score


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        ("<answer> B. because </answer>", "B"),
        ("The answer is (B).", "B"),
        ("Answer: **B**", "B"),
        ("answer is option B", "B"),
        ("A is tempting, but the answer is C", "C"),
        ("I take (D)", "D"),
        ("Nobody knows", None),
        ("A man walks", None),
    ],
)
def test_a_choice_is_read(text: str, letter: str | None) -> None:
    assert choice.verify(text, "B", {}).extracted_answer == letter
    assert choice.verify(text, "(B)", {}).score == float(letter == "B")


def test_the_text_of_a_choice_is_accepted_if_known() -> None:
    row = {"choices": ["Rome", "Paris", "Bonn"]}
    assert choice.verify("<answer>paris</answer>", "B", row).score == 1.0
    assert choice.verify("<answer>bonn</answer>", "B", row).score == 0.0
    assert choice.verify("<answer>paris</answer>", "B", {}).score == 0.0


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("<answer> New  York </answer>", "new york", 1.0),
        (r"\boxed{yes}", "Yes", 1.0),
        ("yes", ["no", "yes"], 1.0),
        ("yes", '["no", "yes"]', 1.0),
        ("yes", '{"target": ["no", "yes"]}', 1.0),
        ("[1, 2]", "[1, 2]", 1.0),
        ("{1}", "{1}", 1.0),
        ("The yes", "yes", 0.0),
        ("-5", "5", 0.0),
    ],
)
def test_exact_match_compares_the_text(text: str, truth: object, score: float) -> None:
    assert text_match.verify_exact(text, truth, {}).score == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<answer>The Beatles!</answer>", 1.0),
        ("<answer>Stones</answer><answer>beatles</answer>", 1.0),
        ("<answer>beatles band</answer>", 0.0),
        ("Beatles", 0.0),
        ("<answer>beatles</answer>" * 11, 0.25),
    ],
)
def test_search_answers_are_compared_as_in_squad(text: str, score: float) -> None:
    assert text_match.verify_tagged(text, {"target": ["Beatles", "Fab Four"]}, {}).score == score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("<answer>(B)</answer>", "B", 1.0),
        ("<answer>12.50</answer>", "12.5", 1.0),
        ("<answer>The red car</answer>", "red car", 1.0),
        ("<answer>C</answer>", "B", 0.0),
        ("<answer>12.5</answer>", "12.6", 0.0),
    ],
)
def test_answers_on_pictures_may_be_letters_numbers_or_words(text: str, truth: str, score: float) -> None:
    assert text_match.verify_visual(text, truth, {}).score == score


@pytest.mark.parametrize(
    ("text", "truth", "extra", "score"),
    [
        ("57", "57", {}, 1.0),
        ("<answer> 57 </answer>", "57", {}, 1.0),
        ("34 + 23 = 57", 57, {}, 1.0),
        ("57.0", "57", {}, 1.0),
        ("57.001", "57", {}, 0.0),
        ("57.001", "57", {"absolute_tolerance": 0.01}, 1.0),
        ("102", "100", {"relative_tolerance": 0.02}, 1.0),
        ("103", "100", {"relative_tolerance": 0.02}, 0.0),
        ("1/3", "0.3333", {"absolute_tolerance": "1e-3"}, 1.0),
        ("10000000000000001", "10000000000000000", {}, 0.0),
        ("nan", "57", {}, 0.0),
        ("inf", "57", {}, 0.0),
        ("1e999999999", "57", {}, 0.0),
        ("", "57", {}, 0.0),
    ],
)
def test_numbers_are_compared(text: str, truth: object, extra: dict, score: float) -> None:
    assert numeric.verify(text, truth, extra).score == score


def test_a_truth_or_tolerance_that_is_no_number_is_a_fault_of_the_row() -> None:
    with pytest.raises(ValueError, match="not a number"):
        numeric.verify("5", "five", {})
    with pytest.raises(ValueError, match="tolerance"):
        numeric.verify("5", "5", {"absolute_tolerance": "much"})


ROW = {"target": 24, "numbers": [3, 5, 2, 4]}


@pytest.mark.parametrize(
    ("text", "score", "used"),
    [
        ("<answer> (3 + 5) * (4 - 2) + 8 </answer>", 0.0, 0.0),
        ("<answer>3*(5*2-4)</answer>", 0.0, 1.0),
        ("<answer>(5 + 3) * (2 + 4) / 2</answer>", 0.0, 0.0),  # 2 is there once
        ("<answer>4 * (3 + 5 - 2)</answer>", 1.0, 1.0),
        ("<answer>4 * (3 + 5 - 2) = 24</answer>", 1.0, 1.0),
        ("<answer>4 × (3 + 5 − 2)</answer>", 1.0, 1.0),
        (r"\boxed{4 \times \left(3 + 5 - 2\right)}", 1.0, 1.0),
        ("<answer>24</answer>", 0.0, 0.0),
        ("<answer>4 * (3 + 5 - 2</answer>", 0.0, 0.0),
        ("<answer>4 * (3 + 5 - 2) + 0 / (3 - 3)</answer>", 0.0, 0.0),
        ("<answer>__import__('os').getpid()</answer>", 0.0, 0.0),
        ("<answer>4**9**9</answer>", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_countdown(text: str, score: float, used: float) -> None:
    judged = countdown.verify(text, ROW, {})
    assert (judged.score, judged.reward_components["numbers"]) == (score, used)


def test_countdown_works_with_exact_fractions() -> None:
    assert countdown.verify("8 / (3 - 8 / 3)", {"target": 24, "nums": [8, 3, 8, 3]}, {}).score == 1.0


def test_countdown_finds_the_numbers_in_the_row() -> None:
    assert countdown.verify("3 * 4", 12, {"numbers": [3, 4]}).score == 1.0
    assert countdown.verify("3 * 4 = 12.0", "12.0", {"numbers": ["3", 4.0]}).score == 1.0
    with pytest.raises(ValueError, match="lacks target or numbers"):
        countdown.verify("3 * 4", 12, {})
    with pytest.raises(ValueError, match="not a number"):
        countdown.verify("3 * 4", "a dozen", {"numbers": [3, 4]})


@pytest.mark.parametrize("text", ["(" * 200 + "1" + ")" * 200, "1+" * 150 + "1", "9" * 13, "1 2", "+", "1 /", "()"])
def test_countdown_rejects_invalid_and_too_long_expressions(text: str) -> None:
    with pytest.raises(countdown.ExpressionError):
        countdown.evaluate(text)


@given(st.lists(st.tuples(st.integers(1, 99), st.sampled_from("+-*/")), min_size=1, max_size=8), st.booleans())
def test_countdown_computes_as_python_does(terms: list[tuple[int, str]], spaced: bool) -> None:
    words = list(itertools.chain.from_iterable((str(value), sign) for value, sign in terms))[:-1]
    value, used = countdown.evaluate((" " if spaced else "").join(words))
    assert value == eval("".join(f"Fraction({word})" if word.isdigit() else word for word in words))
    assert used == [value for value, _ in terms]


@given(st.text(max_size=400))
def test_no_response_raises_in_a_verifier(text: str) -> None:
    for judge in (
        gsm8k.verify_strict,
        gsm8k.verify_flexible,
        text_match.verify_exact,
        text_match.verify_tagged,
        numeric.verify,
    ):
        assert 0.0 <= judge(text, "5", {}).score <= 1.0
    assert countdown.verify(text, ROW, {}).score in (0.0, 1.0)
    assert choice.verify(text, "E", {}).score in (0.0, 1.0)


@given(st.fractions(max_denominator=10**6))
def test_fractions_are_read_as_they_are_written(value: Fraction) -> None:
    assert parse_number(str(value)) == value


def test_reading() -> None:
    assert parse_number(r"\frac{3}{4}") == Fraction(3, 4)
    assert extract_tagged("<answer>1</answer><answer>2</answer> <answer>3") == "2"
    assert extract_stated("The answer is: 4.\nThe answer is **5**.") == "5"


@pytest.mark.parametrize(
    ("form", "text", "has"),
    [
        ("think_answer", "<think>a</think>\n<answer>b</answer>", True),
        ("think_answer", " <think></think><answer>b</answer>\n", True),
        ("think_answer", "<answer>b</answer><think>a</think>", False),
        ("think_answer", "<think>a</think><answer>b</answer> and more", False),
        ("think_answer", "<think>a</think><think>a</think><answer>b</answer>", False),
        ("think_answer", "<think>write <answer></answer></think><answer>b</answer>", True),
        ("think_answer", "<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("think_answer", "<think>a <answer>b</answer></think>", False),
        ("think_answer", "<think>a<answer>b</answer>", False),
        ("think_answer", "so <think>a</think><answer>b</answer>", False),
        ("answer_tag", "<think>write <answer></answer></think><answer>b</answer>", True),
        ("answer_tag", "<think><answer>b</answer></think>", False),
        ("boxed", r"<think>\boxed{1}</think> so 1", False),
        ("answer_tag", "so <answer>b</answer>!", True),
        ("answer_tag", "</answer>b<answer>", False),
        ("answer_tag", "<answer>a</answer><answer>b</answer>", False),
        ("boxed", r"so \boxed{1}", True),
        ("boxed", r"so \boxed{1", False),
        ("boxed", r"so \boxed{}", False),
    ],
)
def test_forms(form: str, text: str, has: bool) -> None:
    assert has_format(form, text) is has


def test_every_verifier_can_be_loaded() -> None:
    names = {entry.name for entry in VERIFIERS}
    assert {"math", "gsm8k", "code", "countdown", "choice", "exact", "numeric", "reasoning_gym", "searchr1"} <= names
    for entry in VERIFIERS:
        assert callable(entry.load()), entry.name
        assert entry.help
