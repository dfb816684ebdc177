"""Multiple choice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quintet.rewards.answer_extraction import extract_answer
from quintet.rewards.score import WRONG, Score, accepted_answers, binary_score

ALONE = re.compile(r"[\s$*(\[{]*(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?[\s(]*([A-Za-z])[\s)\]}$*.:]*")
LEADING = re.compile(r"[\s$*(\[]*(?:option|choice)?[\s$*(\[]*([A-Z])\s*(?:[).:\]]|$)", re.IGNORECASE)
CHOSEN = re.compile(r"\b(?:option|choice)\s*\(?([A-Z])\b", re.IGNORECASE)
BRACKETED = re.compile(r"\(([A-Z])\)")


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the letter of the extracted answer; with `extra["choices"]`, the text of a choice counts, too."""
    letter, choices = find_letter(extract_answer(text)), extra.get("choices")
    if letter is None and isinstance(choices, Sequence) and not isinstance(choices, str):
        letter = _letter_of_choice(extract_answer(text), choices)
    if letter is None:
        return Score(WRONG)
    return binary_score(any(letter == parse_letter(answer) for answer in accepted_answers(ground_truth)), letter)


def parse_letter(text: str) -> str | None:
    r"""Return the letter of `b`, `(B)`, `B.` or `\text{B}`; None if there is further text."""
    match = ALONE.fullmatch(text)
    return match[1].upper() if match else None


def find_letter(text: str) -> str | None:
    """Return the letter that a short answer begins with or mentions: `B`, `(B) 12`, `option B`, `I take (B)`."""
    if (only_letter := parse_letter(text)) is not None:
        return only_letter
    if (leading := LEADING.match(text)) is not None:
        return leading[1].upper()
    letters = CHOSEN.findall(text) or BRACKETED.findall(text)
    return letters[-1].upper() if letters else None


def _letter_of_choice(answer: str, choices: Sequence[Any]) -> str | None:
    """Return the letter of the choice whose text is the answer."""
    normalized = " ".join(answer.split()).casefold()
    matching = [index for index, choice in enumerate(choices) if " ".join(str(choice).split()).casefold() == normalized]
    return chr(ord("A") + matching[0]) if len(matching) == 1 else None
