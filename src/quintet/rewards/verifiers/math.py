"""Mathematics by value: plain numbers at once, everything else by `math-verify` (Hugging Face 2025).

Its own time-outs are off: they need the main thread and don't end a long multiplication. Some answers keep it busy for
ever (a tower of powers); the process that judges is killed then, see `quintet.rewards.pool`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quintet.rewards.form import has_form
from quintet.rewards.reading import boxed, number, numbers, plain, stated
from quintet.rewards.score import WRONG, Score, right, truths

__all__ = ["anywhere", "equal", "geometry", "in_a_box", "on_a_line", "warm"]

LONGEST_READ = 2000
"""Characters at the end of a text without a box in which an answer is looked for."""
LONGEST_ANSWER = 1000
"""Characters of an answer; a longer one is wrong."""
EXAMPLES = (
    ("x+1", "(1,2)"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\sqrt{2}+1", "3"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"(-\infty,2]", r"(-\infty, 2]"),
    (r"\{1,\frac{3}{2}\}", r"\{\frac{3}{2},1\}"),
    (r"\log_{2} 8", "3"),
    (r"\frac{\pi}{2}", r"90^\circ"),
    (r"\text{east}", "west"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    ("x=4", r"5\text{ cm}"),
)
"""Pairs that come by what math-verify and sympy load and remember on first use."""
DAPO_READ = 300
"""Characters at the end of a text in which `Answer:` is looked for, as DAPO's rules have it."""


def anywhere(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    r"""The last `\boxed{}`, else what math-verify finds at the end of the text."""
    found = boxed(text)
    if found is None:
        found = _ended(text)
        return right(_any_found(found, truth), _name(stated(found) or next(reversed(numbers(found)), None)))
    return _compared(found, truth)


def in_a_box(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    r"""The last `\boxed{}`; a text without one is wrong."""
    return _compared(boxed(text), truth)


def on_a_line(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    """What follows the last `Answer:` on its line, in the last 300 characters (Yu et al. 2025, DAPO)."""
    found = stated(text[-DAPO_READ:])
    return _compared((boxed(found) or found) if found else None, truth)


def geometry(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    r"""0.9 for the value in `\boxed{}`, 0.1 for `<think>…</think>` before it, as verl judges Geometry3K."""
    judged = in_a_box(text, truth, extra)
    form = float("</think>" in text and has_form("boxed", text.partition("</think>")[2]) and "<think>" in text)
    return Score(0.9 * judged.score + 0.1 * form, judged.predicted, {"acc": judged.score, "form": form})


def _compared(found: str | None, truth: Any) -> Score:
    if not found or len(found) > LONGEST_ANSWER:
        return Score(WRONG)
    return right(any(equal(found, one) for one in truths(truth)), _name(found))


def equal(answer: str, truth: str) -> bool:
    """Whether two answers have the same value."""
    truth = boxed(truth) or truth
    mine, theirs = plain(answer), plain(truth)
    if mine == theirs:
        return True
    a, b = number(mine), number(theirs)
    if a is not None and b is not None:
        return a == b
    return _verified(f"\\boxed{{{answer}}}", truth)


def _any_found(text: str, truth: Any) -> bool:
    """Whether math-verify finds one of the right answers in a text without a box."""
    if not any(sign.isdigit() for sign in text) and "$" not in text and "\\" not in text:
        return any(plain(stated(text) or text) == plain(one) for one in truths(truth))
    return any(_verified(text, boxed(one) or one) for one in truths(truth))


def _ended(text: str) -> str:
    """The end of a text, cut between words."""
    if len(text) <= LONGEST_READ:
        return text
    return text[-LONGEST_READ:].partition(" ")[2]


def _verified(text: str, truth: str) -> bool:
    from math_verify import parse, verify

    return bool(verify(_gold(truth), parse(text, parsing_timeout=None), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _gold(truth: str) -> Any:
    """What is right, parsed; a group of answers shares it."""
    from math_verify import parse

    return parse(f"\\boxed{{{truth}}}", parsing_timeout=None) or parse(truth, parsing_timeout=None)


def _name(found: str | None) -> str | None:
    """How an answer is counted in a vote: numbers by value, all else as it is written."""
    if found is None:
        return None
    value = number(plain(found))
    return plain(found) if value is None or max(value.denominator, abs(value.numerator)) > 10**30 else str(value)


def warm() -> None:
    """Load what the first answer would wait for."""
    # it warns at every process that its time-outs are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for answer, truth in EXAMPLES:
        equal(answer, truth)
