"""Text answers: the same text, or the same words, compared as in the evaluation of SQuAD."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping
from typing import Any

from quintet.rewards.answer_extraction import extract_answer, extract_tagged
from quintet.rewards.numbers import number_text, parse_number, parse_quantity, same_number
from quintet.rewards.score import WRONG, GroundTruthError, Score, accepted_answers, binary_score
from quintet.rewards.thoughts import text_after_thoughts
from quintet.rewards.verifiers import choice
from quintet.rewards.verifiers.choice_texts import Choices, plain_text

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
IN_NUMBER = re.compile(r"(?<=\d)\.(?=\d)|(?<![\w.])-(?=\.?\d)")
"""Decimal point and sign, which are no punctuation."""
YES_NO = re.compile(r"\W*(yes|no)\b(?!\s+(?:and|or|but)\b|\s*/)", re.IGNORECASE)
MAX_TAGS = 10
"""With more answer tags, a correct answer scores 0.25 because it may be a guess, as in Search-R1."""


def verify_exact(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the extracted answer, ignoring case, spacing and a final period.

    Raises:
        GroundTruthError: there is no ground truth.
    """
    accepted = [comparable(correct) for correct in accepted_answers(ground_truth)]
    answer = " ".join(extract_answer(text_after_thoughts(text)).split())
    return binary_score(bool(answer) and comparable(answer) in accepted, answer)


def comparable(text: str) -> str:
    """Return a text without case, spacing and final period, in Unicode's composed form."""
    folded = " ".join(unicodedata.normalize("NFC", text).split()).casefold()
    return folded.removesuffix(".") or folded


def verify_tagged(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the words of the last `<answer>` after thoughts (Jin et al. 2025, Search-R1).

    Raises:
        GroundTruthError: there is no ground truth.
    """
    accepted = accepted_answers(ground_truth)
    answer = extract_tagged(text_after_thoughts(text))
    if answer is None or not any(same_words(answer, correct) for correct in accepted):
        return Score(WRONG, answer)
    guesses = max(text.count("<answer>"), text.count("</answer>"))
    return Score(0.25 if guesses > MAX_TAGS else 1.0, answer)


def same_words(answer: str, ground_truth: str) -> bool:
    """Return whether two answers agree except for case, punctuation and articles (Rajpurkar et al. 2016, SQuAD).

    Unlike there, decimal points and signs count, and a text of articles or punctuation only is compared as it is.
    """
    value, correct = parse_number(answer), parse_number(ground_truth)
    if value is not None and correct is not None:
        return value == correct
    expected = words(ground_truth)
    return words(answer) == expected if expected else comparable(answer) == comparable(ground_truth)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles.

    >>> words("The Beatles' 3.5 songs!")
    ['beatles', '3.5', 'songs']
    """
    folded = unicodedata.normalize("NFC", text).replace("−", "-").casefold()
    kept = {match.start() for match in IN_NUMBER.finditer(folded)}
    letters = (sign for at, sign in enumerate(folded) if at in kept or not _is_punctuation(sign))
    return ARTICLES.sub(" ", "".join(letters)).split()


def _is_punctuation(sign: str) -> bool:
    return sign in string.punctuation or unicodedata.category(sign).startswith("P")


def verify_visual(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the letter, yes or no, the number, or the words of the extracted answer, depending on the ground truth.

    Raises:
        GroundTruthError: there is no ground truth.
    """
    accepted = accepted_answers(ground_truth)
    final = text_after_thoughts(text)
    letters = {plain_text(correct).strip("().").upper() for correct in accepted if _is_letter(correct)}
    letter = choice.find_letter(final, _choices(extra), letters) if letters else None
    answer = extract_answer(final)
    correct = letter in letters or any(_agree(answer, other) for other in accepted if not _is_letter(other))
    number = parse_quantity(answer)
    return binary_score(correct, letter or (answer if number is None else number_text(number.value, answer)))


def _is_letter(ground_truth: str) -> bool:
    return re.fullmatch(r"[(\[]?[A-Za-z][)\]]?\.?", plain_text(ground_truth)) is not None


def _choices(extra: Mapping[str, Any]) -> Choices:
    try:
        return Choices.of_row(extra)
    except GroundTruthError:
        # only their number is of use here
        return Choices()


def _agree(answer: str, ground_truth: str) -> bool:
    if ground_truth.strip(" .").lower() in ("yes", "no"):
        match = YES_NO.match(answer)
        return match is not None and match[1].lower() == ground_truth.strip(" .").lower()
    value, correct = parse_quantity(answer), parse_quantity(ground_truth)
    if value is not None and correct is not None:
        return same_number(value, correct)
    return same_words(answer, ground_truth)
