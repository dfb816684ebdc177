"""Numbers, exactly or within a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from quintet.rewards.reading import answered, number, numbers, plain
from quintet.rewards.score import WRONG, Score, right, truths

__all__ = ["judge"]


def judge(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    """The number of the answer, wherever it stands, else the last one of it.

    `extra["absolute_tolerance"]` and `extra["relative_tolerance"]` (a share of the right number) allow for a
    difference; without them the two are compared exactly.

    Raises:
        ValueError: what is right is no number, or a tolerance is none.
    """
    found = _read(answered(text))
    if found is None:
        return Score(WRONG)
    value, written = found
    return right(any(_near(value, _wanted(one), extra) for one in truths(truth)), written)


def _read(answer: str) -> tuple[Fraction, str] | None:
    for written in (plain(answer), *reversed(numbers(answer)[-1:])):
        value = number(written)
        if value is not None:
            return value, str(value)
    return None


def _wanted(truth: str) -> Fraction:
    value = number(plain(truth))
    if value is None:
        raise ValueError(f"what is right is no number: {truth[:80]!r}")
    return value


def _near(value: Fraction, wanted: Fraction, extra: Mapping[str, Any]) -> bool:
    absolute, relative = (_tolerance(extra.get(f"{kind}_tolerance", 0)) for kind in ("absolute", "relative"))
    return abs(value - wanted) <= max(absolute, relative * abs(wanted))


def _tolerance(given: Any) -> Fraction:
    value = number(str(given))
    if value is None or value < 0:
        raise ValueError(f"a tolerance is a number of at least 0: {given!r}")
    return value
