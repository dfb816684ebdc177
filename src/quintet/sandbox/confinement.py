"""Restriction of processes that read texts of a model or templates, but run no programs."""

from __future__ import annotations

import os
import sys

from quintet.sandbox import landlock, seccomp


def restrict_process(memory: int, *, confined: bool = True) -> None:
    """Hide and limit the memory of this process, bytes, and confine it if that is possible.

    The kernel ends this process before others when no memory is left. Where it has Landlock, a confined process only
    reads the directories of Python and of its search path.
    """
    seccomp.die_first_without_memory()
    if sys.platform == "linux":
        seccomp.limit_resources(memory)
    try:
        if confined:
            seccomp.limit_threads()
            landlock.restrict_reading([*landlock.python_paths(), *filter(os.path.isdir, sys.path)])
            seccomp.confine()
    except seccomp.ConfinementError:
        return
