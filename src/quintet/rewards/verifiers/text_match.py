"""Text answers: the same text, or the same words, compared as in the evaluation of SQuAD."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from quintet.rewards.answer_extraction import extract_answer, extract_tagged
from quintet.rewards.numbers import number_text, parse_quantity, same_number
from quintet.rewards.score import WRONG, Score, accepted_answers, binary_score
from quintet.rewards.verifiers import choice

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
MAX_TAGS = 10
"""With more answer tags, a correct answer scores 0.25 because it may be a guess, as in Search-R1."""


def verify_exact(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the extracted answer, ignoring case and spacing."""
    answer = " ".join(extract_answer(text).split())
    return binary_score(
        any(answer.casefold() == " ".join(correct.split()).casefold() for correct in accepted_answers(ground_truth)),
        answer,
    )


def verify_tagged(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the words of the last `<answer>` (Jin et al. 2025, Search-R1)."""
    answer = extract_tagged(text)
    if answer is None or not any(same_words(answer, correct) for correct in accepted_answers(ground_truth)):
        return Score(WRONG, answer)
    guesses = max(text.count("<answer>"), text.count("</answer>"))
    return Score(0.25 if guesses > MAX_TAGS else 1.0, answer)


def same_words(answer: str, ground_truth: str) -> bool:
    """Return whether two answers agree except for case, punctuation and articles (Rajpurkar et al. 2016, SQuAD)."""
    return words(answer) == words(ground_truth)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles."""
    return ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


def verify_visual(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the letter, the number, or the words of the extracted answer, depending on the ground truth."""
    answer = extract_answer(text)
    number = parse_quantity(answer)
    predicted = answer if number is None else number_text(number.value, answer)
    return binary_score(any(_agree(answer, correct) for correct in accepted_answers(ground_truth)), predicted)


def _agree(answer: str, ground_truth: str) -> bool:
    if choice.parse_letter(ground_truth):
        return choice.find_letter(answer) == choice.parse_letter(ground_truth)
    value, correct = parse_quantity(answer), parse_quantity(ground_truth)
    if value is not None and correct is not None:
        return same_number(value, correct)
    return same_words(answer, ground_truth)
