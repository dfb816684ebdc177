"""Math answers found where ROLL's `MathRuleRewardWorker` looks for them, and compared with `math-verify`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quintet.rewards.math_answers.comparison import compare
from quintet.rewards.math_answers.math_verify_check import parsed, same
from quintet.rewards.score import WRONG, Score, binary_score
from quintet.rewards.verifiers import math
from quintet.rewards.verifiers.options import MathRuleOptions
from quintet.rewards.verifiers.roll_text import remove_special_tokens

BOXES = (r"\boxed\{", r"\boxed{")
"""Starts of a box; the second counts if there is none of the first."""
THINK, THINK_END, PARAGRAPH = "<think>", "</think>", "\n\n"
REMOVED = ("<|endoftext|>", "<pad>")


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any], options: MathRuleOptions) -> Score:
    """Score 1 for the value of the ground truth in the last box of the answer, or else anywhere in the answer.

    Raises:
        ValueError: a ground truth is empty or too long.
    """
    truths = math.true_answers(ground_truth)
    answer = answer_part(remove_special_tokens(text, REMOVED), options.thinking_started)
    boxed = last_boxed(answer)
    readings = parsed(answer if boxed is None else f"${boxed}$", fallback_mode="no_fallback")
    if not readings:
        return Score(WRONG)
    correct = any(_is_equal(truth, boxed, readings[0]) for truth in truths)
    return binary_score(correct, math.canonical_answer(str(readings[0]) if boxed is None else boxed))


def answer_part(text: str, thinking_started: bool) -> str:
    """Return the text after `</think>`, or else its last paragraph if it has several.

    It is empty if there are two `</think>`, or a `<think>` elsewhere than at the start, or, if `thinking_started`,
    anywhere.
    """
    allowed = 0 if thinking_started or not text.startswith(THINK) else text.count(THINK)
    if text.count(THINK_END) > 1 or text.count(THINK) > allowed:
        return ""
    separator = THINK_END if THINK_END in text else PARAGRAPH
    _, separator_found, rest = text.rpartition(separator)
    return rest.strip() if separator_found else ""


def last_boxed(text: str) -> str | None:
    """Return the content of the last box, None if it is not closed; braces between double quotes do not count."""
    opening = next((opening for opening in BOXES if opening in text), None)
    if opening is None:
        return None
    content = text.rpartition(opening)[2]
    depth, quoted = 0, False
    for position, sign in enumerate(content):
        quoted ^= sign == '"'
        if quoted or sign not in "{}":
            continue
        if sign == "}" and depth == 0:
            return content[:position]
        depth += 1 if sign == "{" else -1
    return None


@lru_cache(maxsize=1024)
def _parse_truth(ground_truth: str) -> list[Any]:
    """Parse the ground truth, once for all responses of a group."""
    return parsed(f"${ground_truth}$")


def _is_equal(ground_truth: str, boxed: str | None, reading: Any) -> bool:
    """Compare by math-verify as ROLL does, except that what differs by `math`'s exact comparison is wrong."""
    if boxed is not None and compare(boxed, ground_truth) is False:
        return False
    return same(_parse_truth(ground_truth)[:1], [reading])


def preload() -> None:
    """Load before forking everything that is slow to load."""
    math.preload()
