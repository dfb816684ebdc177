"""Multiple choice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quintet.rewards.reading import answered
from quintet.rewards.score import WRONG, Score, right, truths

__all__ = ["judge", "letter_alone", "letter_of"]

ALONE = re.compile(r"[\s$*(\[{]*(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?[\s(]*([A-Za-z])[\s)\]}$*.:]*")
LEADING = re.compile(r"[\s$*(\[]*(?:option|choice)?[\s$*(\[]*([A-Z])\s*(?:[).:\]]|$)", re.IGNORECASE)
CHOSEN = re.compile(r"\b(?:option|choice)\s*\(?([A-Z])\b", re.IGNORECASE)
BRACKETED = re.compile(r"\(([A-Z])\)")


def judge(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    """The letter of the answer, wherever it stands; `extra["choices"]`, where given, lets its words count too."""
    found, choices = letter_of(answered(text)), extra.get("choices")
    if found is None and isinstance(choices, Sequence) and not isinstance(choices, str):
        found = _lettered(answered(text), choices)
    if found is None:
        return Score(WRONG)
    return right(any(found == letter_alone(one) for one in truths(truth)), found)


def letter_alone(text: str) -> str | None:
    r"""The letter of `b`, `(B)`, `B.` or `\text{B}`; None where there is more than that."""
    found = ALONE.fullmatch(text)
    return found[1].upper() if found else None


def letter_of(text: str) -> str | None:
    """The letter that a short answer begins with or names: `B`, `(B) 12`, `option B`, `I take (B)`."""
    if (alone := letter_alone(text)) is not None:
        return alone
    if (leading := LEADING.match(text)) is not None:
        return leading[1].upper()
    found = CHOSEN.findall(text) or BRACKETED.findall(text)
    return found[-1].upper() if found else None


def _lettered(answer: str, choices: Sequence[Any]) -> str | None:
    """The letter of the choice whose words the answer gives."""
    words = " ".join(answer.split()).casefold()
    matching = [place for place, choice in enumerate(choices) if " ".join(str(choice).split()).casefold() == words]
    return chr(ord("A") + matching[0]) if len(matching) == 1 else None
