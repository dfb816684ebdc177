"""Divisors, for hints at values that would fit."""

import math
from collections.abc import Iterable

MAX_SEARCHED = 10**6
"""Divisors up to here are searched, and their counterparts: a hint is not worth more time."""


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending; of numbers above 10¹² only those a search up to 10⁶ finds."""
    small = [n for n in range(1, min(math.isqrt(number), MAX_SEARCHED) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest_divisor(number: int, target: int) -> int:
    """Return the divisor of a number that is nearest to `target`, the smaller of two.

    >>> nearest_divisor(128, 100)
    128
    """
    return min(divisors(number), key=lambda n: (abs(n - target), n))


def nearest_number(target: int, valid: Iterable[int]) -> int | None:
    """Return the valid number nearest to `target`, the smaller of two; None if there is none."""
    return min(sorted(valid), key=lambda n: abs(n - target), default=None)


def nearest_multiple(number: int, unit: int) -> int:
    """Return the multiple of `unit` nearest to a number, at least `unit`."""
    return max(1, round(number / unit)) * unit
