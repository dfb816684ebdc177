"""Math answers found where ROLL's `MathRuleRewardWorker` looks for them, and compared with `math-verify`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quintet.rewards.score import WRONG, Score, accepted_answers, binary_score
from quintet.rewards.verifiers import math
from quintet.rewards.verifiers.options import MathRuleOptions
from quintet.rewards.verifiers.roll_text import remove_special_tokens

BOXES = (r"\boxed\{", r"\boxed{")
"""Starts of a box; the second counts if there is none of the first."""
THINK, THINK_END, PARAGRAPH = "<think>", "</think>", "\n\n"
REMOVED = ("<|endoftext|>", "<pad>")


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any], options: MathRuleOptions) -> Score:
    """Score 1 for the value of the ground truth in the last box of the answer, or else anywhere in the answer."""
    answer = answer_part(remove_special_tokens(text, REMOVED), options.thinking_started)
    boxed = last_boxed(answer)
    parsed = _parse(answer if boxed is None else f"${boxed}$", fallback_mode="no_fallback")
    if not parsed:
        return Score(WRONG)
    correct = any(_is_equal(_parse_truth(accepted), parsed[0]) for accepted in accepted_answers(ground_truth))
    return binary_score(correct, str(parsed[0]) if boxed is None else boxed.strip())


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


def _parse(text: str, **options: Any) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=None, **options))


@lru_cache(maxsize=1024)
def _parse_truth(ground_truth: str) -> list[Any]:
    """Parse the ground truth, once for all responses of a group."""
    return _parse(f"${ground_truth}$")


def _is_equal(truth: list[Any], answer: Any) -> bool:
    from math_verify import verify

    return bool(truth) and bool(verify(truth[0], answer, timeout_seconds=None))


def preload() -> None:
    """Load before forking everything that is slow to load."""
    math.preload()
