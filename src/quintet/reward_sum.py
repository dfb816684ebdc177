"""Sums of rewards that do not depend on the order of the terms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Context, Decimal
from functools import reduce

EXACT = Context(prec=700)
"""Digits of the sum of any floats."""


def sum_rewards(rewards: Iterable[float]) -> float:
    """Return the sum of rewards as the decimal numbers that they print as, rounded once: 0.1 and 0.2 are 0.3, and the
    order does not matter.

    A sum of at most half of the spacing of floats at its terms, Σ ulp(r) / 2, is 0.
    """
    terms = [float(reward) for reward in rewards]
    total = sum(terms, 0.0)
    if len(terms) < 2 or not math.isfinite(total):
        return total
    total = float(reduce(EXACT.add, (Decimal(repr(term)) for term in terms)))
    return total if abs(total) > sum(map(math.ulp, terms)) / 2 else 0.0
