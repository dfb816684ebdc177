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


ANSWERS = {
    "B": [
        "The correct answer is: **B. Paris**",
        "Answer: \n\n**B**",
        "$\\boxed{B}$.",
        "\\boxed{\\text{B. Paris}}",
        "\\boxed{\\textbf{(B)}~Paris}",
        "\\boxed{\\textbf{(B)}\\ 12}",
        "The best choice would be B.",
        "answer: 'B'",
        'answer: "B"',
        '{"answer": "B"}',
        '{"answer": "B", "reason": "not A"}',
        "\\boxed{B}\n\nNote: A is wrong",
        "The answer is B (Paris)",
        "B (Paris)",
        "The answer is either A or B, but B is better. Final answer: B",
        "(a) Rome (b) Paris → answer (b)",
        "Correct answer: B\nIncorrect: A",
        "**Final Answer**\n\\boxed{B}",
        "Between A and B, I choose B.",
    ],
    "C": [
        "The answer is $\\textbf{(C)}$",
    ],
    "D": [
        "Therefore, the answer is \\(\\boxed{D}\\).",
        "ANSWER: [[D]]",
        "<answer>\n(D)\n</answer>",
        "<answer>D. Paris</answer>",
        "Answer is D",
        "Ans. D",
        "Answer – D",
        "Option D is correct",
        "Choice (D) is the right one",
        "I believe the correct answer is (D)",
        "Surely it's D",
        "D is correct because A, B are wrong",
        "A is incorrect. B is incorrect. C is incorrect. So D",
        "A is incorrect. B is incorrect. C is incorrect. So D.",
        "Answer: D)",
        "Answer : D",
        "Answer is: D",
        "The answer: D",
        "answer=D",
        "Answer→D",
        "Selected option: D",
        "My choice: D",
        "Option: D",
        "Letter: D",
        "The answer is definitely D.",
        "The answer is most likely D.",
        "The answer is probably (D)",
        "The answer is actually D",
        "The answer is indeed D",
        "The answer is (D), not (B)",
        "Let me think. A is odd.\n\nD.",
        "\\boxed{\\mathbf{D}}",
        "\\boxed{\\rm D}",
        "\\boxed{{D}}",
        "\\boxed{\\mathrm{(D)}}",
        "\\boxed{D\\ }",
        "\\[\\boxed{D}\\]",
        "The answer is D: it floats",
        "The answer must be D",
        "Hence the answer is D since B fails",
        "I would choose D",
        "I'd choose D",
        "I will go with D",
        "My final answer is D",
        "Final answer is D",
        "The right answer is D",
        "Correct: D",
        "The correct letter is D",
        "The solution is D",
        "> D",
        "- D",
        "Answer: <D>",
        "Answer: {D}",
        "The answer is “D”",
        "The answer is ‘D’.",
        "It is option D.",
        "D\n",
        "\nD",
        "Answer: D<|im_end|>",
        "D</s>",
        "The answer is D.<|eot_id|>",
        "answer is D\\)",
        "The answer is $D$",
        "\\boxed{\\text{The answer is D}}",
        "\\boxed{D.\\ Paris}",
        "\\boxed{(D)\\ 5}",
        "\\boxed{D:5}",
        "La respuesta es D",
        "Die Antwort ist D.",
        "La réponse est D",
        "Ответ: D",
        "答えはD",
        "正确答案是 D",
        "选 D",
        "故选D。",
        "因此，答案为D。",
        "The answer is D。",
        "Answer:D.",
        "D: Paris",
        "(D): Paris",
        "D → Paris",
        "The answer is D or rather (D)",
        "I think the answer is B. Wait, no. The answer is D.",
        "The answer is D\n\nA is wrong because the answer is not A",
    ],
    "A": [
        "So, the answer should be (A).",
        "Thus the final answer is option A: Rome",
    ],
}
"""Forms of answers by their letter."""


@pytest.mark.parametrize(("text", "letter"), [(text, letter) for letter, texts in ANSWERS.items() for text in texts])
def test_answers_are_read_in_all_forms(text: str, letter: str) -> None:
    assert choice.verify(text, letter, {}).score == 1.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("The correct answers are A and C", "A"),
        ("The correct answers are A and C", "C"),
        ("The answer is B, C", "B"),
        ("The answer is a 5", "A"),
        ("A or B", "B"),
        ("Answer: A, B, C or D", "D"),
        ("All of A, B, C, D", "D"),
        ("(A) (B) (C) (D)", "D"),
        ("A B C D", "D"),
        ("A\nB\nC\nD", "D"),
        ("I don't know. A?", "A"),
        ("It is not A.", "A"),
        ("Not A", "A"),
        ("The answer is neither A nor B", "B"),
        ("It can't be (D)", "D"),
        ("I'm", "I"),
        ("A", "B"),
        ("Option A is wrong", "A"),
        ("D is incorrect", "D"),
        ("(D) is wrong", "D"),
        ("The wrong answer is D", "D"),
        ("The answer is unclear", "U"),
        ("Everything but D", "D"),
        ("Anything except (D)", "D"),
        ("A good question", "A"),
        ("a", "B"),
        ("Answer: A/C", "C"),
        ("Answer: A & B", "A"),
        ("Answer: both A and B", "B"),
        ("If D were right", "D"),
        ("\\boxed{A}\\boxed{B}", "A"),
        ("Maybe A, maybe B", "B"),
        ("Answer: D?? No, C", "D"),
        ("I'd say A or D", "D"),
    ],
)
def test_letters_that_are_mentioned_denied_or_several_are_no_answer(text: str, truth: str) -> None:
    assert choice.verify(text, truth, {}).score == 0.0


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
        *((truth, {"choices": {"1": "x", "2": "y"}}, "B") for truth in ("2", 2, 2.0, "(2)", "y")),
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
        ("2", {"choices": {"text": ["x", "y"], "label": ["0", "2"]}}),
        ("3", {"choices": {"text": ["x", "y"], "label": ["1", "2"]}}),
        ("0", {"choices": {"text": ["x", "y"], "label": ["1", "2"]}}),
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


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("故选：B", "B"),
        ("因此选择 D。", "D"),
        ("选项B是正确的", "B"),
        ("B是正确答案", "B"),
        ("正确选项是D。", "D"),
        ("正确的选项是：\n\nB. 巴黎", "B"),
        ("【答案】D", "D"),
        ("答案应该是D", "D"),
        ("答案是B选项", "B"),
        ("正解はCです", "C"),
        ("정답은 B입니다", "B"),
        ("La respuesta correcta es la B.", "B"),
        ("La bonne réponse est la réponse C.", "C"),
        ("选项A错误，选项B正确", "B"),
        ("B是错误的，C是正确的", "C"),
        ("B不正确", None),
        ("B正确吗？", None),
        ("不正确的是D", None),
        ("答案不是B", None),
        ("答案是A或B", None),
        ("A和B都正确", None),
        ("## D", "D"),
        ("1. D", "D"),
        ("✅ B", "B"),
        ("The answer is **B** ✅", "B"),
        ("∴ B", "B"),
        ("B\\.", "B"),
        ("Conclusion: B", "B"),
        ("Conclusion: A is wrong", None),
        ("B seems right.", "B"),
        ("The answer is not A but B.", "B"),
    ],
)
def test_letters_are_read_in_other_languages_and_markup(text: str, letter: str | None) -> None:
    assert (choice.find_letter(text, Choices(), set()) or None) == letter


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("2", 1),
        (r"\boxed{2}", 1),
        ("Answer: (2) y", 1),
        ("y", 1),
        ("Step 1: 2.5 > 1. The answer is 2.", 1),
        ("Answer: 1", 0),
        ("Answer: 1 or 2", 0),
        ("9", 0),
        ("2.5", 0),
    ],
)
def test_numbers_that_label_choices_are_read_like_letters(text: str, score: int) -> None:
    extra = {"choices": {"text": ["x", "y", "7", "z"], "label": ["1", "2", "3", "4"]}}
    result = choice.verify(text, "2", extra)
    assert (result.score, result.extracted_answer) == (score, "2" if score else result.extracted_answer)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The capital of France is Paris.", "B"),
        ("It is Paris", "B"),
        ("It is not Paris.", None),
        ("If it is Paris", None),
        ("The city of Paris", None),
        ("It is Rome or Paris", None),
    ],
)
def test_a_sentence_that_ends_with_the_text_of_a_choice_names_it(text: str, letter: str | None) -> None:
    assert choice.find_letter(text, Choices.of_row(CITIES), set()) == letter
