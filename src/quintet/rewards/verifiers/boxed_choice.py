r"""Letter of a multiple choice in `\boxed{}`, scored as by ROLL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.rewards.score import Score, binary_score
from quintet.rewards.verifiers.choice_texts import VALID_LETTER, Choices, true_letters
from quintet.rewards.verifiers.options import CrossThinkQaOptions
from quintet.rewards.verifiers.roll_text import remove_special_tokens, repetition_penalty, text_after_thinking

BOX = re.compile(r"\\boxed\{([^}]+)\}")
STATED = "answer is"
MAX_REPETITION_PENALTY = -0.5
MAX_LENGTH_PENALTY = -0.5
LENGTHS = (100, 400)
"""Tokens up to which the length penalty is full, and from which it is 0."""
RULES: Mapping[str, Mapping[tuple[bool, bool], float]] = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
}
"""Reward by whether the letter is right and boxed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Answer of a response, its first capital letter, and whether it was boxed."""

    letter: str | None
    boxed: bool


def verify_crossthinkqa(text: str, ground_truth: Any, extra: Mapping[str, Any], options: CrossThinkQaOptions) -> Score:
    """Return the reward of ROLL's CrossThinkQA rule: the reward of the letter minus penalties of repetition and
    length.

    Raises:
        GroundTruthError: the ground truth is not one letter.
    """
    text = remove_special_tokens(text)
    true, choice = true_letters(ground_truth, Choices(), VALID_LETTER), read_choice(text_after_thinking(text))
    correct = choice.letter in true
    rule = RULES[options.reward_type][correct, choice.boxed]
    repetition = repetition_penalty(text, MAX_REPETITION_PENALTY)
    components = {"acc": float(rule > 0), "boxed": float(choice.boxed), "rule": rule, "repetition": repetition}
    return Score(rule + repetition + _length_reward(options), choice.letter, components)


def verify_boxed(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Score 1 for the right letter in a box.

    Raises:
        GroundTruthError: the ground truth is not one letter.
    """
    true = true_letters(ground_truth, Choices(), VALID_LETTER)
    choice = read_choice(text_after_thinking(remove_special_tokens(text)))
    correct = choice.boxed and choice.letter in true
    return binary_score(correct, choice.letter)


def read_choice(text: str) -> Choice:
    """Return the first capital letter of the last box, or else of what follows the last "answer is", or of the text."""
    boxes = BOX.findall(text)
    if boxes:
        return Choice(_first_capital(boxes[-1]), boxed=True)
    start = text.lower().rfind(STATED)
    return Choice(_first_capital(text[start + len(STATED) :] if start >= 0 else text), boxed=False)


def _first_capital(text: str) -> str | None:
    return next((sign for sign in text if sign.isupper()), None)


def _length_reward(options: CrossThinkQaOptions) -> float:
    if options.padded_length is None:
        return 0.0
    low, high = LENGTHS
    missing = min(max(high - options.padded_length, 0) / (high - low), 1.0)
    return options.length_coefficient * MAX_LENGTH_PENALTY * missing
