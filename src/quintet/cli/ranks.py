"""As which of several processes a command runs: one conducts, the others follow."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from quintet import __version__
from quintet.config import Composed
from quintet.config.native import Experiment
from quintet.config.started import Started, started

if TYPE_CHECKING:
    from quintet.runtime.conducting import Conductor

__all__ = ["on_all_ranks"]


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
        if here.rank:
            follow(config, meeting)
            return 0
        conductor = Conductor(config, meeting)
        try:
            return run(conductor)
        finally:
            conductor.stop()
    finally:
        meeting.leave()


def _told(config: Experiment) -> str:
    """A rank's configuration, as short as can be."""
    text = f"{__version__} {sys.version_info[:2]} {config.model_dump_json()}"
    return hashlib.sha256(text.encode()).hexdigest()
