"""Conditions with three values: true, false, and unknown."""

from __future__ import annotations

from collections.abc import Iterable

Status = bool | None
"""Whether a command succeeds; None if that is unknown."""


def negated(status: Status) -> Status:
    """Return the opposite of a condition."""
    return None if status is None else not status


def all_of(statuses: Iterable[Status]) -> Status:
    """Return whether all conditions are true: false as soon as one is."""
    values = list(statuses)
    return False if False in values else None if None in values else True


def any_of(statuses: Iterable[Status]) -> Status:
    """Return whether one condition is true: true as soon as one is."""
    return negated(all_of(map(negated, statuses)))


def runs_after(earlier: Status, condition: Status) -> Status:
    """Return whether a branch runs, of which an earlier one ran or not."""
    return all_of((negated(earlier), condition))
