"""Choices of a question by letter, and the letter of its ground truth."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, Final

from quintet.rewards.score import GroundTruthError, accepted_answers

DEFAULT_LETTERS: Final = ascii_uppercase[:10]
"""Letters that an answer may have if the choices are unknown: MMLU-Pro has ten."""
COLUMNS: Final = ("choices", "options")
VALID_LETTER: Final = "write a letter, such as B or (B)"
VALID: Final = f"{VALID_LETTER}, or with `choices` in extra_info a choice's text or its number from 0"

_MARKUP = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textrm|textit|mathrm|mathbf|mathsf|operatorname|left|right|displaystyle|rm|bf)(?![a-z])"
    r"|\\[()\[\].,;:! ]|[$*`{}~]|__|</?(?:b|i|u|em|strong|p|br|span|mark)\s*/?>|<\|\w{1,20}\|>|</s>|<pad>"
)
_EAST_ASIAN = r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
_BESIDE_EAST_ASIAN = re.compile(rf"(?<=[A-Za-z])(?={_EAST_ASIAN})|(?<={_EAST_ASIAN})(?=[A-Za-z])")
"""Bounds of a letter in a text that separates no words by spaces."""
_LABEL_NUMBER = re.compile(r"(?<![\w.,])[1-9](?!\w|[.,]\d)")
_TRUTH = re.compile(
    r"(?:(?:answer|option|choice)\W*)?[(\[]?\s*([A-Za-z])\s*(?:[)\].:,]+|$|\s-\s)\s*(.*)", re.DOTALL | re.I
)
_LABEL = re.compile(r"\s*[(\[]?([A-Za-z])[)\].:]\s*(\S.*)", re.DOTALL)


def plain_text(text: str) -> str:
    r"""Return a text without the markup of Markdown, LaTeX and HTML that may surround a letter, in Unicode's
    compatibility form.

    >>> plain_text(r"**$\text{(Ｂ)}$**")
    '(B)'
    """
    plain = _MARKUP.sub("", unicodedata.normalize("NFKC", text))
    return _BESIDE_EAST_ASIAN.sub(" ", plain).strip()


def letters_for_numbers(text: str) -> str:
    """Return a text with A to I for the numbers 1 to 9, as labels of choices are read.

    >>> letters_for_numbers("(2) 1.5 m")
    '(B) 1.5 m'
    """
    return _LABEL_NUMBER.sub(lambda match: ascii_uppercase[int(match[0]) - 1], text)


def comparable(text: str) -> str:
    """Return a choice's text without markup, case, spacing and final period."""
    return " ".join(plain_text(text).split()).casefold().rstrip(".").rstrip()


@dataclass(frozen=True, slots=True)
class Choices:
    """Texts of the choices by letter; empty if the row does not name them."""

    texts: Mapping[str, str] = field(default_factory=dict)
    has_numbers: bool = False
    """Whether the labels are 1 to 9, as in some rows of ARC. They are read as A to I, in texts and responses, too."""

    @classmethod
    def of_row(cls, extra: Mapping[str, Any]) -> Choices:
        """Read `choices`, or else `options`: a list of texts, texts by letter, or lists of `text` and `label`.

        Raises:
            GroundTruthError: a label is neither a letter nor one of 1 to 9.
        """
        value = next((extra[name] for name in COLUMNS if extra.get(name) is not None), None)
        if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
            try:
                value = json.loads(value)
            except ValueError:
                return cls()
        texts, has_numbers = _texts(value), any(map(_is_number, _labels(value)))
        if has_numbers:
            # a text that is a number would be read as a label
            texts = {letter: "" if _is_number(text) else letters_for_numbers(text) for letter, text in texts.items()}
        return cls(texts, has_numbers)

    def read_numbers(self, text: str) -> str:
        """Return a text with letters for numbers if the labels are numbers."""
        return letters_for_numbers(text) if self.has_numbers else text

    def label_of(self, letter: str) -> str:
        """Return the label of a choice: the letter, or its number."""
        return str(ascii_uppercase.index(letter) + 1) if self.has_numbers else letter

    def letter_of(self, answer: str) -> str | None:
        """Return the letter of the only choice whose text is the answer."""
        normalized = comparable(answer)
        letters = [letter for letter, text in self.texts.items() if comparable(text) == normalized]
        return letters[0] if normalized and len(letters) == 1 else None


def _texts(value: Any) -> Mapping[str, str]:
    if isinstance(value, Mapping) and isinstance(value.get("text"), Sequence) and not isinstance(value["text"], str):
        labels = value.get("label") or ascii_uppercase
        return {_letter(label): str(text) for label, text in zip(labels, value["text"], strict=False)}
    if isinstance(value, Mapping):
        return {_letter(label): str(text) for label, text in value.items() if text is not None}
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > len(ascii_uppercase):
        return {}
    if value and all(isinstance(choice, Mapping) and "text" in choice for choice in value):
        pairs = zip(ascii_uppercase, value, strict=False)
        return {_letter(choice.get("label", letter)): str(choice["text"]) for letter, choice in pairs}
    labeled = [_LABEL.fullmatch(str(choice)) for choice in value]
    if all(match and match[1].upper() == letter for match, letter in zip(labeled, ascii_uppercase, strict=False)):
        return {match[1].upper(): match[2] for match in labeled if match}
    return dict(zip(ascii_uppercase, map(str, value), strict=False))


def _labels(value: Any) -> list[object]:
    """Return the labels of choices that name them."""
    if isinstance(value, Mapping):
        return list(value) if isinstance(value.get("text"), str | None) else list(value.get("label") or ())
    choices = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    return [choice["label"] for choice in choices if isinstance(choice, Mapping) and "label" in choice]


def _is_number(label: object) -> bool:
    return re.fullmatch(r"[1-9]", str(label).strip("() .")) is not None


def _letter(label: object) -> str:
    letter = str(label).strip("() .").upper()
    if _is_number(label):
        return ascii_uppercase[int(letter) - 1]
    if len(letter) != 1 or letter not in ascii_uppercase:
        raise GroundTruthError(
            f"the choice {label!r:.40} has no letter as its label", "label choices by letters from A, or numbers from 1"
        )
    return letter


def true_letters(ground_truth: Any, choices: Choices, valid: str = VALID) -> set[str]:
    """Return the letters that are right; `valid` says in errors what a ground truth may be.

    Raises:
        GroundTruthError: the ground truth names no choice, or not for certain.
    """
    return {_true_letter(answer, choices, valid) for answer in accepted_answers(ground_truth)}


def _true_letter(truth: str, choices: Choices, valid: str) -> str:
    if choices.has_numbers:
        truth = letters_for_numbers(truth.removesuffix(".0"))
    text = plain_text(truth)
    match = _TRUTH.fullmatch(text)
    by_text = choices.letter_of(truth)
    if match is None:
        letter = by_text or _indexed_letter(text, choices)
        if letter is None:
            raise GroundTruthError(f"{truth!r:.80} is not the letter of a choice", valid)
        return letter
    letter, rest = match[1].upper(), match[2]
    if choices.texts and letter not in choices.texts:
        if by_text is not None:
            return by_text
        raise GroundTruthError(f"{truth!r:.80} is none of the {len(choices.texts)} choices", valid)
    named = by_text or (choices.letter_of(rest) if rest else None)
    if (named not in (None, letter)) or (rest and named is None and choices.texts) or _begins_with_letter(rest):
        raise GroundTruthError(f"{truth!r:.80} may be several choices: its letter and its text disagree", valid)
    return letter


def _begins_with_letter(rest: str) -> bool:
    """Return whether the text after a letter is more letters, as in `A, C` or `B. or D`."""
    return re.match(r"(?:(?:and|or)\b|[&/])|[(\[]?[A-Za-z][)\]]?(?:[\s,.&/]*$|\s*,)", rest) is not None


def _indexed_letter(text: str, choices: Choices) -> str | None:
    """Return the letter of a choice by its number from 0, as in MMLU."""
    if choices.has_numbers or re.fullmatch(r"\d{1,2}(?:\.0)?", text) is None:
        return None
    index = int(float(text))
    return ascii_uppercase[index] if index < len(choices.texts) else None
