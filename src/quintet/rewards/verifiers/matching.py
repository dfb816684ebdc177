"""Answers in words: the same text, or the same words as SQuAD's evaluation compares them."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from quintet.rewards.reading import answered, number, plain, tagged
from quintet.rewards.score import WRONG, Score, right, truths
from quintet.rewards.verifiers import choice

__all__ = ["exact", "same_words", "tagged_words", "visual"]

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
MOST_TAGS = 10
"""Answer tags beyond which a right answer counts a quarter, as Search-R1 has it: they guess."""


def exact(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    """The same text, case and spacing aside, wherever the answer stands."""
    found = " ".join(answered(text).split())
    return right(any(found.casefold() == " ".join(one.split()).casefold() for one in truths(truth)), found)


def tagged_words(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    """The same words in the last `<answer>` (Jin et al. 2025, Search-R1)."""
    found = tagged(text)
    if found is None or not any(same_words(found, one) for one in truths(truth)):
        return Score(WRONG, found)
    guesses = max(text.count("<answer>"), text.count("</answer>"))
    return Score(0.25 if guesses > MOST_TAGS else 1.0, found)


def same_words(answer: str, truth: str) -> bool:
    """Whether two answers agree but for case, punctuation and articles (Rajpurkar et al. 2016, SQuAD)."""
    return _words(answer) == _words(truth)


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


def visual(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    """The same letter, the same number, or the same words, wherever the answer stands."""
    found = answered(text)
    return right(any(_alike(found, one) for one in truths(truth)), found)


def _alike(answer: str, truth: str) -> bool:
    if choice.letter_alone(truth):
        return choice.letter_of(answer) == choice.letter_alone(truth)
    value, wanted = number(plain(answer)), number(plain(truth))
    if value is not None and wanted is not None:
        return value == wanted
    return same_words(answer, truth)
