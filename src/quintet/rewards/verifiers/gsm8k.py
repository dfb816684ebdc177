"""GSM8K (Cobbe et al. 2021): the number after `####`, compared as verl does, as text without commas and dollars."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quintet.rewards.reading import numbers
from quintet.rewards.score import WRONG, Score, right, truths

__all__ = ["flexible", "strict"]

MARKED = re.compile(r"#### (-?[0-9.,]+)")


def strict(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    """The first `#### <number>`; a text without one is wrong, which teaches the form too."""
    found = MARKED.search(text)
    return Score(WRONG) if found is None else _same(_bare(found[1]), truth)


def flexible(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    """The last number of the text."""
    found = numbers(text)
    return _same(found[-1], truth) if found else Score(WRONG)


def _same(found: str, truth: Any) -> Score:
    return right(any(found == _solution(one) for one in truths(truth)), found)


def _solution(truth: str) -> str:
    """The number of a truth, which may be GSM8K's whole solution."""
    return _bare(truth.rpartition("####")[2])


def _bare(written: str) -> str:
    return written.strip().replace(",", "").replace("$", "")
