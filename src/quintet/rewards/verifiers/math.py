"""Math answers compared by value: exactly, or by `math-verify` what is outside of the grammar of answers."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from quintet.package_files import read_yaml
from quintet.rewards.answer_extraction import extract_boxed, extract_stated, strip_formatting
from quintet.rewards.format_check import has_format
from quintet.rewards.math_answers import math_verify_check
from quintet.rewards.math_answers.comparison import compare, is_parsed, parsed_value
from quintet.rewards.number_mentions import read_answer, read_last, without_trailing_remark
from quintet.rewards.numbers import TEXT, number_text, parse_quantity, same_number
from quintet.rewards.score import WRONG, GroundTruthError, Score, accepted_answers, binary_score
from quintet.rewards.thoughts import final_text

MAX_SEARCHED_CHARS = 2000
"""Characters at the end of a text without a box that are searched for an answer."""
MAX_ANSWER_CHARS = 1000
"""Longer answers are wrong."""
EXAMPLES = read_yaml(__file__, "math_examples.yaml")
"""Pairs that make math-verify and sympy load and cache what they need."""
FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
HALF_DAY = re.compile(r"(?<=[0-9])([ap])\.?m\.?$", re.IGNORECASE)
"""The half of a day behind a time."""
DAPO_SEARCHED_CHARS = 300
"""Characters at the end of a text that are searched for `Answer:`, as in DAPO."""


def verify_anywhere(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    r"""Compare the last `\boxed{}`, or else the answer stated or in mathematics at the end of the text."""
    final, truths = final_text(text), true_answers(ground_truth)
    answer = extract_boxed(final)
    if answer is not None:
        return _compare(answer, ground_truth)
    end = _end_of(final)
    stated = extract_stated(end) or _last_formula(end)
    stated = None if stated is None else without_trailing_remark(stated)
    if stated is not None and is_parsed(stated):
        return _compare(stated, ground_truth)
    number = read_last(end) if stated is None else read_answer(stated)
    extracted = stated if number is None else number_text(number.value, end)
    quantities = [quantity for truth in truths if (quantity := parse_quantity(truth)) is not None]
    if number is not None and len(quantities) == len(truths):
        return binary_score(any(same_number(number, quantity) for quantity in quantities), extracted)
    return binary_score(_contains_correct(end, truths), canonical_answer(extracted))


def verify_boxed(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    r"""Compare the last `\boxed{}`; a text without one is wrong."""
    return _compare(extract_boxed(final_text(text)) or extract_boxed(text), ground_truth)


def verify_answer_line(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the rest of the line after the last `Answer:` in the last 300 characters (Yu et al. 2025, DAPO)."""
    answer = extract_stated(final_text(text)[-DAPO_SEARCHED_CHARS:])
    return _compare((extract_boxed(answer) or answer) if answer else None, ground_truth)


def verify_geometry3k(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    r"""Score 0.9 for the value in `\boxed{}`, 0.1 for `<think>…</think>` before it, as in verl."""
    value = verify_boxed(text, ground_truth, extra)
    form = float("</think>" in text and has_format("boxed", text.partition("</think>")[2]) and "<think>" in text)
    return Score(0.9 * value.score + 0.1 * form, value.extracted_answer, {"acc": value.score, "form": form})


def _compare(answer: str | None, ground_truth: Any) -> Score:
    truths = true_answers(ground_truth)
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return Score(WRONG)
    return binary_score(any(equal_value(answer, truth) for truth in truths), canonical_answer(answer))


def true_answers(ground_truth: Any) -> list[str]:
    r"""Return the accepted answers, the content of `\boxed{}` of those that have one.

    Raises:
        GroundTruthError: one is empty or too long to be compared.
    """
    return [_true_answer(accepted) for accepted in accepted_answers(ground_truth)]


@lru_cache(maxsize=1024)
def _true_answer(accepted: str) -> str:
    truth = extract_boxed(accepted) or accepted
    if not strip_formatting(truth).strip("$"):
        raise GroundTruthError("the row has no ground truth: it is empty")
    if len(truth) > MAX_ANSWER_CHARS:
        limit = f"has {len(truth)} characters, of at most {MAX_ANSWER_CHARS}"
        raise GroundTruthError(f"the ground truth {limit}: {truth[:80]!r}; give the answer only, or box it")
    return truth


def equal_value(answer: str, ground_truth: str) -> bool:
    """Return whether two answers have the same value."""
    if _plain(answer) == _plain(ground_truth):
        return True
    a, b = parse_quantity(answer), parse_quantity(ground_truth)
    if a is not None and b is not None and not (a.unit or b.unit):
        return same_number(a, b)
    result = compare(answer, ground_truth)
    return math_verify_check.equal_answers(answer, ground_truth) if result is None else result


def _plain(answer: str) -> str:
    """Return an answer without formatting and text commands, `pm` for `P.M.`."""
    plain = strip_formatting(TEXT.sub(r" \1 ", answer) if "\\" in answer else answer)
    return HALF_DAY.sub(lambda match: f"{match[1]}m".lower(), plain)


def _contains_correct(text: str, truths: Sequence[str]) -> bool:
    """Return whether math-verify finds a correct answer in a text without a box."""
    if not any(sign.isdigit() for sign in text) and "$" not in text and "\\" not in text:
        answer = strip_formatting(extract_stated(text) or text)
        return any(answer == strip_formatting(truth) for truth in truths)
    return any(math_verify_check.matches(text, truth) for truth in truths)


def _end_of(text: str) -> str:
    """Return the end of a text, cut between words."""
    if len(text) <= MAX_SEARCHED_CHARS:
        return text
    return text[-MAX_SEARCHED_CHARS:].partition(" ")[2]


def _last_formula(text: str) -> str | None:
    """Return the last mathematics between dollar signs if no number follows."""
    formulas = list(FORMULA.finditer(text))
    if not formulas or any(sign.isdigit() for sign in text[formulas[-1].end() :]):
        return None
    return next(group for group in formulas[-1].groups() if group is not None)


def canonical_answer(answer: str | None) -> str | None:
    """Return the form in which an answer is counted in a majority vote: numbers by value, others as written."""
    if answer is None:
        return None
    quantity = parse_quantity(answer)
    value = parsed_value(answer) if quantity is None else quantity.value
    written = strip_formatting(answer)
    return number_text(value, written) if isinstance(value, Fraction) else written


def preload() -> None:
    """Load before forking everything that is slow to load."""
    # math-verify warns in each process that its timeouts are disabled
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for answer, ground_truth in EXAMPLES:
        compare(answer, ground_truth)
        math_verify_check.matches(f"\\boxed{{{answer}}}", ground_truth)
