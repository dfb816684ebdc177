"""The ranks beside rank 0: each does what it is told until it is told to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from quintet.config.native import Experiment
from quintet.runtime.calls import Call, hear
from quintet.runtime.performing import Performer
from quintet.training.meeting import LostRank, Meeting

__all__ = ["follow"]


def follow(config: Experiment, meeting: Meeting) -> None:
    """Take part in every call of rank 0 until it says that this was all. Wishes to stop are for rank 0, which ends
    the run as a whole.

    Raises:
        LostRank: another rank has ended before that.
    """
    performer = Performer(config, meeting.ranks)
    with _deaf(), _named(meeting):
        while (call := _heard(meeting)).method != "stop":
            found = performer.perform(call)
            for _ in found if isinstance(found, Iterator) else ():
                pass  # weights are gathered by all ranks, and taken by the first


@contextmanager
def _deaf() -> Iterator[None]:
    """A terminal and torchrun send their signals to all ranks; the first answers them."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heard(meeting: Meeting) -> Call:
    return hear(meeting.line)


@contextmanager
def _named(meeting: Meeting) -> Iterator[None]:
    """Faults inside say which rank has them."""
    rank = meeting.ranks.rank
    try:
        yield
    except RuntimeError as error:
        if told := meeting.ended(error):
            raise LostRank(f"rank {rank} ends: {told}") from error
        error.add_note(f"on rank {rank}")
        raise
    except BaseException as error:
        error.add_note(f"on rank {rank}")
        raise
