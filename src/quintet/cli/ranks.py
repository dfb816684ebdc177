"""As which of several processes a command runs: one conducts and speaks, the others follow."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING

from quintet import __version__
from quintet.config import Composed
from quintet.config.native import Experiment
from quintet.config.started import Started, started
from quintet.errors import MachineError, UserError

if TYPE_CHECKING:
    from quintet.runtime.conducting import Conductor

__all__ = ["hushed", "on_all_ranks"]

SPEAKER_SECONDS = 10.0
"""How long a fault is left to the first process of the machine to tell."""


@contextmanager
def hushed() -> Iterator[None]:
    """Beside the first process of a machine nothing is said of what all of them find: no remark, no fault of the
    user's, unless after a while it is this one's alone. Defects keep their traceback."""
    here = started()
    if here.local_rank == 0:
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    except UserError as error:
        sys.exit(_told_late(error, here.rank))


def _told_late(error: UserError, rank: int) -> int:
    """Tell what the first rank tells if it has it, too, and give the exit status: torchrun ends all at the first that
    ends, and that must be the one that speaks."""
    time.sleep(SPEAKER_SECONDS)
    print(f"quintet: rank {rank}: {error}", file=sys.__stderr__)
    return error.exit_status


def on_all_ranks(composed: Composed, run: Callable[[Conductor | None], int]) -> int:
    """Run it on rank 0, with the others beside it where torchrun started several; gives the exit status.

    Raises:
        MachineError: the ranks don't find each other.
    """
    here = started()
    if here.size == 1:
        return run(None)
    return _among(here, composed.experiment, run)


def _among(here: Started, config: Experiment, run: Callable[[Conductor | None], int]) -> int:
    from quintet.runtime.conducting import Conductor
    from quintet.runtime.following import follow
    from quintet.training.meeting import meet

    meeting = meet(here, _told(config), config.placement.join_timeout_seconds)
    try:
        with meeting.watched(partial(_give_up, here.rank)):
            if here.rank:
                return _following(lambda: follow(config, meeting), here.rank)
            conductor = Conductor(config, meeting)
            try:
                return run(conductor)
            finally:
                conductor.stop()
    finally:
        meeting.leave()


def _give_up(rank: int, told: str) -> None:
    """End this process as it stands, which waits for a rank that is no more: nothing else gets through to it."""
    said = f"{told}, and a run needs all of its ranks" if rank == 0 else f"rank {rank} ends: {told}"
    print(f"quintet: {said}", file=sys.__stderr__, flush=True)
    os._exit(MachineError.exit_status)


def _following(run: Callable[[], None], rank: int) -> int:
    """The exit status of a rank that follows; its own faults are told."""
    from quintet.training.meeting import LostRank

    try:
        run()
    except LostRank as error:
        print(f"quintet: {error}", file=sys.__stderr__)
        return error.exit_status
    except UserError as error:
        return _told_late(error, rank)
    return 0


def _told(config: Experiment) -> str:
    """A rank's configuration, as short as can be."""
    text = f"{__version__} {sys.version_info[:2]} {config.model_dump_json()}"
    return hashlib.sha256(text.encode()).hexdigest()
