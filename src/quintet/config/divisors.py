"""Numbers that divide, for hints at what would fit."""

from __future__ import annotations

import math

__all__ = ["nearest_divisor"]

MOST = 10**6
"""Divisors up to here are looked for, and their counterparts: a hint isn't worth more time."""


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of a number that is nearest to what was wanted, the smaller of two.

    >>> nearest_divisor(128, 100)
    128
    """
    small = [n for n in range(1, min(math.isqrt(number), MOST) + 1) if number % n == 0]
    return min([*small, *(number // n for n in small)], key=lambda n: (abs(n - wanted), n))
